"""Faults of the ratio: old and reference log-probs, temperature."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective, Plan, Scores, prepare
from lsverify.paths import StepResult, full_logits, full_score
from lsverify.problems import Problem


def old_log_probs_set_to_current(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The policy that sampled is forgotten: old log-probs are the current ones, and every ratio is 1."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        current = full_score(model, problem, temperature=objective.temperature)
        return prepare(objective, problem.replace_logps(old=[row.double() for row in current]))

    return Dense(prepare=plan)(model, problem, objective)


def temperature_in_one_pass_only(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The pass that trains divides its logits by the sampling temperature; the one that scored did not."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        return full_logits(model, problem, i) / 0.7

    return Dense(logits=logits)(model, problem, objective)


def reference_scored_with_adapters_on(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The reference policy is scored without switching the adapters off, so it is the policy itself."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        with torch.no_grad():
            own = full_score(model, problem, temperature=objective.temperature)
        return prepare(objective, problem, Scores(ref_logp=tuple(row.double() for row in own)))

    return Dense(prepare=plan)(model, problem, objective)


FAULTS = (
    Fault(
        path=old_log_probs_set_to_current,
        report="RO-01",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=temperature_in_one_pass_only,
        report="RO-05",
        rung="forward",
        points_at=r"not the ones it computed",
    ),
    Fault(
        path=reference_scored_with_adapters_on,
        report="RO-14",
        rung="forward",
        points_at=r"loss is \S+ instead of",
        options={"objective": "rloo", "lora": True},
    ),
)
