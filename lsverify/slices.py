"""Which parts of a fused tensor are compared apart, so that a small part cannot hide behind a big one.

One projection often carries several roles: q, k and v; gate and up; every expert; the rows of an
embedding that were looked up and those that were not. The layouts below follow the model code of
transformers. A parameter whose layout is not recognised, or whose sizes do not fit the config, is
compared as a whole only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lsverify.errors import InputError

Part = slice | Tensor
Parts = list[tuple[str, Part]]


@dataclass(frozen=True, eq=False)
class Slice:
    """One part of a tensor: `tensor[index]`. At most one entry of `index` is a tensor of positions.

    The last word of `label` is the role (`head 3 v`, `expert 0 gate`, `k`).
    """

    label: str
    index: tuple[Part, ...]


def fused_slices(
    named_shapes: Mapping[str, Sequence[int]],
    config: object,
    *,
    seen_tokens: Sequence[int] | None = None,
) -> dict[str, list[Slice]]:
    """The slices of every recognised fused parameter; those of one parameter partition it.

    named_shapes: parameter name -> shape, as in `model.named_parameters()` (peft names included).
    config: the model's config; of a composite model its text part is used.
    seen_tokens: ids that were looked up in the input embedding; None leaves embeddings whole.
    Raises InputError when a seen token lies outside an embedding's rows.
    """
    dims = _Dims(getattr(config, "text_config", None) or config)
    found: dict[str, list[Slice]] = {}
    for name, shape in named_shapes.items():
        axes = _axes(name, tuple(shape), dims, seen_tokens)
        if axes:
            found[name] = partition(tuple(shape), axes)
    return found


def partition(shape: tuple[int, ...], axes: Mapping[int, Parts]) -> list[Slice]:
    """The product of partitions of single axes. Raises ValueError when one of them is none."""
    for axis, parts in axes.items():
        hits = torch.zeros(shape[axis], dtype=torch.int64)
        for _, part in parts:
            hits[part] += 1
        if not bool((hits == 1).all()):
            raise ValueError(f"the parts of axis {axis} do not partition its {shape[axis]} entries")
    slices = []
    for chosen in itertools.product(*axes.values()):
        index: list[Part] = [slice(None)] * len(shape)
        for axis, (_, part) in zip(axes, chosen, strict=True):
            index[axis] = part
        slices.append(Slice(" ".join(label for label, _ in chosen), tuple(index)))
    return slices


class _Dims:
    """Reads sizes from a config; 0 where the config does not have them."""

    def __init__(self, config: object) -> None:
        self.config = config
        self.family = str(getattr(config, "model_type", "") or "").removesuffix("_text")
        self.heads = self("num_attention_heads", "n_heads")
        self.kv_heads = self("num_key_value_heads", "num_kv_heads") or self._grouped_kv_heads()
        self.head_dim = self("head_dim", "d_head") or self("hidden_size") // max(self.heads, 1)

    def __call__(self, *names: str) -> int:
        for name in names:
            try:
                value: Any = getattr(self.config, name, None)
            except RuntimeError:  # it varies from layer to layer, so it is no size of the model's
                continue
            if isinstance(value, int):
                return int(value)
        return 0

    def _grouped_kv_heads(self) -> int:
        nested = getattr(self.config, "attn_config", None)  # dbrx keeps it one level down
        return int(getattr(nested, "kv_n_heads", 0) or self.heads)


def _runs(*sizes: tuple[str, int]) -> Parts:
    edges = itertools.accumulate((size for _, size in sizes), initial=0)
    spans = itertools.pairwise(edges)
    return [(label, slice(a, b)) for (label, _), (a, b) in zip(sizes, spans, strict=True)]


def _per_head(heads: int, *sizes: tuple[str, int]) -> Parts:
    return _runs(*((f"head {h} {label}", size) for h in range(heads) for label, size in sizes))


def _delta_net(dims: _Dims, length: int) -> Parts:
    key = dims("linear_num_key_heads") * dims("linear_key_head_dim")
    value = dims("linear_num_value_heads") * dims("linear_value_head_dim")
    return _runs(("q", key), ("k", key), ("v", value))


def _delta_net_by_head(*roles: str) -> Callable[[_Dims, int], Parts]:
    def layout(dims: _Dims, length: int) -> Parts:
        heads = dims("linear_num_key_heads")
        share = dims("linear_num_value_heads") // max(heads, 1)
        key, value = dims("linear_key_head_dim"), share * dims("linear_value_head_dim")
        sizes = {"q": key, "k": key, "v": value, "z": value, "b": share, "a": share}
        return _per_head(heads, *((role, sizes[role]) for role in roles))

    return layout


def _q(dims: _Dims, length: int) -> Parts:
    nope, rope = dims("qk_nope_head_dim"), dims("qk_rope_head_dim")
    if nope and rope:
        return _per_head(dims.heads, ("q_nope", nope), ("q_rope", rope))
    if dims.family.startswith(("qwen3_5", "qwen3_next")):  # each head's output gate sits beside it
        return _per_head(dims.heads, ("q", dims.head_dim), ("gate", dims.head_dim))
    return []


def _kv_a(dims: _Dims, length: int) -> Parts:
    return _runs(("latent", dims("kv_lora_rank")), ("rope", dims("qk_rope_head_dim")))


def _kv_b(dims: _Dims, length: int) -> Parts:
    return _per_head(dims.heads, ("k_nope", dims("qk_nope_head_dim")), ("v", dims("v_head_dim")))


def _qkv(dims: _Dims, length: int) -> Parts:
    if dims.family in ("codegen", "zaya"):  # tensor-parallel order; no linear layer
        return []
    if dims.family == "minimax":
        return _per_head(dims.heads, *((role, dims.head_dim) for role in "qkv"))
    kv = dims.kv_heads * dims.head_dim
    return _runs(("q", dims.heads * dims.head_dim), ("k", kv), ("v", kv))


def _query_key_value(dims: _Dims, length: int) -> Parts:
    if getattr(dims.config, "new_decoder_architecture", False):
        share = dims.heads // max(dims("num_kv_heads"), 1)
        sizes = (("q", share * dims.head_dim), ("k", dims.head_dim), ("v", dims.head_dim))
        return _per_head(dims("num_kv_heads"), *sizes)
    if dims.family == "falcon" and getattr(dims.config, "multi_query", False):
        return _runs(("q", dims.heads * dims.head_dim), ("k", dims.head_dim), ("v", dims.head_dim))
    return _per_head(dims.heads, *((role, dims.head_dim) for role in "qkv"))


def _c_attn(dims: _Dims, length: int) -> Parts:
    hidden = dims("hidden_size")
    if dims.family != "gpt_bigcode":
        return _runs(("q", hidden), ("k", hidden), ("v", hidden))
    if getattr(dims.config, "multi_query", False):
        return _runs(("q", hidden), ("k", dims.head_dim), ("v", dims.head_dim))
    return _per_head(dims.heads, *((role, dims.head_dim) for role in "qkv"))


def _gate_up(dims: _Dims, length: int) -> Parts:
    return _runs(("gate", length // 2), ("up", length // 2))


def _mamba_in(dims: _Dims, length: int) -> Parts:
    if dims.family.startswith("lfm2"):
        hidden = dims("hidden_size")
        return _runs(("B", hidden), ("C", hidden), ("x", hidden))
    if dims.family in ("mamba", "falcon_mamba", "jamba"):
        return _runs(("x", length // 2), ("gate", length // 2))
    heads, state = _mamba2(dims)
    inner = (length - 2 * state - heads) // 2
    sizes = (("gate", inner), ("x", inner), ("B", state), ("C", state), ("dt", heads))
    return _runs(*sizes) if heads and state and inner > 0 and inner % heads == 0 else []


def _mamba_x(dims: _Dims, length: int) -> Parts:
    state = dims("state_size", "mamba_d_state")
    return _runs(("dt", length - 2 * state), ("B", state), ("C", state))


def _conv(dims: _Dims, length: int) -> Parts:
    if dims("linear_num_key_heads"):
        return _delta_net(dims, length)
    heads, state = _mamba2(dims)
    inner = length - 2 * state
    if not (heads and state and inner > 0 and inner % heads == 0):
        return []
    return _runs(("x", inner), ("B", state), ("C", state))


def _mamba2(dims: _Dims) -> tuple[int, int]:
    heads = dims("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    heads = heads or (dims("num_heads") if dims.family == "mamba2" else 0)
    groups = dims("mamba_n_groups", "mamba_ngroups", "n_groups")
    return heads, groups * dims("mamba_d_state", "ssm_state_size", "state_size")


_LAYOUTS: dict[str, Callable[[_Dims, int], Parts]] = {
    "in_proj_qkv": _delta_net,
    "in_proj_qkvz": _delta_net_by_head("q", "k", "v", "z"),
    "in_proj_ba": _delta_net_by_head("b", "a"),
    "conv1d": _conv,
    "in_proj": _mamba_in,
    "x_proj": _mamba_x,
    "q_proj": _q,
    "q_b_proj": _q,
    "kv_a_proj_with_mqa": _kv_a,
    "kv_b_proj": _kv_b,
    "qkv_proj": _qkv,
    "Wqkv": _qkv,
    "query_key_value": _query_key_value,
    "c_attn": _c_attn,
    "gate_up_proj": _gate_up,
}
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", "embeddings", "tok_embeddings")
_INPUT_MAJOR_EXPERTS = ("gpt_oss", "llama4", "aria", "openai_privacy_filter")
_LEAF = re.compile(
    r"(?:^|\.)(?P<module>\w+?)"
    r"(?:\.base_layer|\.original_module|\.modules_to_save\.\w+|\.lora_B\.\w+)?"
    r"\.(?P<leaf>weight|bias|lora_embedding_A\.\w+)$"
)
_EXPERTS = re.compile(
    r"experts(?:\.base_layer)?\.(?P<module>gate_up_proj|up_proj|down_proj)(?P<bias>_bias)?$"
)


def _axes(
    name: str, shape: tuple[int, ...], dims: _Dims, seen_tokens: Sequence[int] | None
) -> dict[int, Parts]:
    if experts := _EXPERTS.search(name):
        return _expert_axes(experts["module"], bool(experts["bias"]), shape, dims)
    match = _LEAF.search(name)
    if match is None or not shape:
        return {}
    module, leaf = match["module"], match["leaf"]
    if module in _EMBEDDINGS:
        axis = 1 if leaf.startswith("lora_embedding_A") else 0
        return _seen_rows(name, shape, axis, dims, seen_tokens)
    if module not in _LAYOUTS or leaf.startswith("lora_embedding_A"):
        return {}
    # Conv1D of gpt2 stores [in, out]; adapters of any layer store B as [out, rank].
    output_last = module == "c_attn" and dims.family != "gpt_bigcode" and ".lora_B." not in name
    axis = len(shape) - 1 if output_last else 0
    parts = _LAYOUTS[module](dims, shape[axis])
    return {axis: parts} if _fit(parts, shape[axis]) else {}


def _expert_axes(module: str, bias: bool, shape: tuple[int, ...], dims: _Dims) -> dict[int, Parts]:
    if len(shape) != (2 if bias else 3):
        return {}
    axes = {0: _runs(*((f"expert {e}", 1) for e in range(shape[0])))}
    if module == "gate_up_proj":
        axis = 2 if dims.family in _INPUT_MAJOR_EXPERTS and not bias else 1
        if dims.family == "gpt_oss":
            axes[axis] = [("gate", slice(0, None, 2)), ("up", slice(1, None, 2))]
        else:
            axes[axis] = _gate_up(dims, shape[axis])
        if shape[axis] % 2:
            return {}
    return axes


def _seen_rows(
    name: str,
    shape: tuple[int, ...],
    axis: int,
    dims: _Dims,
    seen_tokens: Sequence[int] | None,
) -> dict[int, Parts]:
    if seen_tokens is None or len(shape) != 2 or shape[axis] < dims("vocab_size"):
        return {}
    seen = torch.zeros(shape[axis], dtype=torch.bool)
    for token in seen_tokens:
        if not 0 <= token < shape[axis]:
            raise InputError(
                f"seen token {token} has no row in {name}: allowed are 0 to {shape[axis] - 1}; "
                "give the ids that were looked up in this model's embedding"
            )
        seen[token] = True
    if bool(seen.all()) or not bool(seen.any()):
        return {}
    return {axis: [("seen", seen.nonzero()[:, 0]), ("unseen", (~seen).nonzero()[:, 0])]}


def _fit(parts: Parts, length: int) -> bool:
    ends = [part.stop for _, part in parts if isinstance(part, slice)]
    starts = [part.start for _, part in parts if isinstance(part, slice)]
    return (
        bool(ends) and ends[-1] == length and all(a < b for a, b in zip(starts, ends, strict=True))
    )
