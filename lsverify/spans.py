"""Spans of a prompt whose tokens see each other both ways: the tokens of an image, or a whole prefix.

A span is half-open, (first token, one past the last), counted from the prompt's first token. A token sees what stands
before it and the rest of its own span; everything else is causal. So a span is computed in one piece: no chunk, no
stop and no boundary cuts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Generator

from lsverify.errors import InputError

if TYPE_CHECKING:
    from lsverify.policies import Policy

Spans = tuple[tuple[int, int], ...]
SpanKind = Literal["none", "image", "prefix"]
# Tokens of the shortest prompt with room for a span of two in front of its last token.
SHORTEST = 3


def check_spans(value: object, length: int) -> None:
    """Raises `InputError`, one line, for spans that a prompt of `length` tokens cannot have."""
    if not isinstance(value, tuple):
        raise InputError(f"spans is a {type(value).__name__}; give a tuple of (start, end) pairs")
    before = 0
    for span in value:
        if (
            not isinstance(span, tuple)
            or len(span) != 2
            or any(isinstance(edge, bool) or not isinstance(edge, int) for edge in span)
        ):
            raise InputError(f"span {span!r} is not a pair (start, end) of ints")
        start, end = span
        if end <= start:
            raise InputError(f"span {span} is empty: end must be above start")
        if start < 0 or end > length:
            raise InputError(f"span {span} lies outside its prompt of {length} tokens")
        if start < before:
            raise InputError(
                f"span {span} begins before {before}, where the span before it ends: give spans in order, without overlap"
            )
        before = end


def cut_span(position: int, spans: Spans) -> tuple[int, int] | None:
    """The span that a cut in front of the token at `position` would divide, None where there is none."""
    return next(((a, b) for a, b in spans if a < position < b), None)


def within(spans: Spans, start: int, end: int) -> Spans:
    """The spans inside tokens [start, end). Raises `InputError` for one that is cut by an edge of it."""
    for edge in (start, end):
        if (cut := cut_span(edge, spans)) is not None:
            raise InputError(
                f"a cut in front of token {edge} lies inside the span {cut}, which is computed in one piece: cut at "
                f"{cut[0]} or {cut[1]}"
            )
    return tuple(span for span in spans if start <= span[0] and span[1] <= end)


def whole_pieces(start: int, end: int, chunk: int, spans: Spans = ()) -> list[tuple[int, int]]:
    """Consecutive [a, b) that cover [start, end), each `chunk` long but for the last and for the sake of spans.

    A piece that would end inside a span ends in front of it; a span longer than `chunk` is a piece of its own.
    """
    found = []
    while start < end:
        stop = min(start + chunk, end)
        if (cut := cut_span(stop, spans)) is not None:
            stop = cut[0] if cut[0] > start else cut[1]
        found.append((start, stop))
        start = stop
    return found


def require_uncut(policy: Policy, prompt_length: int, spans: Spans) -> None:
    """Raises `InputError`, with the nearest values that are allowed, where the policy cuts a span of the prompt."""
    boundary, stop = policy.boundary(prompt_length), policy.stop(prompt_length)
    if (cut := cut_span(boundary, spans)) is not None:
        tails = [prompt_length - edge for edge in reversed(cut) if edge < prompt_length]
        nearest = " or ".join(f"tail:{tail}" for tail in tails)
        raise InputError(
            f"policy {policy.spec!r}: the boundary at {boundary} of a prompt of {prompt_length} tokens lies inside the "
            f"span {cut}; use {nearest}"
        )
    if (cut := cut_span(stop, spans)) is not None:
        windows = [boundary - edge for edge in reversed(cut)]
        nearest = " or ".join(f"window:{window}" for window in windows)
        raise InputError(
            f"policy {policy.spec!r}: its window stops at {stop}, inside the span {cut} of a prompt of {prompt_length} "
            f"tokens; use {nearest}"
        )


def drawn_spans(kind: SpanKind, prompt_length: int, seed: int) -> Spans:
    """Spans for a prompt, all of them ending before its last token, which every branch begins with.

    `image`: two spans, or one where there is no room, perhaps touching. `prefix`: everything before the last token. None
    in a prompt of fewer than three tokens. `seed` decides where images stand.
    """
    room = prompt_length - 1
    if kind == "none" or prompt_length < SHORTEST:
        return ()
    if kind == "prefix":
        return ((0, room),)
    generator = torch.Generator().manual_seed(seed % 2**63)
    start = _upto(room // 4, generator)
    end = min(start + 2 + _upto(room // 4, generator), room)
    second = end + _upto(2, generator)
    last = room - _upto(2, generator)
    return ((start, end), (second, last)) if last - second >= 2 else ((start, end),)


def _upto(most: int, generator: Generator) -> int:
    """A number from 0 to `most`."""
    return int(torch.randint(most + 1, (1,), generator=generator))
