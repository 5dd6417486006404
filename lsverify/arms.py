"""Arms of a comparison: trainings that differ in how the step's gradient comes about, and in nothing else.

`full` is full autograd, the reference; any policy of `lsverify.policies` is LongStraw's path. `other_seeds` is full
autograd on other prompts and random numbers, the yardstick of what no difference looks like. `scrambled` is the positive
control: full autograd that sees each prompt with its tokens in another order, so its step misses what the answer rests on.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from lsverify.errors import InputError
from lsverify.objective import Objective
from lsverify.paths import StepResult, full_autograd, longstraw
from lsverify.policies import Policy, parse_policy
from lsverify.problems import Problem
from lsverify.rollouts_online import scrambled
from lsverify.scoring import full_score, score
from lsverify.stale import StaleStates
from lsverify.stale_drift import Drift, drift_of

REFERENCE, YARDSTICK, CONTROL = "full", "other_seeds", "scrambled"


class Arm(Protocol):
    """What a training asks of its arm: `begin` when the prompts change, `score` for the old log-probs of a rollout."""

    def begin(self) -> None: ...

    def score(
        self, model: nn.Module, problem: Problem, objective: Objective
    ) -> tuple[Tensor, ...]: ...

    def step(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult: ...

    def drift(self, model: nn.Module, problem: Problem, objective: Objective) -> Drift | None:
        """Of what the step's prompts were captured with, after its update; None where nothing outlives a step."""


class Full:
    """Full autograd, all responses in one padded pass, or one after the other."""

    def __init__(self, *, serial: bool = False) -> None:
        self._batched = not serial

    def begin(self) -> None:
        pass

    def score(self, model: nn.Module, problem: Problem, objective: Objective) -> tuple[Tensor, ...]:
        return full_score(model, problem, temperature=objective.temperature, batched=self._batched)

    def step(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
        return full_autograd(model, problem, objective, batched=self._batched)

    def drift(self, model: nn.Module, problem: Problem, objective: Objective) -> Drift | None:
        return None


class Scrambled(Full):
    """The same behind scrambled prompts."""

    def __init__(self, seed: int, *, serial: bool = False) -> None:
        super().__init__(serial=serial)
        self._seed = seed

    def score(self, model: nn.Module, problem: Problem, objective: Objective) -> tuple[Tensor, ...]:
        return super().score(model, scrambled(problem, seed=self._seed), objective)

    def step(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
        return super().step(model, scrambled(problem, seed=self._seed), objective)


class LongStraw:
    """A policy's path; the responses of a prompt are replayed together."""

    def __init__(self, policy: Policy, chunk: int) -> None:
        self._policy, self._chunk = policy, chunk
        self._states: StaleStates | None = None

    def begin(self) -> None:
        if self._policy.refresh:
            self._states = StaleStates(self._policy.refresh)

    def score(self, model: nn.Module, problem: Problem, objective: Objective) -> tuple[Tensor, ...]:
        return score(
            model,
            problem,
            temperature=objective.temperature,
            policy=self._policy,
            chunk=self._chunk,
            branches=len(problem),
        )

    def step(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
        return longstraw(
            model,
            problem,
            objective,
            policy=self._policy,
            chunk=self._chunk,
            branches=len(problem),
            states=self._states,
        )

    def drift(self, model: nn.Module, problem: Problem, objective: Objective) -> Drift | None:
        if self._states is None:
            return None
        return drift_of(model, problem, objective, self._policy, self._states, self._chunk)


def policy_of(spec: str) -> Policy | None:
    """The policy of an arm's name, None for one of full autograd. Raises `InputError`."""
    if spec in (REFERENCE, YARDSTICK, CONTROL):
        return None
    try:
        return parse_policy(spec)
    except InputError as error:
        raise InputError(
            f"arm {spec!r} is neither {REFERENCE}, {YARDSTICK}, {CONTROL} nor a policy: {error}"
        ) from None


def make_arm(spec: str, *, seed: int, chunk: int, serial: bool = False) -> Arm:
    """The arm of this name at its beginning; `serial` is full autograd's. Raises `InputError` for an unknown one."""
    policy = policy_of(spec)
    if policy is not None:
        return LongStraw(policy, chunk)
    return Scrambled(seed, serial=serial) if spec == CONTROL else Full(serial=serial)
