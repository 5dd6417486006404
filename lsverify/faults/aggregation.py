"""Faults of aggregation: what the loss is divided by, and when."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from lsverify.faults.catalogue import LOSS, STEPS, Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective, Plan, prepare
from lsverify.paths import StepResult
from lsverify.problems import Problem

# Micro-batches that somebody once wrote into a configuration.
CONFIGURED = 4


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


def a_fixed_number_of_micro_batches(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The divisor is the configured number of micro-batches, not how many there were."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        (loss * len(problem) / CONFIGURED).backward()

    return Dense(backward=backward)(model, problem, objective)


def tokens_of_the_generation_batch(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Token denominators count a generation batch of two such steps, not the one that is trained on."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(right, denominators=tuple(2 * each for each in right.denominators))

    return Dense(prepare=plan)(model, problem, objective)


def bypasses_the_aggregator(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """This loss ends in a plain mean over sequences, whatever aggregation was asked for."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        mean = {"aggregation": "sequence_mean"}
        return prepare(objective.model_copy(update=mean), problem)

    return Dense(prepare=plan)(model, problem, objective)


def divided_by_the_padded_length(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Every response is divided by the longest one's length, as its padded row is."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        longest = float(max(problem.response_lengths))
        return replace(
            prepare(objective, problem), denominators=(longest * len(problem),) * len(problem)
        )

    return Dense(prepare=plan)(model, problem, objective)


def constant_replaced_by_the_mean_length(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The constant that must not depend on the batch is the batch's own mean length."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        total = float(sum(int(mask.sum()) for mask in right.counted))
        return replace(right, denominators=(total,) * len(problem))

    return Dense(prepare=plan)(model, problem, objective)


def empty_responses_are_no_responses(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A response of which nothing is counted is left out of the number that the loss is divided by."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        kept = sum(bool(mask.any()) for mask in right.counted) / len(problem)
        return replace(right, denominators=tuple(kept * each for each in right.denominators))

    return Dense(prepare=plan)(model, problem, objective)


def groups_without_spread_are_dropped(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Groups of equal rewards are left out of the batch, and of its size."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        used = sum(
            any(right.advantages[i] != 0 for i in _members(problem, g)) * len(_members(problem, g))
            for g in range(len(problem.groups))
        )
        return replace(
            right, denominators=tuple(each * used / len(problem) for each in right.denominators)
        )

    return Dense(prepare=plan)(model, problem, objective)


def _members(problem: Problem, group: int) -> list[int]:
    return [i for i, its in enumerate(problem.group_of) if its == group]


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
    Fault(
        path=a_fixed_number_of_micro_batches,
        report="LN-03",
        rung="gradient",
        points_at=r"every gradient is \S+ times the reference",
    ),
    Fault(
        path=tokens_of_the_generation_batch,
        report="LN-04",
        rung="forward",
        points_at=LOSS,
        options={"objective": "dapo"},
    ),
    Fault(
        path=bypasses_the_aggregator,
        report="LN-08",
        rung="forward",
        points_at=LOSS,
        options={"objective": "dapo"},
    ),
    Fault(path=divided_by_the_padded_length, report="MP-08", rung="forward", points_at=LOSS),
    Fault(
        path=constant_replaced_by_the_mean_length,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "dr_grpo"},
    ),
    Fault(
        path=empty_responses_are_no_responses,
        report="",
        rung="optimizer_delta",
        points_at=STEPS,
        options={"objective": "grpo,mask_truncated=true"},
    ),
    Fault(
        path=groups_without_spread_are_dropped,
        report="AD-07",
        rung="forward",
        points_at=LOSS,
        # The second group then has one member, and no spread.
        options={"group_size": 2},
    ),
)
