"""The shared prompt: captured once without autograd, tagged, refused when it no longer fits.

`capture` runs the prompt's first B tokens in chunks and keeps the boundary state, plus each chunk's incoming state
as far back as a sweep will go. `PromptState.branch` hands a response its own leaf copy of the boundary state;
`PromptState.check` raises `StalePromptState` when weights, adapter, tokens or boundary have moved on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import (
    Prefix,
    Slot,
    by_path,
    compact,
    leaves_of,
    map_state,
    new_cache,
    prefix_or_tensor,
    state_of,
    with_leaves,
)
from lsverify.continuation import mended
from lsverify.continuation.carriers import require_state, state_arguments
from lsverify.decisions import DecisionDigest
from lsverify.errors import InputError, StalePromptState
from lsverify.span_masks import span_arguments
from lsverify.spans import Spans, whole_pieces, within
from lsverify.tags import Tags, tags_of


def continue_from(
    model: nn.Module, tokens: Tensor, cache: Cache, start: int, keep: int, spans: Spans = ()
) -> tuple[Tensor, Cache]:
    """Continue a sequence from a state: the one primitive that capture, replay and sweep share.

    tokens [T] int64 are the next tokens, the first of them at position `start`; or [n, T], rows that go on from n
    rows of state. Returns the logits of the last `keep` columns, [keep, V] or [n, keep, V], and the cache, which now
    holds the state after all T tokens. Tokens of a prompt's `spans` see each other both ways; raises `InputError` where
    these tokens cut one.
    """
    rows = tokens if tokens.dim() == 2 else tokens[None]
    positions = torch.arange(start, start + rows.shape[1], device=tokens.device)
    with mended(model):
        output = model(
            input_ids=rows,
            position_ids=positions.expand_as(rows),
            **span_arguments(
                model, spans, rows.shape[1], start=start, cache=cache, device=tokens.device
            ),
            **state_arguments(unwrapped(model), cache, rows.shape[1]),
            **keep_logits(model, keep),
        )
    logits = output.logits[:, -keep:]
    return (logits if tokens.dim() == 2 else logits[0]), cache


def keep_logits(model: nn.Module, keep: int) -> dict[str, int]:
    """The argument that spares logits nobody reads, where the model's forward has it."""
    known = "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters
    return {"logits_to_keep": keep} if known else {}


def unwrapped(model: nn.Module) -> Any:
    """The causal language model inside an adapter wrapper, or the model itself."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Captured tokens [start, end): what is needed to run them once more and to check that it came out the same."""

    start: int
    tokens: Tensor
    shell: Cache
    decisions: str
    spans: Spans = ()

    def incoming(self, outgoing: dict[str, Tensor]) -> Cache:
        """The state before this chunk, cut from the state after it where it merely grew."""
        return map_state(
            self.shell,
            lambda slot, kept: kept.of(outgoing[slot.path]) if isinstance(kept, Prefix) else kept,
        )


@dataclass(frozen=True, kw_only=True)
class InventoryRow:
    """One tensor of a prompt's state; `bytes` counts its elements, whether or not storage is shared."""

    layer: int | None
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PromptState:
    """The state of x[1..B] without a graph, with the chunks that a sweep will recompute (last one last)."""

    tags: Tags
    cache: Cache
    chunks: tuple[Chunk, ...]

    @cached_property
    def tensors(self) -> dict[Slot, Tensor]:
        return state_of(self.cache)

    def branch(self, leaves: Mapping[str, Tensor]) -> Cache:
        """A response's own copy of the boundary state, in which `leaves` stand for the tensors at their paths."""
        return with_leaves(self.cache, leaves)

    def branches(self, leaves: Mapping[str, Tensor], rows: int) -> Cache:
        """The same for `rows` responses in one pass; a leaf collects the sum of their cotangents."""
        return map_state(
            self.branch(leaves), lambda _, tensor: tensor.expand(rows, *tensor.shape[1:])
        )

    def leaves(self, chosen: Callable[[int | None, str], bool]) -> dict[str, Tensor]:
        """Leaf copies of the differentiable state that is `chosen(layer, kind)` (see `leaves_of`)."""
        return leaves_of(self.cache, chosen)

    def check(self, model: nn.Module, prompt: Tensor, boundary: int, spans: Spans = ()) -> None:
        """Raise `StalePromptState`, naming what changed, unless this state belongs to just this use."""
        self.check_tags(tags_of(model, prompt, boundary, spans))

    def check_tags(self, tags: Tags) -> None:
        """The same for tags that are known already."""
        now, then = asdict(tags), asdict(self.tags)
        moved = [
            f"{name} was {then[name]} and is {now[name]}"
            for name in then
            if then[name] != now[name]
        ]
        if moved:
            raise StalePromptState(f"prompt state does not fit: {'; '.join(moved)}; capture again")

    def inventory(self) -> list[InventoryRow]:
        """Every tensor of the state by layer and kind; sizes come from shapes."""
        return [
            InventoryRow(
                layer=slot.layer,
                kind=slot.kind,
                name=slot.path,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
            )
            for slot, tensor in self.tensors.items()
        ]


@torch.no_grad()
def capture(
    model: nn.Module,
    prompt: Tensor,
    *,
    boundary: int,
    chunk: int,
    keep_from: int,
    spans: Spans = (),
) -> PromptState:
    """Evaluate prompt[:boundary] without autograd, `chunk` tokens at a time; no chunk cuts one of the prompt's `spans`.

    prompt [P] int64. Incoming states are kept for the chunks that begin at `keep_from` or later, and one chunk begins
    exactly there (`keep_from = boundary` keeps none). Raises `InputError` for a chunk below 1, for a boundary or
    keep_from inside a span, for spans that the model cannot see, and for a model that keeps state out of its cache.
    """
    if chunk < 1:
        raise InputError(f"chunk {chunk} is not allowed: use 1 or more tokens")
    cache = new_cache(unwrapped(model).config)
    chunks: list[Chunk] = []
    within(spans, keep_from, boundary)
    pieces = (
        *whole_pieces(0, keep_from, chunk, spans),
        *whole_pieces(keep_from, boundary, chunk, spans),
    )
    for start, end in pieces:
        before = map_state(cache, lambda _, tensor: tensor)
        with DecisionDigest() as decisions:
            _, cache = continue_from(model, prompt[start:end], cache, start, keep=1, spans=spans)
        if start == 0:
            require_state(unwrapped(model), cache)
        cache = compact(cache)
        if start >= keep_from:
            chunks.append(
                Chunk(
                    start=start,
                    tokens=prompt[start:end],
                    shell=_lean(before, by_path(cache)),
                    decisions=decisions.hexdigest(),
                    spans=within(spans, start, end),
                )
            )
    return PromptState(
        tags=tags_of(model, prompt, boundary, spans), cache=cache, chunks=tuple(chunks)
    )


def _lean(before: Cache, after: Mapping[str, Tensor]) -> Cache:
    """A chunk's incoming state without what can be cut from its outgoing one: keys and values are kept once."""
    return map_state(before, lambda slot, kept: prefix_or_tensor(kept, after.get(slot.path)))
