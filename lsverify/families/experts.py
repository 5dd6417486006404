"""Full attention with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from lsverify.families.sizes import GROUPED, SHARED


def _mixtral() -> PreTrainedConfig:
    """2 of 8 experts in every layer."""
    return MixtralConfig(
        **GROUPED | {"intermediate_size": 32},
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
        **SHARED,
    )


def _qwen3_moe() -> PreTrainedConfig:
    """Layer 1 dense, the others with 2 of 8 experts; a norm on each query and key head."""
    return Qwen3MoeConfig(
        **GROUPED,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        **SHARED,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
