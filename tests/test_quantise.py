"""The NF4 round trip: sixteen values a block, the largest kept, and the same base in every precision."""

from __future__ import annotations

import pytest
import torch

from lsverify import models
from lsverify.quantise import BLOCK, NF4, linear_weights, quantise, round_trip


def weights(*shape, seed=0, dtype=torch.float64):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def test_the_sixteen_values_are_the_quantiles_that_the_format_is_defined_by():
    """Of a normal variable, at equal steps of probability on either side of zero, scaled to one."""
    from scipy.stats import norm

    tail = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = norm.ppf([tail + (0.5 - tail) * step / 8 for step in range(8)])
    below = -norm.ppf([tail + (0.5 - tail) * step / 7 for step in range(7)])
    expected = sorted([*above / above.max(), 0.0, *below / above.max()])
    assert pytest.approx(expected, abs=2e-4) == NF4


def test_every_block_has_sixteen_values_and_keeps_its_largest():
    weight = weights(8, 2 * BLOCK)
    restored = round_trip(weight).view(-1, BLOCK)
    for before, after in zip(weight.view(-1, BLOCK), restored, strict=True):
        scale = before.abs().max()
        codes = after / scale
        assert all(min(abs(c - v) for v in NF4) < 1e-6 for c in codes.unique().tolist())
        assert after.abs().max() == pytest.approx(scale.item(), rel=1e-6)
    # The widest gap between two values is from -1 to -0.7.
    assert (restored - weight.view(-1, BLOCK)).abs().max() <= 0.153 * weight.abs().max()
    assert not torch.equal(restored, weight.view(-1, BLOCK))


def test_a_number_becomes_the_nearest_value():
    weight = torch.zeros(BLOCK, dtype=torch.float64)
    weight[:4] = torch.tensor([1.0, 0.04, 0.039, -0.86])
    expected = torch.tensor([1.0, NF4[8], 0.0, -1.0]).double()
    assert torch.allclose(round_trip(weight)[:4], expected, atol=1e-7)


def test_twice_is_once():
    weight = weights(6, 50)
    once = round_trip(weight)
    assert torch.equal(round_trip(once), once)


def test_a_block_of_zeros_and_a_last_short_block():
    weight = torch.cat([torch.zeros(BLOCK), weights(7, dtype=torch.float32)])
    restored = round_trip(weight)
    assert restored.shape == weight.shape
    assert torch.equal(restored[:BLOCK], torch.zeros(BLOCK))
    assert restored[BLOCK:].abs().max() == weight[BLOCK:].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_base_does_not_depend_on_the_precision(dtype):
    weight = weights(4, 96).to(dtype)
    assert torch.equal(round_trip(weight.double()).to(dtype), round_trip(weight))


def test_linear_layers_and_experts_are_replaced_and_nothing_else():
    plain, rounded = (models.build("qwen3_next", seed=1) for _ in range(2))
    names = quantise(rounded)
    assert names == linear_weights(plain)
    changed = [
        name
        for name, value in plain.state_dict().items()
        if not torch.equal(value, rounded.state_dict()[name])
    ]
    assert set(changed) == set(names)
    leaves = {
        name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1] for name in names
    }
    assert {"q_proj", "o_proj", "in_proj_qkvz", "gate_up_proj", "down_proj"} <= leaves
    assert not leaves & {"lm_head", "embed_tokens", "conv1d", "gate", "norm", "q_norm"}


def test_transposed_matrices_of_gpt2_are_linear_layers():
    assert "transformer.h.0.attn.c_attn.weight" in linear_weights(models.build("gpt2", seed=0))


def test_adapters_over_a_rounded_base_have_its_values_and_are_deterministic():
    first, again, plain = (
        models.build("llama", seed=1, lora=True, quantised=quantised)
        for quantised in (True, True, False)
    )
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(first.get_parameter(name), round_trip(plain.get_parameter(name)))
    for parameter, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[parameter]), parameter
        if ".base_layer." not in parameter:
            assert torch.equal(value, plain.state_dict()[parameter]), parameter
