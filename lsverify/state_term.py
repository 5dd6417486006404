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
from lsverify.referee import Claim, Referee, computed
from lsverify.references import Filter, Gradients, stopped_reference
from lsverify.rungs.gradient import consistent

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
    |sum of the parts - whole| / |full|, which is rounding. held: the least of the measured distances (powers of two,
    and B) from which on the sum stays at or above 50% and 90% of the whole. inconsistent: windows whose two reference
    terms do not sum to full autograd (looked for at oracle precision only).
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
    inconsistent: tuple[str, ...] = ()


def state_term(referee: Referee, kinds: Iterable[str]) -> StateTerm:
    """Take the state term of the referee's problem apart, in the case's precision.

    kinds: the kinds of state that the model has.
    """
    setting, reference = referee.setting, _References(referee)
    full, response = reference.full, reference.of("detach")
    whole, scale = minus(full, response), size(minus(full, {}))
    boundary = max(setting.problem.prompt_lengths) - 1
    by_kind = list(kinds)
    # What passes through the only kind there is, is all of it.
    passing = (
        {kind: minus(reference.of(f"kinds:{kind}"), response) for kind in by_kind}
        if len(by_kind) > 1
        else dict.fromkeys(by_kind, whole)
    )
    parts = [KindPart(kind=kind, **_part(part, whole)) for kind, part in passing.items()]
    bands, last = _bands(reference, response, whole, boundary)
    lost = minus(whole, _sum(passing.values())) if passing else {}
    return StateTerm(
        arch=setting.config.arch,
        length=setting.config.prompt_length,
        seed=setting.config.seed,
        size=_over(size(whole), scale),
        cosine=_over(dot(minus(full, {}), whole), scale * size(whole)),
        kinds=tuple(parts),
        kinds_left=_over(size(lost), scale) or 0.0,
        distances=tuple(bands),
        distances_left=(_over(size(minus(whole, last)), scale) or 0.0) if bands else 0.0,
        held={f"{share:.0%}": _held(bands, share) for share in HELD},
        inconsistent=tuple(reference.inconsistent),
    )


def distances(boundary: int) -> list[int]:
    """1, 2, 4, .. and B, the windows that are measured."""
    powers = [2**i for i in range(boundary.bit_length()) if 2**i < boundary]
    return [*powers, boundary] if boundary > 0 else []


def squared_state_terms(referee: Referee) -> float:
    """The sum over distinct prompts of |state term of that prompt|^2, which roulette's variance is made of.

    Each prompt has a coin of its own, so what counts is the sum of squares, not the square of the sum.
    """
    setting, reference = referee.setting, _References(referee)
    problem, policy = setting.problem, parse_policy("detach")
    response = reference.of("detach")
    prompts = [members for _, members in shared_prompts(problem)]
    if len(prompts) == 1:
        return size(minus(reference.full, response)) ** 2
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


class _References:
    """References by policy, in the case's precision; at oracle precision each is held to full autograd first."""

    def __init__(self, referee: Referee) -> None:
        self._referee, self._objective = referee, referee.setting.objective
        self.inconsistent: list[str] = []
        self.full = referee.native(self._claim("full")).gradients

    def _claim(self, spec: str) -> Claim:
        policy = None if spec == "full" else parse_policy(spec)
        return Claim(label=spec, policy=policy, objective=self._objective)

    def of(self, spec: str) -> Gradients:
        claim, setting = self._claim(spec), self._referee.setting
        if setting.oracle is not setting.model:
            if spec == "detach":
                return self._referee.native(claim).gradients
            # Not remembered: a gradient of a real model is large, and each of these is met once.
            return computed(setting.model, claim, setting.problem).gradients
        summed = consistent(claim, self._referee)
        if summed is not None and not summed.passed:
            self.inconsistent.append(spec)
        return self._referee.oracle(claim).gradients


def _bands(
    reference: _References, response: Gradients, whole: Vector, boundary: int
) -> tuple[list[DistancePart], Vector]:
    """The bands between consecutive windows, from B back, and the state term of the widest window."""
    bands: list[DistancePart] = []
    above, before, squared = 0, Vector(), dot(whole, whole)
    for upto in distances(boundary):
        within = minus(reference.of(f"window:{upto}"), response)
        band = _part(minus(within, before), whole)
        reached = _over(dot(within, whole), squared)
        bands.append(DistancePart(above=above, upto=upto, within=reached, **band))
        above, before = upto, within
    return bands, before


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
