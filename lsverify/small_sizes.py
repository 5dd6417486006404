"""Small values for the arguments of the library's config classes, by the names that those classes use.

One width, one head count and one head size fit all that is derived from them; windows and chunks are shorter than
prompts; experts are few. What no rule names stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from lsverify.families.sizes import VOCABULARY

WIDTH, HEADS, HEAD_DIM = 64, 4, 16


def _at_most(limit: int) -> Callable[[Any, PreTrainedConfig], Any]:
    return lambda value, _: min(value, limit)


def _key_heads(value: Any, default: PreTrainedConfig) -> int:
    heads = next(
        (h for n in ("num_attention_heads", "n_heads", "n_head") if (h := getattr(default, n, 0))),
        value,
    )
    return HEADS if value == heads else min(value, HEADS // 2)


def _head_dim(value: Any, default: PreTrainedConfig) -> int:
    """The width of a head; where latent attention rotates a slice only, the tables' `head_dim` is that slice's."""
    rotated = getattr(default, "qk_rope_head_dim", None)
    return small_value("qk_rope_head_dim", rotated, default) if value == rotated else HEAD_DIM


def _ssm_heads(value: Any, default: PreTrainedConfig) -> int:
    expand = getattr(default, "expand", None)
    return HEADS if expand is None else int(expand * WIDTH) // HEAD_DIM


# The first rule that fits a name decides; a value of None or 0 stays, since it switches something off.
_RULES: tuple[tuple[str, Any], ...] = (
    (r"(unpadded_|decoder_)?vocab_size(_per_layer_input)?", VOCABULARY),
    (r"hidden_size|d_model|n_embd|emb(edding)?_dim|embedding_size|word_embed_proj_dim", WIDTH),
    (r"(input|output)_embedding_size|attention_hidden_size|lru_width|ple_embed_dim", WIDTH),
    (r"hidden_size_per_layer_input", 8),
    (r"moe_.*intermediate_size|shared_.*intermediate_size|expert_ffn_hidden_size", 32),
    (r"(dense_)?intermediate_size(_mlp)?|.*ffn_dim|ffn_hidden_size|dff|dim_ff|n_inner|d_inner", 80),
    (r"feed_forward_size", 80),
    (r"(swa_|global_)?num_(global_)?key_value_heads|num_kv_heads|kv_n_heads", _key_heads),
    (r"mamba_n(um)?_heads|n_mamba_heads", 8),
    (r"mamba_d_ssm", 2 * WIDTH),
    (r"linear_num_key_heads", _at_most(2)),
    (r"num_heads", _ssm_heads),
    (r"(swa_|linear_)?num_(attention_|value_|(en|de)coder_attention_)?heads(_per_layer)?", HEADS),
    (r"linear_num_value_heads|n_heads?|((en|de)coder_)?attention_heads", HEADS),
    (r"index_n_heads", 32),
    (r"index_(topk|top_k)|keep_window_size", 8),
    (r"index_topk_blocks", 2),
    (r"index_block_size", 4),
    (r"head_dim", _head_dim),
    (r"qk_rope_head_dim", 8),
    (r"qk_head_dim", HEAD_DIM + 8),
    (
        r"(swa|global|index|v|qk_nope|linear|linear_key|linear_value|mamba|attention)_head_dim",
        HEAD_DIM,
    ),
    (r"dim_head|d_head|kv_channels|attention_head_size|mamba_d_head|mamba_headdim", HEAD_DIM),
    (r"q_lora_rank", 24),
    (r"time_step_rank|mamba_dt_rank", 4),
    (r".*_rank|hc_lowrank", _at_most(16)),
    (r"(n_routed|num|num_local|moe_num)_experts", _at_most(8)),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k", _at_most(2)),
    (r"zero_expert_num", 2),
    (r"n_group|num_expert_group", _at_most(2)),
    (r"topk_group", 1),
    (r"n_groups|mamba_n_?groups|o_groups", _at_most(2)),
    (r"(attention_|local_)?(sliding_)?window(_size)?|attention_chunk_size|local_attention", 8),
    (r"rel_extent|(mamba_)?chunk_size|block_size|attention_window_size", 8),
    (r"(ssm_)?state_size|mamba_d_state", 8),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"(nemo_conv|ext_pw_out|depthwise_separable_out)_channels?", 16),
    (r"encoder_hash_byte_group_vocab", VOCABULARY),
    (r"hidden_size_global|encoder_cross_output_size", WIDTH),
    (r"router_hidden_size", 16),
    (r"(max|n)_position(s|_embeddings)|max_seq_len|context_length|n_ctx", _at_most(2048)),
    (r".*(dropout|pdrop|layerdrop|drop_prob|dropout_p|jitter).*", lambda value, _: 0.0 * value),
)
_COMPILED = tuple((re.compile(pattern), small) for pattern, small in _RULES)
_SWITCHES: dict[str, bool] = {
    "tie_word_embeddings": False,
    "is_decoder": True,
    "add_cross_attention": False,
    "use_cache": True,
}


def small_value(name: str, value: Any, default: PreTrainedConfig) -> Any:
    """The small value for one argument; `value` itself where no rule has one."""
    if name in _SWITCHES:
        return _SWITCHES[name]
    if name.endswith("_token_id"):
        return None if _takes_none(name, default) else 1
    if value is None and name in ("head_dim", "num_key_value_heads"):
        return HEAD_DIM if name == "head_dim" else HEADS
    if not value or isinstance(value, bool | str):
        return value
    for pattern, small in _COMPILED:
        if pattern.fullmatch(name):
            if isinstance(value, dict | list | tuple):
                return value
            return small(value, default) if callable(small) else small
    return value


def small_rope(rope: Any, head_dim: int) -> Any:
    """Rotary parameters as they are, but that a division of the frequencies must add up to their new number."""
    if not isinstance(rope, dict):
        return None
    if rope and all(isinstance(part, dict) for part in rope.values()):
        return {kind: small_rope(part, head_dim) for kind, part in rope.items()}
    section = rope.get("mrope_section")
    if section is None:
        return dict(rope)
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    share = pairs // len(section)
    rest = [share] * (len(section) - 1)
    return rope | {"mrope_section": [pairs - sum(rest), *rest]}


def _takes_none(name: str, default: PreTrainedConfig) -> bool:
    kinds = [str(field.type) for field in fields(default) if field.name == name]
    return not kinds or "None" in kinds[0]
