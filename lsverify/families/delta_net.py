"""Linear attention by a gated delta rule, beside full attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import (
    KimiLinearConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from lsverify.families.sizes import GROUPED, SHARED

_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
_HALF_ROTARY: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}
_THREE_POSITIONS: dict[str, Any] = _HALF_ROTARY | {"mrope_section": [2, 1, 1]}


def _qwen3_5() -> PreTrainedConfig:
    """Gated delta net and full attention 3:1, twice as many value heads as key heads, kernel-4 convolution."""
    return Qwen3_5TextConfig(
        **GROUPED, **_DELTA_NET, rope_parameters=dict(_THREE_POSITIONS), **SHARED
    )


def _qwen3_5_moe() -> PreTrainedConfig:
    """The same with 2 of 8 experts and a gated shared one in every layer."""
    return Qwen3_5MoeTextConfig(
        **GROUPED, **_DELTA_NET, **_EXPERTS, rope_parameters=dict(_THREE_POSITIONS), **SHARED
    )


def _qwen3_next() -> PreTrainedConfig:
    """Its elder: queries, keys, values and gates interleaved by key head in one projection; layer 1 dense."""
    return Qwen3NextConfig(
        **GROUPED,
        **_DELTA_NET,
        **_EXPERTS,
        mlp_only_layers=[1],
        rope_parameters=dict(_HALF_ROTARY),
        **SHARED,
    )


def _kimi_linear() -> PreTrainedConfig:
    """A delta rule with a decay for every channel, beside latent attention without positions; one dense layer."""
    return KimiLinearConfig(
        hidden_size=48,
        intermediate_size=80,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        linear_head_dim=12,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        **SHARED,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "qwen3_next": _qwen3_next,
    "kimi_linear": _kimi_linear,
}
