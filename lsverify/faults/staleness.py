"""Faults of staleness: a state that outlives what it was computed from."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Sharing, run_prompt
from lsverify.objective import Objective
from lsverify.paths import StepResult, adapters_off
from lsverify.problems import Problem
from lsverify.tags import token_hash

_STATES: WeakKeyDictionary[nn.Module, dict[str, Cache]] = WeakKeyDictionary()


def state_kept_over_an_update(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Prompt states are kept by their tokens, whatever the weights were: right until the optimizer has stepped."""

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        kept = _STATES.setdefault(model, {})
        key = token_hash(tokens)
        if key not in kept:
            kept[key] = run_prompt(model, tokens)
        return kept[key]

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


def state_of_another_adapter(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The prompt was captured while the adapters were off, for the reference, and serves the policy as well."""

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        with adapters_off(model):
            return run_prompt(model, tokens)

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


FAULTS = (
    Fault(
        path=state_kept_over_an_update,
        report="CS-01",
        rung="optimizer_delta",
        points_at=r"after 3 sgd steps",
    ),
    Fault(
        path=state_of_another_adapter,
        report="CS-04",
        rung="forward",
        points_at=r"response \d+ token",
        options={"objective": "rloo", "lora": True},
        elsewhere={"glm_moe_dsa": ("forward", r"decisions differ, first \S*indexer")},
    ),
)
