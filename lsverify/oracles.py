"""Outside oracles for the objective: plain scalar arithmetic, finite differences, and the check that uses both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lsverify.by_hand import (
    Rows,
    entropy_by_hand,
    logp_by_hand,
    loss_by_hand,
    terms_by_hand,
)
from lsverify.objective import Plan, Scores, monolithic, prepare
from lsverify.ratio_zones import log_edges, zone_order

if TYPE_CHECKING:
    from lsverify.objective import Objective
    from lsverify.problems import Problem, Response

__all__ = ["Derivative", "check_objective", "finite_difference", "loss_by_hand"]

Loss = Callable[["Objective", "Problem", Sequence[Tensor], Scores | None], Tensor]

EQUALITY_LIMIT = 1e-12
"""Relative, float64: two exact evaluations of one formula differ by rounding, some 1e-15."""
DIFFERENCE_CAP = 1e-7
"""Relative: central differences whose own error estimate is above this prove nothing."""
VOCABULARY = 11
"""Token ids are taken modulo this in `check_objective`: the loss sees a token only through its row."""


class Derivative(NamedTuple):
    """A directional derivative and an estimate of its absolute error."""

    value: float
    error: float


def finite_difference(
    fn: Callable[[Any], Sequence[float]],
    x: Any,
    direction: Any,
    h: float,
    noise: Sequence[float] | None = None,
) -> Derivative:
    """d sum(fn(x + s * direction)) / ds at s = 0, by central differences at h, h/2, h/4 and Richardson extrapolation.

    x and direction are float64 arrays or tensors, or equal lists, tuples or mappings of them; fn takes what x is
    and returns the terms of a sum, without a kink within h. The error is the last extrapolation's change plus rounding,
    where `noise` is the absolute rounding error of each term (default: 2^-52 times its largest value); a term that stays
    as it is to the bit adds none. Six evaluations. Truncation falls with h^6, rounding grows with 1/h.
    """
    largest: list[float] = []
    moving: set[int] = set()
    table = []
    for step in (h, h / 2, h / 4):
        up, down = fn(_moved(x, direction, step)), fn(_moved(x, direction, -step))
        largest = [max(map(abs, each)) for each in zip(up, down, largest or up, strict=True)]
        moving |= {
            k for k, (above, below) in enumerate(zip(up, down, strict=True)) if above != below
        }
        apart = math.fsum(above - below for above, below in zip(up, down, strict=True))
        table.append(apart / (2 * step))
    first = [(4 * fine - coarse) / 3 for coarse, fine in pairwise(table)]
    value = (16 * first[1] - first[0]) / 15
    errors = [2.0**-52 * each for each in largest] if noise is None else noise
    rounding = math.fsum(errors[k] for k in moving) / (h / 4)
    return Derivative(value, abs(value - first[1]) + 2 * rounding)


def _moved(x: Any, direction: Any, step: float) -> Any:
    if isinstance(x, Mapping):
        return {key: _moved(value, direction[key], step) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return type(x)(_moved(a, b, step) for a, b in zip(x, direction, strict=True))
    return x + step * direction


@dataclass(frozen=True)
class _Finding:
    name: str
    measure: float
    limit: float

    def badness(self) -> float:
        """Above 1: refused. NaN counts as the worst there is."""
        return self.measure / self.limit if math.isfinite(self.measure) else math.inf


def check_objective(
    objective: Objective,
    problem: Problem,
    seed: int,
    *,
    scores: Scores | None = None,
    loss: Loss | None = None,
) -> tuple[float, float, str]:
    """The rung `objective` for one problem: (measure, limit, detail); it holds where measure <= limit.

    Logits [R_i, 11] are drawn near the problem's old log-probs, once for each zone that the clip's edges cut from
    the ratio axis, so that every counted token (or response) visits every zone and keeps away from the edges; with an
    off-policy threshold twice more, every response once on each side of it. On each draw the loss is compared, in float64, with `monolithic` (value and gradient), with `loss_by_hand`, with
    itself when masked rows hold NaN, and its gradient with central differences of `loss_by_hand` along the
    gradient and three random directions. All measures are relative; the one returned is the worst in units of
    its limit.

    loss: what is judged, a function with `monolithic`'s signature; default: the sum of `Plan.member`.
    """
    small = _with_small_vocabulary(problem)
    plan = prepare(objective, small, scores)
    findings, sides, zero = [], [], True
    for turn in range(
        len(objective.edges()) + (1 if objective.off_policy_threshold is None else 3)
    ):
        logits = _draw_logits(objective, small, plan, seed, turn)
        logps, _ = _score_by_hand(objective, small, [each.numpy() for each in logits])
        sides += [
            plan.clip_side(i, torch.tensor(row, dtype=torch.float64)) for i, row in enumerate(logps)
        ]
        found, norm = _compare(
            loss or _sum_of_members, objective, small, plan, logits, scores, seed + turn
        )
        findings += found
        zero = zero and norm == 0
    worst = max(findings, key=_Finding.badness)
    side = torch.cat(sides)
    detail = (
        f"{worst.name}: {worst.measure:.1e} of at most {worst.limit:.1e}; {len(findings)} comparisons, "
        f"{sum(int(mask.sum()) for mask in plan.counted)} tokens counted, "
        f"{int((side < 0).sum())} clipped low, {int((side > 0).sum())} high"
    )
    return worst.measure, worst.limit, detail + (", gradient exactly zero" if zero else "")


def _compare(
    judged: Loss,
    objective: Objective,
    problem: Problem,
    plan: Plan,
    logits: Sequence[Tensor],
    scores: Scores | None,
    seed: int,
) -> tuple[list[_Finding], float]:
    """All comparisons on one draw of logits, and the norm of the gradient, or of the reference's if larger."""
    value, gradient = _evaluate(judged, objective, problem, logits, scores)
    whole, whole_gradient = _evaluate(monolithic, objective, problem, logits, scores)

    arrays = [each.numpy() for each in logits]
    logps, entropies = _score_by_hand(objective, problem, arrays)
    ref = [each.tolist() for each in scores.ref_logp] if scores and scores.ref_logp else None
    terms = terms_by_hand(objective, problem, logps, entropies, ref, logps)
    size = math.fsum(term.size for term in terms) or 1.0
    by_hand = math.fsum(term.value for term in terms)
    # A gradient that cancels (or is zero) is measured against what it would be without cancellation.
    floor = 1e-3 * math.sqrt(math.fsum(term.size**2 for term in terms)) or 1.0
    norm = max(_norm(whole_gradient), floor)

    poisoned = [
        torch.where(mask[:, None], each, math.nan)
        for each, mask in zip(logits, plan.counted, strict=True)
    ]
    masked_value, masked_gradient = _evaluate(judged, objective, problem, poisoned, scores)
    change = abs(masked_value - value) / size + _apart(masked_gradient, gradient) / norm
    apart = _apart(gradient, whole_gradient) / norm
    findings = [
        _Finding("value, monolithic form", abs(value - whole) / size, EQUALITY_LIMIT),
        _Finding("value, by hand", abs(value - by_hand) / size, EQUALITY_LIMIT),
        _Finding("gradient, monolithic form", apart, EQUALITY_LIMIT),
        _Finding("NaN at masked rows", change, EQUALITY_LIMIT),
    ]

    def along(rows: list[NDArray[np.float64]]) -> list[float]:
        moved, entropy = _score_by_hand(objective, problem, rows)
        found = terms_by_hand(objective, problem, moved, entropy, ref, logps)
        return [term.value for term in found]

    # A term is rounded as it is made, and before that each log-prob is, half a unit of its largest logit by chance of sign.
    largest = max(float(each.abs().max()) for each in logits) / objective.temperature
    noise = [(2.0**-50 + 2.0**-54 * largest) * term.size for term in terms]
    h = _step(objective, problem, plan, logps)
    for name, direction in _directions(whole_gradient, seed):
        reach = norm * _norm(direction) or 1.0
        slope = math.fsum(float((a * b).sum()) for a, b in zip(gradient, direction, strict=True))
        difference = finite_difference(
            along, arrays, [each.numpy() for each in direction], h, noise=noise
        )
        # Where no term moves there is no error, and a slope of zero is one to rounding.
        limit = max(difference.error / reach, 2.0**-52)
        measure = abs(slope - difference.value) / reach
        label = f"central differences along {name}"
        if not limit <= DIFFERENCE_CAP:
            label, measure = f"{label} (error estimate {limit:.1e}, too coarse)", math.inf
        findings.append(_Finding(label, measure, min(limit, DIFFERENCE_CAP)))
    return findings, max(_norm(gradient), _norm(whole_gradient))


