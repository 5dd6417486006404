"""Discrete decisions: which experts and which keys a forward pass chose, and by what margin.

Every router and indexer chooses with `topk` or `argmax`, so decisions are watched there, whatever the architecture.
A choice is compared as a set, since the order within it has no effect that the scores do not already have.
Candidates that a mask ruled out (score -inf, or the dtype's lowest) are no choice: they are dropped from the set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TOPK = {torch.topk, Tensor.topk}
_ARGMAX = {torch.argmax, Tensor.argmax}
_CHOOSES = _TOPK | _ARGMAX


class ChoiceMode(TorchFunctionMode):
    """Calls `seen(scores [rows, n], chosen [rows, k])` for every choice over a last dimension.

    `seen` may return other indices of the same shape: these then are the choice. Choices inside compiled code are not
    seen.
    """

    def __init__(self, seen: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Compiled code is traced with the mode in it: what is asked in Python has no place there.
        if func not in _CHOOSES or torch.compiler.is_compiling():
            return result
        scores: Any = args[0] if args else kwargs.get("input")
        if func in _TOPK and _over_last(scores, _given(args, kwargs, 2, "dim", -1)):
            return self._topk(scores, _given(args, kwargs, 3, "largest", True), result)
        if func in _ARGMAX and _over_last(scores, _given(args, kwargs, 1, "dim", None)):
            return self._argmax(scores, result)
        return result

    def _topk(self, scores: Tensor, largest: bool, result: Any) -> Any:
        other = self._ask(scores if largest else -scores, result.indices)
        if other is None:
            return result
        return torch.return_types.topk((scores.gather(-1, other), other))

    def _argmax(self, scores: Tensor, result: Tensor) -> Tensor:
        index = result if result.dim() == scores.dim() else result.unsqueeze(-1)
        other = self._ask(scores, index)
        return result if other is None else other.reshape(result.shape)

    def _ask(self, scores: Tensor, chosen: Tensor) -> Tensor | None:
        candidates, picks = scores.shape[-1], chosen.shape[-1]
        if not candidates or not picks:  # compressed keys: there is none yet to choose from
            return None
        other = self.seen(scores.detach().reshape(-1, candidates), chosen.reshape(-1, picks))
        return None if other is None else other.reshape(chosen.shape)


def _given(
    args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any
) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def _over_last(scores: Any, dim: int | None) -> bool:
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() == 0:
        return False
    return dim in (-1, scores.dim() - 1)


def as_sets(scores: Tensor, chosen: Tensor) -> Tensor:
    """Each row's choice as a sorted set, [rows, k] int64; masked candidates become -1.

    scores [rows, n], chosen [rows, k].
    """
    lowest = torch.finfo(scores.dtype).min / 2
    allowed = scores.gather(-1, chosen.long()) > lowest
    return torch.where(allowed, chosen.long(), -1).sort(dim=-1).values


def margins(scores: Tensor, k: int) -> Tensor:
    """How far the worst chosen score is above the best one left out, [rows]; inf where nothing was left out."""
    lowest = torch.finfo(scores.dtype).min / 2
    if scores.shape[-1] <= k:
        return scores.new_full(scores.shape[:-1], torch.inf)
    best = scores.topk(k + 1, dim=-1).values
    left_out = best[..., k]
    return torch.where(left_out > lowest, best[..., k - 1] - left_out, torch.inf)


class DecisionDigest:
    """A hash over all decisions made inside the context, in order: equal runs have equal digests."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._mode = ChoiceMode(self._seen)

    def _seen(self, scores: Tensor, chosen: Tensor) -> None:
        self._hash.update(as_sets(scores, chosen).cpu().numpy().tobytes())

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
