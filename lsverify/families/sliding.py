"""Sliding-window attention, alone or beside full attention; the window is 8 tokens, which most prompts exceed."""

from __future__ import annotations

from collections.abc import Callable

from transformers import Gemma3TextConfig, GptOssConfig, MistralConfig, PreTrainedConfig

from lsverify.families.sizes import GROUPED, SHARED

WINDOW = 8


def _mistral() -> PreTrainedConfig:
    """Sliding-window attention in every layer."""
    return MistralConfig(**GROUPED, sliding_window=WINDOW, **SHARED)


def _gemma3() -> PreTrainedConfig:
    """Sliding and full layers with a rotary base each, norms before and after every block, scaled embeddings."""
    return Gemma3TextConfig(
        **GROUPED,
        layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        **SHARED,
    )


def _gpt_oss() -> PreTrainedConfig:
    """A sink per head beside the softmax, sliding and full layers in turn, biased experts in every layer."""
    return GptOssConfig(
        **GROUPED | {"intermediate_size": 32},
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **SHARED,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}
