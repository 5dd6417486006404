"""Small configs of any causal language model that the library has, from the name of its type alone.

The default config says which kinds of layer a type has. `shrunk` keeps one layer of each kind, in their order, and
gives every width, head count, rank, window and expert count a small value that fits the others. The rules go by the
names that the library's configs use; the few types that no such rule fits are in `EXCEPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lsverify.errors import InputError
from lsverify.families.sizes import VOCABULARY

WIDTH, HEADS, HEAD_DIM = 64, 4, 16
FEWEST_LAYERS, MOST_LAYERS = 3, 8

_SWA_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "head_dim": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What no rule can know of a type. Arguments that are in no default config, since they are folded into others; counts
# that must add up to another count; layers that a default config leaves out though every published model has them;
# and whole arguments without which the default config builds no model.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": WIDTH,
            "ffn_hidden_size": 32,
            "moe_num_experts": 8,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 4,
        "partial_rotary_factor": 0.5,
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {f"swa_{name}": value for name, value in _SWA_LATENT.items()},
    "gemma4_text": {"global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "prophetnet": {"pad_token_id": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {
        "shape_vocab_size": VOCABULARY,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
    },
    "xlm": {"pad_token_id": 1, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
}


def model_types() -> tuple[str, ...]:
    """Every type that the installed library lists as a causal language model."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def shrunk(model_type: str) -> tuple[PreTrainedConfig, Any]:
    """A small config of `model_type` and the model class that takes it.

    For a type that wraps a language model together with encoders, these are the language model's. Raises `InputError`,
    one line, for what has no default config or does not take the small one.
    """
    default, model_class = _language_model(model_type)
    values = small_values(default) | EXCEPTIONS.get(default.model_type, {})
    try:
        return type(default)(**values), model_class
    except Exception as error:  # each config class checks itself in its own way
        raise cannot(model_type, "its config does not take small sizes", error) from error


def cannot(model_type: str, what: str, error: Exception | None = None) -> InputError:
    """The one line for a type that cannot be judged."""
    why = f" ({type(error).__name__}: {_one_line(error)})" if error else ""
    return InputError(
        f"model type {model_type!r}: {what}{why}; use a type that `lsverify archs` lists as proven, or a local folder"
    )


def _language_model(model_type: str) -> tuple[PreTrainedConfig, Any]:
    try:
        whole = CONFIG_MAPPING[model_type]()
        whole_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(whole)]
    except Exception as error:
        raise cannot(model_type, "it has no default config", error) from error
    text = whole.get_text_config(decoder=True)
    if text is whole:
        return whole, whole_class
    text_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    if text_class is None and isinstance(text, whole_class.config_class):
        text_class = whole_class
    if text_class is None:
        raise cannot(model_type, "it wraps a language model that the library has not by itself")
    return text, text_class


def small_values(default: PreTrainedConfig) -> dict[str, Any]:
    """Arguments for the class of `default` that make it small: what differs from its defaults only."""
    given = _given(default)
    layers = _layers(default, given)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, PreTrainedConfig):
            small: Any = small_values(value)
        else:
            small = _small(name, value, default)
        if small is not value:
            values[name] = small
    values |= _per_layer(given, layers, default)
    values["rope_parameters"] = _rope(getattr(default, "rope_parameters", None), values, default)
    if values["rope_parameters"] is None:
        del values["rope_parameters"]
    return values


def _given(default: PreTrainedConfig) -> dict[str, Any]:
    """The default's values of everything that its class takes as an argument."""
    # By attribute: several classes store an argument under another name.
    default.allow_global_per_layer_attribute_access = True
    return {
        field.name: getattr(default, field.name)
        for field in fields(default)
        if not field.name.startswith("_") and hasattr(default, field.name)
    }


def _takes_none(name: str, default: PreTrainedConfig) -> bool:
    kinds = [str(field.type) for field in fields(default) if field.name == name]
    return not kinds or "None" in kinds[0]


# Layers --------------------------------------------------------------------------------------------------------------

_DEPTH = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|num_blocks|((num_)?(en|de)coder_layers)|num_layers_per_stack"
)
_DENSE_FIRST = re.compile(r"first_k_dense_replace|num_dense_layers|moe_layer_start_index")
_BY_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layers")
_INDICES = re.compile(r".*(_layers|_layer_ids|_idxs)")


