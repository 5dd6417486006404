"""Where the state term lives: by kind of state, and by distance back from the boundary.

The state term is what `detach` loses: full autograd minus the response term. It is a sum, over the kinds of state that
d loss / d z passes through at B and over the prompt tokens whose share of it is lost, so each part has a share: its
projection onto the whole, <part, whole> / |whole|^2, which sums to 1 over the parts. Norms do not sum: parts may point
away from one another. Every part here is a difference of two references, so no path under judgement is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from lsverify.cache import Slot
from lsverify.evidence import Real
from lsverify.norms import norm, promoted
from lsverify.paths import shared_prompts
from lsverify.policies import parse_policy
from lsverify.referee import Claim, Referee
from lsverify.references import Filter, Gradients, banded_reference, stopped_reference

Vector = dict[str, Tensor]
HELD = (0.5, 0.9)
# JSON has no NaN: a number that is not finite is written as a string, which reads back as the number.
RECORD = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Part(BaseModel):
    """A part of the state term. norm, cosine: of the part, over and with the whole; projection: sums to 1 over parts.

    None where the whole, or for the cosine the part, is zero.
    """

    model_config = RECORD

    norm: Real | None
    cosine: Real | None
    projection: Real | None


class KindPart(Part):
    """What passes through the state of one kind."""

    kind: str


class DistancePart(Part):
    """What prompt tokens more than `above` and up to `upto` positions before B make; `within`: the sum from B on."""

    above: int
    upto: int
    within: Real | None


class StateTerm(BaseModel):
    """What `detach` loses on one problem, in parts.

    size, cosine: |state term| / |full|, and its cosine with full; None where undefined. kinds_left, distances_left:
    |sum of the parts - whole| / |full|, which is rounding: the whole is full autograd minus the response term, and the
    parts come from other graphs. held: the least of the measured distances from which on the sum stays at or above
    50% and 90% of the whole.
    """

    model_config = RECORD

    arch: str
    length: int
    seed: int
    size: Real | None
    cosine: Real | None
    kinds: tuple[KindPart, ...]
    kinds_left: Real
    distances: tuple[DistancePart, ...]
    distances_left: Real
    held: dict[str, int | None]

    @property
    def left(self) -> float:
        """What the parts miss, by kind or by distance, whichever is more."""
        return max(self.kinds_left, self.distances_left)


def state_term(referee: Referee, kinds: Iterable[str]) -> StateTerm:
    """Take the state term of the referee's problem apart, in the case's precision.

    kinds: the kinds of state that the model has.
    """
    setting = referee.setting
    full, response = _reference(referee, "full"), _reference(referee, "detach")
    whole, scale = minus(full, response), size(minus(full, {}))
    by_kind = list(kinds)
    # What passes through the only kind there is, is all of it.
    passing = (
        {kind: minus(_reference(referee, f"kinds:{kind}"), response) for kind in by_kind}
        if len(by_kind) > 1
        else dict.fromkeys(by_kind, whole)
    )
    windows = distances(max(setting.problem.prompt_lengths) - 1)
    made = _bands(referee, windows)
    bands = _distance_parts(windows, made, whole)
    return StateTerm(
        arch=setting.config.arch,
        length=setting.config.prompt_length,
        seed=setting.config.seed,
        size=_over(size(whole), scale),
        cosine=_over(dot(minus(full, {}), whole), scale * size(whole)),
        kinds=tuple(KindPart(kind=kind, **_part(part, whole)) for kind, part in passing.items()),
        kinds_left=_left(whole, passing.values(), scale),
        distances=tuple(bands),
        distances_left=_left(whole, made, scale),
        held={f"{share:.0%}": _held(bands, share) for share in HELD},
    )


def distances(boundary: int) -> list[int]:
    """1, 2, 4, .., B - 1 and B tokens back. The first token is apart: attention rests on it in many models."""
    powers = [2**i for i in range(boundary.bit_length()) if 2**i < boundary - 1]
    return [m for m in (*powers, boundary - 1, boundary) if m > 0]


def squared_state_terms(referee: Referee) -> float:
    """The sum over distinct prompts of |state term of that prompt|^2, which roulette's variance is made of.

    Each prompt has a coin of its own, so what counts is the sum of squares, not the square of the sum.
    """
    setting, policy = referee.setting, parse_policy("detach")
    problem, response = setting.problem, _reference(referee, "detach")
    prompts = [members for _, members in shared_prompts(problem)]
    if len(prompts) == 1:
        return size(minus(_reference(referee, "full"), response)) ** 2
    squares = []
    for members in prompts:
        only = Filter(boundary=policy.boundary, share=_of_members(members))
        stopped = stopped_reference(
            setting.model, problem, setting.objective, lambda length: 0, carried=only
        )
        squares.append(size(minus(stopped.response.gradients, response)) ** 2)
    return math.fsum(squares)


def _of_members(members: Sequence[int]) -> Callable[[int, Slot], float]:
    return lambda member, slot: float(member in members)


def _reference(referee: Referee, spec: str) -> Gradients:
    """The reference of a policy, or `full`, in the case's precision."""
    policy = None if spec == "full" else parse_policy(spec)
    claim = Claim(label=spec, policy=policy, objective=referee.setting.objective)
    return referee.native(claim).gradients


