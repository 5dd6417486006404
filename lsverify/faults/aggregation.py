"""Faults of aggregation: what the loss is divided by, and when."""

from __future__ import annotations

from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective, Plan, prepare
from lsverify.paths import StepResult
from lsverify.problems import Problem


def mean_of_micro_batch_means(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Each response is divided by its own tokens and the results are averaged, where all tokens count alike."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        local = {"aggregation": "local_tokens", "micro_batch": 1}
        return prepare(objective.model_copy(update=local), problem)

    return Dense(prepare=plan)(model, problem, objective)


def divided_after_backward(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The loss that is shown is divided by the number of responses; the one that is differentiated is not."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        (len(problem) * loss).backward()

    return Dense(backward=backward)(model, problem, objective)


def divided_twice(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Two components each divide by the number of micro-batches."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        (loss / len(problem)).backward()

    return Dense(backward=backward)(model, problem, objective)


FAULTS = (
    Fault(
        path=mean_of_micro_batch_means,
        report="LN-01",
        rung="forward",
        points_at=r"loss is \S+ instead of",
        options={"objective": "dapo"},
    ),
    Fault(
        path=divided_after_backward,
        report="LN-02",
        rung="gradient",
        points_at=r"every gradient is \d+ times the reference",
    ),
    Fault(
        path=divided_twice,
        report="LN-07",
        rung="gradient",
        points_at=r"every gradient is 1/\d+ times the reference",
    ),
)
