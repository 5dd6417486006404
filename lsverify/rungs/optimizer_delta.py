"""`optimizer_delta`: optimizer steps on the same and on different problems = closed-form ones on the reference's gradients."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lsverify.compare import Comparison, Limits, compare, message
from lsverify.evidence import Rung
from lsverify.limits import Limit
from lsverify.observe import Run, unchanged, weights_of
from lsverify.optimizers import PROBES, ClosedForm, TorchStep
from lsverify.paths import Path, Update
from lsverify.problems import Problem
from lsverify.referee import Captured, Claim, Referee, computed
from lsverify.references import Gradients, take_gradients

# Each of the steps rounds a weight and its change a few times.
ROUNDINGS = 8


def optimizer_delta(
    fresh: Callable[[], Path], claim: Claim, referee: Referee, own: Update | None
) -> Rung:
    """Probe with SGD and with AdamW, or with the update that the path says it takes itself.

    `fresh()` is the path without anything kept from earlier steps. A policy that keeps a capture for n steps is
    followed for n + 1.
    """
    if referee.setting.config.dtype == "bfloat16":
        return Rung(
            name="optimizer_delta",
            status="not_applicable",
            detail="bfloat16 weights round an update of this size away, the reference's too: use bfloat16-autocast, whose "
            "weights are float32",
        )
    worst: tuple[float, Comparison, Update] | None = None
    for update in (own,) if own else PROBES:
        made = functools.partial(_reference_delta, claim, referee, update)
        expected = referee.delta(claim, repr(update), made)
        actual = _path_delta(fresh(), claim, referee, update, steps_itself=own is not None)
        limits = _limits(expected, claim, referee, update)
        comparison = compare(expected, actual, limits=limits, slices=referee.slices)
        if not comparison.passed:
            return Rung(
                name="optimizer_delta",
                status=comparison.status,
                measure=comparison.rel_l2,
                limit=comparison.limit,
                detail=f"after {_count(claim)} {update.kind} steps: {message(comparison)}",
            )
        if comparison.status == "proven_zero" and _trains(claim, referee):
            return Rung(
                name="optimizer_delta",
                status="vacuous",
                detail=f"{_count(claim)} {update.kind} steps of lr {update.lr:g} move no parameter, though the gradient is not zero",
            )
        rel = comparison.rel_l2 or 0.0
        if worst is None or rel > worst[0]:
            worst = (rel, comparison, update)
    assert worst is not None
    rel, comparison, update = worst
    return Rung(
        name="optimizer_delta",
        status=comparison.status,
        measure=rel,
        limit=max((t.limit for t in comparison.tensors), default=comparison.limit),
        detail=f"parameters after {_count(claim)} steps; furthest under {update.kind}, {comparison.worst_parameter}",
    )


def _count(claim: Claim) -> int:
    refresh = claim.policy.refresh if claim.policy else None
    return max(3, (refresh or 1) + 1)


def _problems(claim: Claim, referee: Referee) -> list[Problem]:
    """The first problem twice, as several updates on one batch of rollouts do, then the second and the first in turn."""
    both = (referee.setting.problem, referee.setting.second)
    return [both[step > 0 and step % 2 == 0] for step in range(_count(claim))]


class _Captures:
    """The parameters under which each prompt's state was captured, for a claim that keeps it for several steps."""

    def __init__(self, claim: Claim) -> None:
        self._refresh = claim.policy.refresh if claim.policy else None
        self._at: dict[str, tuple[int, Mapping[str, Tensor]]] = {}

    def of(self, problem: Problem, step: int, weights: Mapping[str, Tensor]) -> Captured | None:
        """For step `step` at `weights`: its prompts are captured now unless their state still serves."""
        if self._refresh is None:
            return None
        for group in range(len(problem.groups)):
            key = problem.prompt_hash(group)
            if key not in self._at or step - self._at[key][0] >= self._refresh:
                self._at[key] = step, dict(weights)
        return lambda member: self._at[problem.prompt_hash(problem.group_of[member])][1]


def _trains(claim: Claim, referee: Referee) -> bool:
    gradients = referee.oracle(claim).gradients.values()
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def _reference_delta(claim: Claim, referee: Referee, update: Update) -> Gradients:
    """Change of every trainable parameter by closed-form steps in float64."""
    # Copies: the oracle is moved to later weights and back while these are kept.
    start = {name: tensor.double().clone() for name, tensor in _trainable(referee.setting.model)}
    weights, optimizer = dict(start), ClosedForm(update)
    captures = _Captures(claim)
    for step, problem in enumerate(_problems(claim, referee)):
        captured = captures.of(problem, step, weights)
        gradients = (
            referee.oracle(claim).gradients
            if step == 0
            else referee.gradient_at(weights, claim, problem, captured)
        )
        weights = optimizer.step(weights, gradients)
    return {name: weights[name] - start[name] for name in start}


def _path_delta(
    path: Path, claim: Claim, referee: Referee, update: Update, *, steps_itself: bool
) -> Gradients:
    """Change of every trainable parameter when the path's gradients go through torch's optimizer (or its own)."""
    model = referee.setting.model
    before = weights_of(model)
    with unchanged(model, Run()):
        optimizer = TorchStep(model, update)
        for problem in _problems(claim, referee):
            take_gradients(model)
            path(model, copy.deepcopy(problem), referee.setting.objective)
            if not steps_itself:
                dense_gradients(model)
                optimizer.step()
        return {
            name: tensor.double() - before[name].double()
            for name, tensor in _trainable(model)
            if name in before
        }


def dense_gradients(model: nn.Module) -> None:
    """Sparse and expanded gradients are gradients, but torch neither clips them nor steps AdamW on them."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            parameter.grad = gradient.to_dense()
        elif 0 in gradient.stride():
            parameter.grad = gradient.contiguous()


def _limits(expected: Gradients, claim: Claim, referee: Referee, update: Update) -> Limits:
    """At oracle precision 1e-12 plus the rounding of theta + delta, relative to delta; else measured.

    Measured: the claimed reference's gradients in the case's precision, stepped by torch's optimizer.
    """
    model = referee.setting.model
    if referee.setting.oracle is model:
        return rounding_limits(expected, dict(_trainable(model)))
    native = _path_delta(_reference_path(claim), claim, referee, update, steps_itself=False)
    return referee.measured(expected, native)


def rounding_limits(expected: Gradients, weights: Mapping[str, Tensor]) -> Limits:
    """1e-12 plus the rounding of a float64 weight that is moved by `expected`, relative to it."""
    eps = torch.finfo(torch.float64).eps
    per_tensor: dict[str, Limit] = {}
    for name, delta in expected.items():
        size = float(delta.norm()) if delta is not None else 0.0
        rounding = ROUNDINGS * eps * float(weights[name].norm()) / size if size else 0.0
        value = min(1e-12 + rounding, 1e-6)
        per_tensor[name] = Limit(
            value, "1e-12 plus the rounding of a weight that moves this little"
        )
    return Limits(per_tensor=per_tensor)


def _reference_path(claim: Claim) -> Path:
    """The claimed reference as a path: leaves its gradients in `.grad`."""
    captures, steps = _Captures(claim), itertools.count()

    def path(model: nn.Module, problem, objective):  # type: ignore[no-untyped-def]
        captured = captures.of(problem, next(steps), weights_of(model))
        reference = computed(model, claim, problem, captured)
        for name, parameter in model.named_parameters():
            gradient = reference.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    return path


def _trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