def _bands(referee: Referee, windows: Sequence[int]) -> list[Vector]:
    """What the tokens of each window add to the window before it, nearest first."""
    if not windows:
        return []
    setting = referee.setting

    def edges(prompt_length: int) -> list[int]:
        boundary = prompt_length - 1
        return [*(max(boundary - m, 0) for m in reversed(windows[:-1])), boundary]

    _, bands = banded_reference(setting.model, setting.problem, setting.objective, edges)
    return [minus(band, {}) for band in reversed(bands)]


def _distance_parts(
    windows: Sequence[int], bands: Sequence[Vector], whole: Vector
) -> list[DistancePart]:
    parts: list[DistancePart] = []
    above, reached = 0, 0.0
    for upto, band in zip(windows, bands, strict=True):
        numbers = _part(band, whole)
        reached += numbers["projection"] or 0.0
        within = None if numbers["projection"] is None else reached
        parts.append(DistancePart(above=above, upto=upto, within=within, **numbers))
        above = upto
    return parts


def _left(whole: Vector, parts: Iterable[Vector], scale: float) -> float:
    """What the parts miss of the whole, over `scale`; 0 where there are no parts."""
    summed = _sum(parts)
    return (_over(size(minus(whole, summed)), scale) or 0.0) if summed else 0.0


def _held(bands: list[DistancePart], share: float) -> int | None:
    """The least measured distance from which on at least `share` of the whole is reached."""
    found = None
    for band in reversed(bands):
        if band.within is None or band.within < share:
            break
        found = band.upto
    return found


def _part(part: Vector, whole: Vector) -> dict[str, float | None]:
    along, own, all_of_it = dot(part, whole), size(part), size(whole)
    return {
        "norm": _over(own, all_of_it),
        "cosine": _over(along, own * all_of_it),
        "projection": _over(along, all_of_it**2),
    }


def minus(a: Gradients | Vector, b: Mapping[str, Tensor | None]) -> Vector:
    """a - b by name; a gradient that is None or absent is zero."""
    difference: Vector = {}
    for name in [*a, *(name for name in b if name not in a)]:
        left, right = a.get(name), b.get(name)
        if left is not None and right is not None:
            difference[name] = left - right
        elif left is not None or right is not None:
            difference[name] = left if left is not None else -right  # type: ignore[operator]
    return difference


def dot(a: Vector, b: Vector) -> float:
    """The inner product over all parameters, summed in float64."""
    return math.fsum(
        float(torch.dot(promoted(a[name]).flatten(), promoted(b[name]).flatten()))
        for name in a
        if name in b
    )


def size(a: Vector) -> float:
    """The norm over all parameters."""
    return math.hypot(*(norm(promoted(tensor)) for tensor in a.values()))


def _sum(parts: Iterable[Vector]) -> Vector:
    total: Vector = {}
    for part in parts:
        for name, tensor in part.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


def _over(value: float, unit: float) -> float | None:
    return value / unit if unit > 0 else None
