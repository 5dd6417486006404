"""Limits and where they come from: a constant at oracle precision, or a measured floor with a cap."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.norms import Norms, all_finite, distance, promoted

if TYPE_CHECKING:
    from lsverify.slices import Slice

ORACLE_LIMIT = 1e-12
RELATIVE_FLOOR = 1e-3
# Rounding of the candidate itself: no measured limit goes below this many eps of its dtype.
FEWEST_EPS = 4
# A norm over n elements estimates the noise to 1/sqrt(2n) of it; below this many, luck decides.
FEW_ELEMENTS = 64

Gradients = Mapping[str, Tensor | None]
# Norms and count of elements of each tensor or slice.
Measured = dict[str, tuple[Norms, int]]
Slices = Mapping[str, Sequence["Slice"]]


class Limit(NamedTuple):
    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The largest relative error of each tensor, and where that number comes from.

    relative: limit of every tensor that `per_tensor` does not name; in [0, 1).
    source: what `relative` rests on, in words.
    relative_floor: the reference norm of a tensor counts as at least this share of the norm of the
        whole reference gradient; in [0, 1).
    per_tensor: limits by key, `name` or `name[slice]`.
    cap: the largest limit that may be measured; None for constant limits.
    inconsistent: key -> measured floor, where the floor lies above the cap.
    noise: key -> factor times the floor, where the cap cuts the limit below it. An error between the two passes nowhere and
        accuses nobody: the precision is at fault.
    native: the reference in the case's own precision. For what `noise` names it may stand in for the oracle, within the
        same limit: rounding that both sides share then is not counted against either.
    """

    relative: float = ORACLE_LIMIT
    source: str = "constant at oracle precision"
    relative_floor: float = RELATIVE_FLOOR
    per_tensor: Mapping[str, Limit] = field(default_factory=dict)
    cap: float | None = None
    inconsistent: Mapping[str, float] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    native: Gradients = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("relative", self.relative), ("relative_floor", self.relative_floor)):
            if not 0 <= value < 1:
                raise InputError(
                    f"Limits.{name} is {value}: allowed is 0 <= {name} < 1; "
                    "a limit of one lets a zero gradient pass"
                )

    def of(self, name: str, label: str | None = None) -> Limit:
        """The slice's own limit, else its tensor's, else the general one."""
        default = self.per_tensor.get(name, Limit(self.relative, self.source))
        return default if label is None else self.per_tensor.get(key_of(name, label), default)


def key_of(name: str, label: str | None) -> str:
    return name if label is None else f"{name}[{label}]"


def measured_limits(
    oracle: Gradients,
    reference: Gradients,
    *orders: Gradients,
    factor: float,
    cap: float,
    dtype: torch.dtype,
    slices: Slices | None = None,
    relative_floor: float = RELATIVE_FLOOR,
) -> Limits:
    """Limits from the floor of a precision: factor times the distance of the reference in it to the oracle.

    oracle, reference: the same reference's gradients, at oracle precision and computed in `dtype`; orders: the same
    once more, computed in another order. The floor of a tensor (and of a slice) is the largest over reference and
    orders of ||r - o|| / max(||o||, relative_floor * ||all o||); one of
    fewer than 64 elements takes the median floor of all tensors where that is larger. A limit is at
    least 4 eps of `dtype` and at most `cap`. A tensor whose floor is above the cap, or whose reference
    differs from the oracle in structure (distance infinite), is listed as inconsistent; one of which factor times the
    floor is above the cap is listed with that as its noise.
    Raises InputError for a dtype without eps, a factor below 1 or a cap outside [4 eps, 1).
    """
    if not dtype.is_floating_point:
        raise InputError(f"dtype {dtype} has no eps: give the floating dtype the model was run in")
    least = FEWEST_EPS * torch.finfo(dtype).eps
    if not (factor >= 1 and least <= cap < 1):
        raise InputError(
            f"factor {factor} and cap {cap} do not fit {dtype}: "
            f"allowed are factor >= 1 and {least:.3g} <= cap < 1"
        )
    floors, inconsistent = measured_floors(
        oracle, reference, *orders, slices=slices, relative_floor=relative_floor
    )
    per_tensor: dict[str, Limit] = {}
    noise: dict[str, float] = {}
    for key, floor in floors.items():
        if not floor <= cap:
            inconsistent[key] = floor
        if not factor * floor <= cap:
            noise[key] = factor * floor
        per_tensor[key] = _limit(factor, floor, least, cap, str(dtype).removeprefix("torch."))
    return Limits(
        relative=least,
        source=f"{FEWEST_EPS} eps of {dtype}: nothing was measured for it",
        relative_floor=relative_floor,
        per_tensor=per_tensor,
        cap=cap,
        inconsistent=inconsistent,
        noise=noise,
        native=reference,
    )


def measured_floors(
    oracle: Gradients,
    reference: Gradients,
    *orders: Gradients,
    slices: Slices | None = None,
    relative_floor: float = RELATIVE_FLOOR,
) -> tuple[dict[str, float], dict[str, float]]:
    """The floor of every tensor and slice by key, as `measured_limits` says, and what differs in structure (infinite)."""
    tensors, parts, inconsistent = _distances(oracle, reference, slices or {})
    for order in orders:
        again = _distances(oracle, order, slices or {})
        _raise(tensors, again[0])
        _raise(parts, again[1])
    absolute = relative_floor * math.hypot(*(norms.expected for norms, _ in tensors.values()))
    both = tensors | parts
    floors = {key: _floor(norms, absolute) for key, (norms, _) in both.items()}
    typical = statistics.median(floors[name] for name in tensors) if tensors else 0.0
    few = {key for key, (_, elements) in both.items() if elements < FEW_ELEMENTS}
    raised = {key: max(floor, typical) if key in few else floor for key, floor in floors.items()}
    return raised, inconsistent


def _raise(known: Measured, again: Measured) -> None:
    """Keep the larger error of the two."""
    for key, (norms, elements) in again.items():
        if key in known and norms.error > known[key][0].error:
            known[key] = norms, elements


def _floor(norms: Norms, absolute: float) -> float:
    scale = max(norms.expected, absolute)
    return norms.error / scale if scale else (math.inf if norms.error else 0.0)


def _limit(factor: float, floor: float, least: float, cap: float, precision: str) -> Limit:
    value, source = factor * floor, f"{factor:g} x the {precision} floor {floor:.3g}"
    if value < least:
        return Limit(least, f"{FEWEST_EPS} eps of {precision}, as {source} is less")
    if not value <= cap:
        return Limit(cap, f"cap of {precision}, as {source} is more")
    return Limit(value, source)


def _distances(
    oracle: Gradients, reference: Gradients, slices: Slices
) -> tuple[Measured, Measured, dict[str, float]]:
    """Norms and element counts of tensors and of slices; names whose structure does not agree."""
    tensors: Measured = {}
    parts: Measured = {}
    inconsistent = dict.fromkeys(sorted(oracle.keys() ^ reference.keys()), math.inf)
    for name, o in oracle.items():
        r = reference.get(name)
        if name in inconsistent or (o is None and r is None):
            continue
        if o is None or r is None or o.shape != r.shape or not (all_finite(o) and all_finite(r)):
            inconsistent[name] = math.inf
            continue
        wide, narrow = promoted(o), promoted(r)
        tensors[name] = (distance(narrow, wide), wide.numel())
        for part in slices.get(name, ()):
            piece = wide[part.index]
            parts[key_of(name, part.label)] = (distance(narrow[part.index], piece), piece.numel())
    return tensors, parts, inconsistent
