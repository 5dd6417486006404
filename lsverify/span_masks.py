"""Attention masks for prompts with spans, in the form that a model of transformers takes.

The rule: query q sees key k if k <= q and, in a sliding layer, k > q - window; and if both lie in one span, whatever
the window, as an image's tokens do in gemma3. A model whose layers are all alike takes one mask of four dimensions;
one with full and sliding layers takes one for each type of layer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from inspect import getsource
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from lsverify.cache import new_cache
from lsverify.errors import InputError
from lsverify.spans import Spans, within

ATTENDING = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
# As configs name them; "" where a config names none because its layers are all alike.
TYPES = ("", "full_attention", "sliding_attention", "indexed_attention")


def seen(queries: Tensor, keys: Tensor, spans: Spans, window: int | None = None) -> Tensor:
    """[T, S] bool, True where the query at position queries[t] [T] sees the key at keys[s] [S]."""
    ahead = queries[:, None] - keys
    visible = ahead >= 0
    if window is not None:
        visible &= ahead < window
    for start, end in spans:
        visible |= ((queries >= start) & (queries < end))[:, None] & (keys >= start) & (keys < end)
    return visible


def span_arguments(
    model: nn.Module,
    spans: Spans,
    length: int,
    *,
    start: int = 0,
    cache: Cache | None = None,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """The mask for a forward pass over tokens [start, start + length) that goes on from `cache`, as keyword argument.

    Empty where no span lies among these tokens: what comes after a span sees it causally. Raises `InputError` where
    they cut a span, and for a model that cannot see both ways.
    """
    inside = within(spans, start, start + length)
    if not inside:
        return {}
    queries = torch.arange(start, start + length, device=device)

    def mask(layer: Any) -> Tensor:
        count, offset = (length, start) if cache is None else layer.get_mask_sizes(length)
        keys = torch.arange(offset, offset + count, device=device)
        return seen(queries, keys, inside, _window(layer))[None, None]

    return {"attention_mask": _for_model(model, mask, cache)}


def padded_arguments(model: nn.Module, mask: Tensor, spans: Sequence[Spans]) -> dict[str, Any]:
    """The mask for uncached rows, mask [N, L] 1 at tokens, each row with spans of its own, as keyword argument.

    The two-dimensional mask itself where there are none. A padded column sees itself alone: a row of attention
    without any key has no softmax.
    """
    if not any(spans):
        return {"attention_mask": mask}
    columns, real = torch.arange(mask.shape[1], device=mask.device), mask.bool()

    def rows(layer: Any) -> Tensor:
        found = []
        for its, own in zip(real, spans, strict=True):
            positions = columns - its.int().argmax()
            visible = seen(positions, positions, own, _window(layer)) & its
            found.append(visible | torch.eye(len(columns), dtype=torch.bool, device=mask.device))
        return torch.stack(found)[:, None]

    return {"attention_mask": _for_model(model, rows, None)}


@torch.no_grad()
def require_seen(model: nn.Module, tokens: Tensor, spans: Spans) -> None:
    """Raises `InputError` unless the model's first token of each span depends on the last one, and none before does.

    tokens [P] of a prompt. A model may take a mask and read something else.
    """
    for start, end in (span for span in spans if span[1] - span[0] > 1):
        other = tokens.clone()
        other[end - 1] += 1 if other[end - 1] == 0 else -1
        masked = span_arguments(model, spans, len(tokens))
        before, after = (
            model(
                input_ids=ids[None],
                position_ids=torch.arange(len(ids))[None],
                use_cache=False,
                **masked,
            ).logits[0, : start + 1]
            for ids in (tokens, other)
        )
        change = (after - before).flatten(1).norm(dim=-1)
        # Experts are summed in another order when a later token goes elsewhere: what stands before moves by rounding.
        if not all(float(change[start]) > 10 * float(earlier) for earlier in (0, *change[:start])):
            raise InputError(
                f"{_name(model)} takes an attention mask but does not see by it (span {(start, end)}): give prompts "
                "without spans"
            )


def _for_model(model: nn.Module, mask: Callable[[Any], Tensor], cache: Cache | None) -> Any:
    """What the model takes as attention_mask: a mask for all layers, or one by the layers' type."""
    inner = _unwrapped(model)
    layers = _attending(inner, cache)
    kinds = {_window(layer) for layer in layers.values()}
    masks = {
        name: _as_taken(inner, mask(layer))
        for name, layer in (layers if len(kinds) > 1 else dict([*layers.items()][:1])).items()
    }
    return masks if len(kinds) > 1 else next(iter(masks.values()))


def _attending(inner: Any, cache: Cache | None) -> dict[str, Any]:
    """A cache layer for each type of layer of the model, by the type's name.

    Raises `InputError` for a model that has layers of another kind, or takes no such masks.
    """
    config = inner.config.get_text_config(decoder=True)
    layers = (cache or new_cache(inner.config)).layers
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    found: dict[str, Any] = {}
    for number, (name, layer) in enumerate(zip(types, layers, strict=False)):
        if isinstance(layer, DummyLayer):
            continue
        if type(layer) not in ATTENDING or name not in TYPES:
            kind = name or type(layer).__name__.removeprefix("Assigning")
            raise InputError(
                f"{_name(inner)}: layer {number} is of type {kind}, which cannot see a span both ways; give prompts "
                "without spans, or a model of attention layers alone"
            )
        found.setdefault(name, layer)
    backbone = sys.modules[type(inner.base_model).__module__]
    takes_one = hasattr(backbone, "create_causal_mask") or hasattr(
        backbone, "create_sliding_window_causal_mask"
    )
    several = len({_window(layer) for layer in found.values()}) > 1
    if not takes_one or (several and not re.search(r"attention_mask, dict\)", getsource(backbone))):
        raise InputError(
            f"{_name(inner)} takes no attention mask of our own making, so no span is seen both ways: give prompts "
            "without spans"
        )
    return found


def _window(layer: Any) -> int | None:
    """Keys that a query of the layer sees, itself included; None for all."""
    window: int | None = getattr(layer, "sliding_window", None)
    return window


def _as_taken(inner: Any, visible: Tensor) -> Tensor:
    """As booleans, or for attention that adds its mask as 0 and the least number there is."""
    attention = inner.config._attn_implementation
    if attention == "sdpa":
        return visible
    if attention != "eager":
        raise InputError(
            f"attention {attention!r} takes no mask of our own making: use sdpa or eager for prompts with spans"
        )
    dtype = inner.get_input_embeddings().weight.dtype
    zeros = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return zeros.masked_fill(~visible, torch.finfo(dtype).min)


def _name(model: nn.Module) -> str:
    return type(_unwrapped(model)).__name__


def _unwrapped(model: nn.Module) -> Any:
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
