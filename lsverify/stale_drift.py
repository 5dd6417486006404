"""How far a prompt's state that outlived optimizer steps is from a fresh capture: the paper's table of stale prefixes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lsverify.objective import Objective, Plan, prepare, token_logp
from lsverify.policies import Policy
from lsverify.problems import Problem
from lsverify.scoring import CHUNK, branch_logits, score, shared_prompts
from lsverify.stale import StaleStates


class Drift(BaseModel):
    """Of one rollout at the weights after a step.

    age: optimizer steps taken since the capture. log_prob: mean over all response tokens of |kept - fresh|, in nats.
    loss_kept, loss_fresh: the objective without terms of entropy, from log-probs over each state.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    age: int
    log_prob: float
    loss_kept: float
    loss_fresh: float


@torch.no_grad()
def drift_of(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    policy: Policy,
    states: StaleStates,
    chunk: int = CHUNK,
) -> Drift:
    """Against a capture at the present weights. All prompts of the problem have states in `states`, of one age."""
    kept: dict[int, Tensor] = {}
    ages = set()
    for prompt, members in shared_prompts(problem):
        age, state = states.kept(prompt, policy.boundary(len(prompt)), problem.spans(members[0]))
        ages.add(age)
        for i, logits in zip(
            members, branch_logits(model, problem, members, state, {}), strict=True
        ):
            kept[i] = token_logp(logits, problem.responses[i].tokens, objective.temperature)
    (age,) = ages
    fresh = score(
        model,
        problem,
        temperature=objective.temperature,
        policy=policy,
        chunk=chunk,
        branches=len(problem),
    )
    plan = prepare(objective, problem)
    old = [kept[i] for i in range(len(problem))]
    return Drift(
        age=age,
        log_prob=float((torch.cat(old) - torch.cat(fresh)).abs().mean()),
        loss_kept=_loss(plan, old),
        loss_fresh=_loss(plan, fresh),
    )


def _loss(plan: Plan, log_probs: Iterable[Tensor]) -> float:
    return sum(float(plan.part(i, logp)) for i, logp in enumerate(log_probs))


@dataclass(frozen=True, kw_only=True)
class DriftRow:
    """Of all captures of one refresh interval, `age` optimizer steps after them.

    log_prob: mean of the drifts, in nats. loss_difference: mean |kept - fresh| over mean |fresh|, None where every fresh loss is
    0. captures: how many were averaged.
    """

    refresh: int
    age: int
    log_prob: float
    loss_difference: float | None
    captures: int


def drift_table(found: Iterable[tuple[int, Drift]]) -> list[DriftRow]:
    """Pairs of refresh interval and drift, by interval and age. A capture is old when its interval ends: that row has age = refresh."""
    cells: dict[tuple[int, int], list[Drift]] = {}
    for refresh, drift in found:
        cells.setdefault((refresh, drift.age), []).append(drift)
    return [_row(*key, cells[key]) for key in sorted(cells)]


def _row(refresh: int, age: int, drifts: list[Drift]) -> DriftRow:
    apart = sum(abs(drift.loss_kept - drift.loss_fresh) for drift in drifts)
    whole = sum(abs(drift.loss_fresh) for drift in drifts)
    return DriftRow(
        refresh=refresh,
        age=age,
        log_prob=sum(drift.log_prob for drift in drifts) / len(drifts),
        loss_difference=apart / whole if whole else None,
        captures=len(drifts),
    )