def _depth(given: Mapping[str, Any]) -> int:
    depths = [v for n, v in given.items() if _DEPTH.fullmatch(n) and isinstance(v, int)]
    listed = [len(v) for n, v in given.items() if n in _BY_LAYER and v]
    return max(listed or depths, default=0)


def _layers(default: PreTrainedConfig, given: Mapping[str, Any]) -> list[int]:
    """Which of the default's layers to keep, ascending: one of each kind, and three at least."""
    depth = _depth(given)
    kinds = [_kind(i, depth, given) for i in range(depth)]
    kept = [i for i in range(depth) if kinds[i] not in kinds[:i]]
    if len(kept) > MOST_LAYERS:  # then no two are alike in all: one for each value of each trait
        traits = list(zip(*kinds, strict=True))
        kept = sorted({trait.index(value) for trait in traits for value in set(trait)})[
            :MOST_LAYERS
        ]
    spare = [i for i in range(depth) if i not in kept]
    return sorted(kept + spare[: max(FEWEST_LAYERS - len(kept), 0)])


def _kind(i: int, depth: int, given: Mapping[str, Any]) -> tuple[str, ...]:
    """All that the default config says of layer i in particular."""
    traits: list[Any] = []
    for name, value in given.items():
        if _is_indices(name, value, depth):
            traits.append(i in value)
        elif _is_per_layer(value, depth):
            traits.append(value[i])
        elif _DENSE_FIRST.fullmatch(name) and isinstance(value, int):
            traits.append(i < value)
        elif name == "num_kv_shared_layers":
            traits.append(i >= depth - (value or 0))
    return tuple(map(str, traits))


def _is_per_layer(value: Any, depth: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == depth > FEWEST_LAYERS


def _is_indices(name: str, value: Any, depth: int) -> bool:
    return (
        _INDICES.fullmatch(name) is not None
        and isinstance(value, list | tuple)
        and all(isinstance(item, int) and item < depth for item in value)
        and list(value) == sorted(set(value))
    )


def _per_layer(
    given: Mapping[str, Any], layers: list[int], default: PreTrainedConfig
) -> dict[str, Any]:
    """Depths, and what is said layer by layer, cut down to `layers`."""
    depth = _depth(given)
    values: dict[str, Any] = {}
    for name, value in given.items():
        if _DEPTH.fullmatch(name) and isinstance(value, int):
            values[name] = len(layers)
        elif _is_indices(name, value, depth):
            values[name] = [new for new, old in enumerate(layers) if old in value]
        elif _is_per_layer(value, depth):
            values[name] = [_small(name, value[i], default) for i in layers]
        elif _DENSE_FIRST.fullmatch(name) and isinstance(value, int):
            values[name] = sum(old < value for old in layers)
        elif name == "moe_layer_end_index":
            values[name] = len(layers) - 1
        elif name == "num_kv_shared_layers":
            values[name] = sum(old >= depth - (value or 0) for old in layers)
        elif name == "attn_layer_period" and "layers_block_type" not in given:
            # Alternating with everything else: two layers of the other kind between two of attention.
            values |= {name: 3, "attn_layer_offset": 1, "num_hidden_layers": 4}
    return values


# Sizes ---------------------------------------------------------------------------------------------------------------


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
    return _small("qk_rope_head_dim", rotated, default) if value == rotated else HEAD_DIM


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


def _small(name: str, value: Any, default: PreTrainedConfig) -> Any:
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


def _rope(rope: Any, values: Mapping[str, Any], default: PreTrainedConfig) -> Any:
    """Rotary parameters as they are, but that a division of the frequencies must add up to their new number."""
    if not isinstance(rope, dict):
        return None
    if rope and all(isinstance(part, dict) for part in rope.values()):
        return {kind: _rope(part, values, default) for kind, part in rope.items()}
    section = rope.get("mrope_section")
    if section is None:
        return dict(rope)
    head_dim = values.get("head_dim", HEAD_DIM)
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    share = pairs // len(section)
    first = pairs - share * (len(section) - 1)
    return rope | {"mrope_section": [first] + [share] * (len(section) - 1)}


def _one_line(error: Exception | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "no message")[:200]
