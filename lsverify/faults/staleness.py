"""Faults of staleness: a state that outlives what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import Slot, map_state, state_of
from lsverify.faults.catalogue import DECIDED, STEPS, Fault
from lsverify.faults.honest import Sharing, dense, run_prompt
from lsverify.objective import Objective
from lsverify.paths import StepResult, adapters_off, full_score
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


def state_kept_by_length(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Within a batch, a prompt as long as one before it is taken for the same prompt."""
    kept: dict[int, Cache] = {}

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        if len(tokens) not in kept:
            kept[len(tokens)] = run_prompt(model, tokens)
        return kept[len(tokens)]

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


def state_kept_by_its_first_tokens(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Within a batch, prompts are told apart by their first tokens, as blocks of a prefix cache may be."""
    kept: dict[str, Cache] = {}

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        key = f"{len(tokens)} {token_hash(tokens[: len(tokens) // 2])}"
        if key not in kept:
            kept[key] = run_prompt(model, tokens)
        return kept[key]

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


def only_some_states_renewed(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """After an update keys and values are computed anew; convolution and recurrent states are not."""

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        fresh, kept = run_prompt(model, tokens), _OLD.setdefault(model, {})
        old = kept.setdefault(token_hash(tokens), state_of(fresh))
        by_path = {slot.path: tensor for slot, tensor in old.items()}

        def renewed(slot: Slot, tensor: Tensor) -> Tensor:
            return by_path[slot.path] if slot.kind in ("conv", "recurrent") else tensor

        return map_state(fresh, renewed)

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


_OLD: WeakKeyDictionary[nn.Module, dict[str, Mapping[Slot, Tensor]]] = WeakKeyDictionary()


def captured_by_a_frozen_copy(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Prompts run through a copy of the weights that was taken once and never synchronised."""
    if model not in _COPIES:
        _COPIES[model] = {name: p.detach().clone() for name, p in model.named_parameters()}
    old = _COPIES[model]

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        _load(model, old)
        try:
            return run_prompt(model, tokens)
        finally:
            _load(model, now)

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


_COPIES: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


@torch.no_grad()
def _load(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def old_log_probs_renewed(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Old log-probs are scored again on every pass over a batch: the ratio to the sampler is never seen."""
    key = problem.content_hash()
    seen = _SEEN.setdefault(model, set())
    if key in seen:
        current = full_score(model, problem, temperature=objective.temperature)
        problem = problem.replace_logps(old=[row.double() for row in current])
    seen.add(key)
    return dense(model, problem, objective)


_SEEN: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


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
        elsewhere={"glm_moe_dsa": ("forward", DECIDED)},
    ),
    Fault(path=state_kept_by_length, report="CS-01", rung="optimizer_delta", points_at=STEPS),
    Fault(
        path=state_kept_by_its_first_tokens, report="CS-01", rung="optimizer_delta", points_at=STEPS
    ),
    Fault(
        path=only_some_states_renewed,
        report="CS-03",
        rung="optimizer_delta",
        points_at=STEPS,
        architectures=("qwen3_5", "jamba", "mamba2"),
    ),
    Fault(path=captured_by_a_frozen_copy, report="OT-10", rung="optimizer_delta", points_at=STEPS),
    Fault(
        path=old_log_probs_renewed,
        report="RO-08",
        rung="gradient",
        points_at=r"two runs of the path disagree",
    ),
)
