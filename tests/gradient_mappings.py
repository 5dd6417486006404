"""Gradient mappings with the names of a llama, for the tests of the comparison."""

import torch

from lsverify.slices import Slice

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def gradients(seed=0, layers=3, hidden=8):
    """A gradient mapping with the names of a llama."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    named = {"model.embed_tokens.weight": drawn(12, hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        named |= {f"{prefix}.self_attn.{n}.weight": drawn(hidden, hidden) for n in ATTENTION}
        named[f"{prefix}.mlp.up_proj.weight"] = drawn(2 * hidden, hidden)
        named[f"{prefix}.input_layernorm.weight"] = drawn(hidden)
    return named | {"lm_head.weight": drawn(12, hidden)}


def noisy(named, size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: g + size * torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in named.items()
    }


def copy(named):
    return {name: g.clone() for name, g in named.items()}


def thirds(size):
    return [Slice(r, (slice(i * size, (i + 1) * size),)) for i, r in enumerate("qkv")]
