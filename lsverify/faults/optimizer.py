"""Faults of the optimizer step that a path takes itself, declared as one thing and done as another."""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import STEPS, Fault
from lsverify.faults.honest import dense
from lsverify.objective import Objective
from lsverify.paths import StepResult, Update
from lsverify.problems import Problem

SGD = Update(kind="sgd", lr=0.05)
ADAM = Update(kind="adamw", lr=1e-2, weight_decay=0.1)
_MOMENTA: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
Step = Callable[[str, Tensor, Tensor], None]


def _stepped(
    update: Update, step: Step, model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """An honest gradient, and a step by `step(name, weight, gradient)` under the declaration of `update`."""
    result = dense(model, problem, objective)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                step(name, parameter, parameter.grad)
    return StepResult(loss=result.loss, log_probs=result.log_probs, reference="full", update=update)


def learning_rate_applied_twice(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The scheduler and the step both multiply by the learning rate's factor."""

    def step(name: str, weight: Tensor, gradient: Tensor) -> None:
        weight.sub_(2 * SGD.lr * gradient)

    return _stepped(SGD, step, model, problem, objective)


def some_weights_not_stepped(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Norms are in no group of the optimizer."""

    def step(name: str, weight: Tensor, gradient: Tensor) -> None:
        if "norm" not in name:
            weight.sub_(SGD.lr * gradient)

    return _stepped(SGD, step, model, problem, objective)


def step_upwards(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The step climbs what it should descend."""

    def step(name: str, weight: Tensor, gradient: Tensor) -> None:
        weight.add_(SGD.lr * gradient)

    return _stepped(SGD, step, model, problem, objective)


def weights_rounded_after_the_step(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Weights are written back in float32."""

    def step(name: str, weight: Tensor, gradient: Tensor) -> None:
        weight.copy_((weight - SGD.lr * gradient).float())

    return _stepped(SGD, step, model, problem, objective)


def momentum_that_nobody_declared(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Plain descent was declared, and the last step's direction is added."""

    def step(name: str, weight: Tensor, gradient: Tensor) -> None:
        last = _MOMENTA.setdefault(model, {})
        last[name] = gradient + 0.9 * last.get(name, torch.zeros_like(gradient))
        weight.sub_(SGD.lr * last[name])

    return _stepped(SGD, step, model, problem, objective)


class _Adam:
    """AdamW on a model's weights with one thing wrong; its state lives as long as the model and its step count."""

    def __init__(
        self, *, decoupled: bool = True, corrected: bool = True, forgetful: bool = False
    ) -> None:
        self.decoupled, self.corrected, self.forgetful = decoupled, corrected, forgetful
        self.state: WeakKeyDictionary[nn.Module, dict[str, tuple[int, Tensor, Tensor]]] = (
            WeakKeyDictionary()
        )

    def of(self, model: nn.Module, weights: dict[str, Tensor]) -> Step:
        known = self.state.setdefault(model, {})
        if self.forgetful or _is_fresh(known, weights):
            known.clear()

        def step(name: str, weight: Tensor, gradient: Tensor) -> None:
            one, two = ADAM.betas
            zero = torch.zeros_like(gradient)
            count, first, second = known.get(name, (0, zero, zero))
            count += 1
            if not self.decoupled:
                gradient = gradient + ADAM.weight_decay * weight
            first, second = (
                one * first + (1 - one) * gradient,
                two * second + (1 - two) * gradient.square(),
            )
            known[name] = count, first, second
            if self.decoupled:
                weight.mul_(1 - ADAM.lr * ADAM.weight_decay)
            by = (1 - one**count, 1 - two**count) if self.corrected else (1.0, 1.0)
            weight.sub_(ADAM.lr * (first / by[0]) / ((second / by[1]).sqrt() + ADAM.eps))

        return step


def _is_fresh(known: dict[str, tuple[int, Tensor, Tensor]], weights: dict[str, Tensor]) -> bool:
    """Three steps are a training: the next one begins anew."""
    return bool(known) and next(iter(known.values()))[0] >= 3


_COUPLED, _UNCORRECTED, _FORGETFUL = (
    _Adam(decoupled=False),
    _Adam(corrected=False),
    _Adam(forgetful=True),
)


def _adam(adam: _Adam, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    return _stepped(ADAM, adam.of(model, dict(model.named_parameters())), model, problem, objective)


def decay_in_the_gradient(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """AdamW was declared; the decay is added to the gradient, where the moments see it."""
    return _adam(_COUPLED, model, problem, objective)


def moments_not_corrected(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The moments of the first steps are not corrected for having begun at zero."""
    return _adam(_UNCORRECTED, model, problem, objective)


def moments_lost_on_resume(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Weights are restored between steps and the optimizer's moments are not: every step is a first one."""
    return _adam(_FORGETFUL, model, problem, objective)


FAULTS = (
    Fault(
        path=learning_rate_applied_twice, report="OT-12", rung="optimizer_delta", points_at=STEPS
    ),
    Fault(path=some_weights_not_stepped, report="OT-08", rung="optimizer_delta", points_at=STEPS),
    Fault(path=step_upwards, report="", rung="optimizer_delta", points_at=STEPS),
    Fault(
        path=weights_rounded_after_the_step, report="PR-07", rung="optimizer_delta", points_at=STEPS
    ),
    Fault(path=momentum_that_nobody_declared, report="", rung="optimizer_delta", points_at=STEPS),
    Fault(path=decay_in_the_gradient, report="", rung="optimizer_delta", points_at=STEPS),
    Fault(path=moments_not_corrected, report="OT-08", rung="optimizer_delta", points_at=STEPS),
    Fault(path=moments_lost_on_resume, report="OT-08", rung="optimizer_delta", points_at=STEPS),
)
