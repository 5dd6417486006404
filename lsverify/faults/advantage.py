"""Faults of advantages: which rewards are compared with which, and whose advantage is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import LOSS, STEPS, Fault
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


def groups_of_a_fixed_size(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Groups are recovered by a stride of the configured size, whatever their sizes are."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        strided = [i // len(problem.groups[-1]) for i in range(len(problem))]
        return replace(right, advantages=_by_group(rewards, strided, objective))

    return Dense(prepare=plan)(model, problem, objective)


def statistics_of_the_first_response(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Mean and spread come from the first response of each group alone."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        return replace(
            right,
            advantages=right.advantages * 0
            + rewards
            - torch.stack([rewards[problem.group_of.index(g)] for g in problem.group_of]),
        )

    return Dense(prepare=plan)(model, problem, objective)


def standard_deviation_of_a_population(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The spread is divided by n where the objective has n - 1."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        return replace(
            right, advantages=_by_group(rewards, problem.group_of, objective, correction=0)
        )

    return Dense(prepare=plan)(model, problem, objective)


def epsilon_under_the_root(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The small number that keeps the division finite is added to the variance, not to the spread."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        return replace(
            right, advantages=_by_group(rewards, problem.group_of, objective, under_root=True)
        )

    return Dense(prepare=plan)(model, problem, objective)


def rewards_not_scaled(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Rewards are centred and not divided by their spread."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        return replace(
            right,
            advantages=torch.stack(
                [
                    rewards[i]
                    - rewards[[j for j, h in enumerate(problem.group_of) if h == g]].mean()
                    for i, g in enumerate(problem.group_of)
                ]
            ),
        )

    return Dense(prepare=plan)(model, problem, objective)


def whitened_twice(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Advantages of groups are whitened once more over the batch."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(
            right,
            advantages=(right.advantages - right.advantages.mean())
            / (right.advantages.std() + objective.advantage_epsilon),
        )

    return Dense(prepare=plan)(model, problem, objective)


def baseline_includes_its_own_response(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The baseline of a response is the mean over its group, itself included."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        return replace(
            right,
            advantages=torch.stack(
                [
                    rewards[i]
                    - rewards[[j for j, h in enumerate(problem.group_of) if h == g]].mean()
                    for i, g in enumerate(problem.group_of)
                ]
            ),
        )

    return Dense(prepare=plan)(model, problem, objective)


def negative_advantages_dropped(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Only what was better than its group is learnt from."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(right, advantages=right.advantages.clamp(min=0))

    return Dense(prepare=plan)(model, problem, objective)


def advantages_in_half_precision(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Advantages travel in bfloat16 from the workers that score to those that train."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(right, advantages=right.advantages.bfloat16().double())

    return Dense(prepare=plan)(model, problem, objective)


def groups_by_their_prompts_text(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Responses are grouped by what their prompt says: two groups with one prompt become one."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right, rewards = prepare(objective, problem), _rewards(problem)
        prompts = [problem.prompt_hash(g) for g in range(len(problem.groups))]
        merged = [prompts.index(prompts[g]) for g in problem.group_of]
        return replace(right, advantages=_by_group(rewards, merged, objective))

    return Dense(prepare=plan)(model, problem, objective)


def truncated_rewards_still_compared(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Rewards of truncated responses are set to zero after the group was normalised."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        right = prepare(objective, problem)
        return replace(
            right,
            advantages=torch.where(
                torch.tensor([r.truncated for r in problem.responses]), 0.0, right.advantages
            ),
        )

    return Dense(prepare=plan)(model, problem, objective)


def _rewards(problem: Problem) -> Tensor:
    return torch.tensor([r.reward for r in problem.responses], dtype=torch.float64)


def _by_group(
    rewards: Tensor,
    group_of: Sequence[int],
    objective: Objective,
    *,
    correction: int = 1,
    under_root: bool = False,
) -> Tensor:
    """Rewards [N], centred and scaled within each group."""
    found = torch.zeros_like(rewards)
    for group in set(group_of):
        members = [i for i, its in enumerate(group_of) if its == group]
        own = rewards[members]
        if len(own) == 1:
            continue
        variance, epsilon = own.var(correction=correction), objective.advantage_epsilon
        spread = (variance + epsilon).sqrt() if under_root else variance.sqrt() + epsilon
        found[members] = (own - own.mean()) / spread
    return found


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
    Fault(path=groups_of_a_fixed_size, report="AD-01", rung="forward", points_at=LOSS),
    Fault(path=statistics_of_the_first_response, report="AD-04", rung="forward", points_at=LOSS),
    Fault(path=standard_deviation_of_a_population, report="", rung="forward", points_at=LOSS),
    Fault(path=epsilon_under_the_root, report="", rung="forward", points_at=LOSS),
    Fault(path=rewards_not_scaled, report="AD-11", rung="forward", points_at=LOSS),
    Fault(path=whitened_twice, report="AD-08", rung="forward", points_at=LOSS),
    Fault(
        path=baseline_includes_its_own_response,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "rloo"},
    ),
    Fault(path=negative_advantages_dropped, report="", rung="forward", points_at=LOSS),
    Fault(path=advantages_in_half_precision, report="PR-01", rung="forward", points_at=LOSS),
    Fault(
        path=groups_by_their_prompts_text, report="AD-03", rung="optimizer_delta", points_at=STEPS
    ),
    Fault(
        path=truncated_rewards_still_compared,
        report="AD-07",
        rung="optimizer_delta",
        points_at=STEPS,
    ),
)
