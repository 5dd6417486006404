"""Small seeded models of real architectures, local folders and one pretrained model, by name.

Every architecture runs the library's own model code at a size where an oracle-precision step takes milliseconds. No
parameter and no buffer that the forward pass reads is constant: norm weights are all ones at birth and biases all
zero, and a fault that swaps or skips such a tensor would stay invisible. All values come from one generator, drawn in
float64 and rounded once, so a float32 model is the rounded float64 model of the same seed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
)

from lsverify import pretrained
from lsverify.errors import InputError
from lsverify.precision import weight_dtype

VOCABULARY = 97
ATTENTION = ("sdpa", "eager")


def build(
    arch: str,
    *,
    seed: int,
    dtype: str = "float64",
    lora: bool = False,
    train: bool = True,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """A causal language model that a path can train: the tiny `arch`, a local folder, or `smollm2-135m`.

    `seed` decides every value of a tiny model and, with `lora`, of the adapters; it leaves the global random state
    alone. `dtype` is a precision of `lsverify.precision`: float64 and float32 hold for every parameter and buffer;
    bfloat16 leaves in float32 what the library keeps there; bfloat16-autocast has float32 weights. `lora` freezes the
    model under peft adapters (see `lsverify.adapters`); the model returned is then peft's wrapper. `train` chooses
    train() or eval(); every dropout is zero in both. `attention` is the library's implementation, sdpa or eager.

    Raises `InputError` for an unknown name or dtype, and for a folder that cannot be used.
    """
    weight_dtype(dtype)
    if attention not in ATTENTION:
        raise InputError(f"attention {attention!r} is not known: use one of {', '.join(ATTENTION)}")
    if arch in TINY:
        model = tiny(TINY[arch](), seed=seed, dtype=dtype, attention=attention)
    elif arch == pretrained.SMOLLM2:
        model = pretrained.smollm2(dtype=dtype, attention=attention)
    elif Path(arch).is_dir():
        model = pretrained.load(arch, dtype=dtype, attention=attention)
    else:
        raise unknown(arch)
    if lora:
        from lsverify.adapters import attach

        model = attach(model, seed=seed)
    return model.train(train)


def unknown(arch: str) -> InputError:
    """The error for a name that `build` does not know."""
    return InputError(
        f"architecture {arch!r} is not known: use one of {', '.join(sorted(TINY))}, "
        f"{pretrained.SMOLLM2}, or a local folder with config.json and safetensors weights"
    )


def tiny(
    config: PreTrainedConfig, *, seed: int, dtype: str, attention: str = "sdpa"
) -> PreTrainedModel:
    """A model of `config` with every value drawn from `seed`, on the CPU, in train()."""
    # The library initialises from the global generator, whatever is drawn over it afterwards.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        )
    # The grouped matrix product, the library's choice for experts, refuses float64.
    model.config._experts_implementation = "eager"
    pretrained.cast(model, dtype)
    redraw(model, torch.Generator().manual_seed(seed))
    return model.train()


@torch.no_grad()
def redraw(model: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter and persistent buffer of `model` a value from `generator`, in the order of their names.

    Matrices are normal with variance 1/fan-in, embeddings standard normal; vectors are spread around the value they
    have in a fresh model. Rotary frequencies (buffers that are not saved) are left alone: they follow from the config.
    """
    saved = {name for name, _ in model.named_buffers()} & set(model.state_dict())
    tensors = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in saved
    }
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, tensor in sorted(tensors.items()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        value = noise if id(tensor) in embeddings else _drawn(name, tensor, noise)
        tensor.copy_(value)
    module: Any
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            # Saved, but functions of the slope: drawn apart, a block of tokens and its tokens would decay differently.
            names = ("query_decay", "key_decay", "diagonal_decay")
            for name, value in zip(names, module.decay_factors(module.slope_rate), strict=True):
                module.get_buffer(name).copy_(value)


def _drawn(name: str, tensor: Tensor, noise: Tensor) -> Tensor:
    """A value for one tensor: its scale keeps activations and gradients of order one."""
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        # Decay rates from 0.01 to 1 a token: some heads of the delta net remember a hundred tokens, some one.
        uniform: Tensor = torch.special.erf(noise / math.sqrt(2.0))
        return math.log(0.1) + math.log(10.0) * uniform
    if leaf == "slope_rate":
        # Lightning attention's decay: positive, and a ladder over heads and layers.
        return tensor.to(torch.float64) * torch.exp(0.2 * noise)
    if leaf == "dt_bias":
        return 0.5 * noise
    if leaf == "e_score_correction_bias":
        return 0.05 * noise
    if re.search(r"\bgate\.weight$", name):
        # A router's scores must differ clearly: top-k margins then stand far above the rounding floor.
        return 2.0 * noise / math.sqrt(tensor.shape[-1])
    if tensor.ndim < 2:
        centre = torch.zeros_like(noise) if leaf == "bias" else tensor.to(torch.float64).mean()
        return centre + (0.1 if leaf == "bias" else 0.2) * noise
    # Fused experts are [experts, out, in]; a depthwise convolution is [channels, 1, kernel]: both end in the fan-in.
    return noise / math.sqrt(tensor.shape[-1])


def _llama() -> PreTrainedConfig:
    """Grouped-query attention: 4 query heads on 2 key heads; untied embeddings."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **_SPECIAL,
    )


def _mistral() -> PreTrainedConfig:
    """Sliding-window attention with a window of 8 tokens, which all but the shortest prompts exceed."""
    return MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **_SPECIAL,
    )


def _qwen3_5() -> PreTrainedConfig:
    """Gated delta net and full attention 3:1, twice as many value heads as key heads, kernel-4 convolution."""
    return Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_conv_kernel_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=8,
        max_position_embeddings=8192,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        tie_word_embeddings=False,
        **_SPECIAL,
    )


def _glm_moe_dsa() -> PreTrainedConfig:
    """MLA latents, sparse attention on the 8 best keys, one dense layer and three of 8 experts.

    Layers 0 and 2 run an indexer, 1 and 3 share the selection before them. The indexer has 32 heads, as in the family:
    its scores are sums of ReLUs, and with few heads exact ties at zero are common (with 8, at a third of all prompts
    of 200 tokens), which top-k breaks by the width it sees.
    """
    return GlmMoeDsaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        indexer_types=["full", "shared", "full", "shared"],
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        index_n_heads=32,
        index_head_dim=16,
        index_topk=8,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        **_SPECIAL,
    )


# A padding id would zero its embedding row's gradient, and no token of a tiny vocabulary is special.
_SPECIAL: dict[str, None] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen3_5": _qwen3_5,
    "glm_moe_dsa": _glm_moe_dsa,
}
