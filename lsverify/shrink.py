"""Small configs of any causal language model that the library has, from the name of its type alone.

The default config says which kinds of layer a type has. `shrunk` keeps one layer of each kind, in their order, and
gives every width, head count, rank, window and expert count a small value that fits the others. The rules go by the
names that the library's configs use; the few types that no such rule fits are in `EXCEPTIONS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lsverify.errors import InputError
from lsverify.families.sizes import VOCABULARY
from lsverify.small_sizes import HEAD_DIM, WIDTH, small_rope, small_value

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
            small = small_value(name, value, default)
        if small is not value:
            values[name] = small
    values |= _per_layer(given, layers, default)
    rope = small_rope(getattr(default, "rope_parameters", None), values.get("head_dim", HEAD_DIM))
    return values if rope is None else values | {"rope_parameters": rope}


def _given(default: PreTrainedConfig) -> dict[str, Any]:
    """The default's values of everything that its class takes as an argument."""
    # By attribute: several classes store an argument under another name.
    default.allow_global_per_layer_attribute_access = True
    return {
        field.name: getattr(default, field.name)
        for field in fields(default)
        if not field.name.startswith("_") and hasattr(default, field.name)
    }


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
            values[name] = [small_value(name, value[i], default) for i in layers]
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


def _one_line(error: Exception | None) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else "no message")[:200]
