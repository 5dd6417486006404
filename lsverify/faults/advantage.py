"""Faults of advantages: which rewards are compared with which, and whose advantage is whose."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective, Plan, prepare
from lsverify.paths import StepResult
from lsverify.problems import Problem


def whole_batch_statistics(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Rewards are normalised over the batch instead of over the group of one prompt."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        rewards = torch.tensor([r.reward for r in problem.responses], dtype=torch.float64)
        whole = (rewards - rewards.mean()) / (rewards.std() + objective.advantage_epsilon)
        return replace(prepare(objective, problem), advantages=whole)

    return Dense(prepare=plan)(model, problem, objective)


def advantages_of_other_rows(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Advantages and sequences were cut into micro-batches in different orders."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(right, advantages=right.advantages.roll(1))

    return Dense(prepare=plan)(model, problem, objective)


FAULTS = (
    Fault(
        path=whole_batch_statistics,
        report="AD-05",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=advantages_of_other_rows,
        report="AD-09",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
)