def _directions(gradient: Sequence[Tensor], seed: int) -> list[tuple[str, list[Tensor]]]:
    """The gradient and three random directions, each with a largest element of 1 (unless it is zero)."""
    generator = torch.Generator().manual_seed(seed)
    directions = [("the gradient", list(gradient))]
    for number in range(1, 4):
        random = [
            torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in gradient
        ]
        directions.append((f"random direction {number}", random))
    scaled = []
    for name, direction in directions:
        largest = max(float(each.abs().max()) for each in direction) or 1.0
        scaled.append((name, [each / largest for each in direction]))
    return scaled


def _sum_of_members(
    objective: Objective, problem: Problem, logits: Sequence[Tensor], scores: Scores | None
) -> Tensor:
    plan = prepare(objective, problem, scores)
    return torch.stack([plan.member(i, each).loss for i, each in enumerate(logits)]).sum()


def _evaluate(
    loss: Loss,
    objective: Objective,
    problem: Problem,
    logits: Sequence[Tensor],
    scores: Scores | None,
) -> tuple[float, list[Tensor]]:
    leaves = [each.clone().requires_grad_() for each in logits]
    value = loss(objective, problem, leaves, scores)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return value.detach().item(), [
        torch.zeros_like(leaf) if each is None else each
        for each, leaf in zip(gradients, leaves, strict=True)
    ]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(each.square().sum()) for each in tensors))


