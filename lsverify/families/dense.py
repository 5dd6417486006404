"""Full attention and dense blocks in every layer."""

from __future__ import annotations

from collections.abc import Callable

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from lsverify.families.sizes import GROUPED, SHARED, SPECIAL, VOCABULARY


def _llama() -> PreTrainedConfig:
    """Grouped-query attention: 4 query heads on 2 key heads; untied embeddings."""
    return LlamaConfig(**GROUPED, **SHARED)


def _qwen3() -> PreTrainedConfig:
    """Like llama, with a norm on each query and key head."""
    return Qwen3Config(**GROUPED, **SHARED)


def _gpt2() -> PreTrainedConfig:
    """Learned positions, layer norms and biases, q, k and v fused in one transposed matrix."""
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=48,
        n_head=4,
        n_layer=3,
        n_positions=512,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        tie_word_embeddings=False,
        **SPECIAL,
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
}