def _apart(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return _norm([a - b for a, b in zip(left, right, strict=True)])


def _with_small_vocabulary(problem: Problem) -> Problem:
    return problem.replace_responses(
        [{"tokens": each.tokens % VOCABULARY} for each in problem.responses]
    )


def _draw_logits(
    objective: Objective, problem: Problem, plan: Plan, seed: int, turn: int
) -> list[Tensor]:
    """N tensors [R_i, 11] whose log-probs sit at log-ratios drawn from the zones of the clip.

    Members of one advantage sign take the zones in turn, beginning with number `turn`.
    """
    generator = torch.Generator().manual_seed(seed + turn)
    logits, turns = [], {-1: turn, 1: turn}
    for i, response in enumerate(problem.responses):
        sign = -1 if float(plan.advantages[i]) < 0 else 1
        zones = zone_order(objective.edges(), sign)
        rows = torch.randn(
            len(response.tokens), VOCABULARY, generator=generator, dtype=torch.float64
        )
        counted = plan.counted[i].nonzero()[:, 0]
        aims = torch.zeros(len(rows), dtype=torch.float64)
        if objective.ratio in ("sequence", "trajectory") and len(counted):
            noise = 0.2 * torch.randn(len(counted), generator=generator, dtype=torch.float64)
            aim = zones[turns[sign] % len(zones)].draw(1, generator)
            aim = aim if objective.ratio == "sequence" else aim / len(counted)
            aims[counted] = aim + noise - noise.mean()
            turns[sign] += 1
        else:
            for t in counted.tolist():
                aims[t] = zones[turns[sign] % len(zones)].draw(1, generator)[0]
                turns[sign] += 1
        if turn > len(objective.edges()) and len(counted):
            aims[counted] += _drift_change(
                objective, response, aims, counted, far=(i + turn) % 2 == 1
            )
        # A log-prob is below zero whatever the old one was; masked slots may hold anything.
        wanted = torch.where(plan.counted[i], response.old_logp + aims, -1.0).clamp(max=-1e-3)
        others = rows.scatter(1, response.tokens[:, None], -math.inf).logsumexp(1)
        chosen = others + wanted - torch.log(-torch.expm1(wanted))
        rows = rows.scatter(1, response.tokens[:, None], chosen[:, None])
        logits.append(objective.temperature * rows)
    return logits


def _drift_change(
    objective: Objective, response: Response, aims: Tensor, counted: Tensor, far: bool
) -> float:
    """What to add to the aims of the counted tokens so that the response's drift is beyond the threshold, or near it."""
    sampler = response.old_logp if response.sampler_logp is None else response.sampler_logp
    drift = float((sampler - response.old_logp - aims)[counted].mean())
    return drift - (objective.off_policy_threshold or 0.0) * (1.5 if far else 0.75)


def _score_by_hand(
    objective: Objective, problem: Problem, rows: Sequence[NDArray[np.float64]]
) -> tuple[list[list[float]], list[list[float]] | None]:
    logps, entropies = [], []
    for response, its in zip(problem.responses, rows, strict=True):
        pairs = list(zip(its.tolist(), response.tokens.tolist(), strict=True))
        logps.append([logp_by_hand(row, token, objective.temperature) for row, token in pairs])
        if objective.entropy_bonus:
            entropies.append([entropy_by_hand(row, objective.temperature) for row, _ in pairs])
    return logps, entropies if objective.entropy_bonus else None


def _step(objective: Objective, problem: Problem, plan: Plan, logps: Rows) -> float:
    """A step for logits moved by at most 1 per unit, small enough that no ratio crosses an edge of the clip."""
    room = math.inf
    # The weight of cispo is a constant here, so its edges do not bend the loss; nor do those of a zero advantage.
    edges = log_edges(objective.edges()) if objective.clip == "two_sided" else ()
    for i, (response, row) in enumerate(zip(problem.responses, logps, strict=True)):
        log_ratio = (torch.tensor(row, dtype=torch.float64) - response.old_logp)[plan.counted[i]]
        if not len(log_ratio) or float(plan.advantages[i]) == 0:
            continue
        tokens = 1
        if objective.ratio != "token":
            # The changes of all tokens add up in the sum, and their mean moves no further than one of them.
            tokens = len(log_ratio) if objective.ratio == "trajectory" else 1
            log_ratio = tokens * log_ratio.mean()[None]
        for edge in edges:
            room = min(room, float((log_ratio - edge).abs().min()) / tokens)
    # A log-prob moves by at most 2 / temperature per unit; half the room keeps clear of the edge.
    return objective.temperature * min(2e-3, room / 4)
