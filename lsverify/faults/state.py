"""Faults of the shared state: what a branch is handed, what it leaves behind, what goes back through it."""

from __future__ import annotations

from functools import cache as memoize
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from lsverify.cache import Slot, map_state, new_cache
from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Leaves, Sharing, run_branch, run_prompt
from lsverify.objective import Objective
from lsverify.paths import StepResult, full_autograd
from lsverify.problems import Problem
from lsverify.prompt import unwrapped


def keys_appended_without_gradient(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Every append to the cache runs under no_grad: values stay, gradients through keys and values are gone."""

    def cut(cache: Cache) -> Cache:
        layers: list[Any] = cache.layers
        for layer in layers:
            if isinstance(layer, DynamicLayer):
                library_class: type = type(layer)
                layer.__class__ = _cutting(library_class)
        return cache

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        return cut(run_prompt(model, tokens))

    return Sharing(claim="detach", prompt=prompt)(model, problem, objective)


@memoize
def _cutting(layer_class: type) -> type:
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return layer_class.update(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(f"Cutting{layer_class.__name__}", (layer_class,), {"update": update})


def recurrent_state_not_differentiated(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The sweep sends nothing back through the recurrent state: one family loses its state term."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        return None if slot.kind == "recurrent" else cotangent

    return Sharing(returned=returned)(model, problem, objective)


def values_not_differentiated(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The sweep forgets the values of the last layer's state and returns its keys only."""

    def returned(slot: Slot, cotangent: Tensor) -> Tensor | None:
        last = slot.layer == unwrapped(model).config.num_hidden_layers - 1
        return None if last and slot.path.endswith(".values") else cotangent

    return Sharing(returned=returned)(model, problem, objective)


def sibling_pollutes_the_snapshot(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """All siblings continue in one cache object, so each sees the tokens of those before it."""

    def handed(state: Cache, leaves: Leaves) -> Cache:
        vars(state).update(vars(map_state(state, lambda _, tensor: tensor.detach())))
        return state

    return Sharing(claim="detach", handed=handed)(model, problem, objective)


def only_the_last_siblings_cotangent(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Each branch's cotangent overwrites the one before it: the prompt learns from one response of its group."""

    def handed(state: Cache, leaves: Leaves) -> Cache:
        for leaf in leaves.values():
            leaf.grad = None
        return map_state(state, lambda slot, tensor: leaves.get(slot.path, tensor))

    return Sharing(handed=handed)(model, problem, objective)


def indexer_keys_not_saved(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The saved state has the latents and not the indexer's keys, which come back as zeros."""
    return _restored_without(("index",), model, problem, objective)


def recurrent_state_restarts(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Recurrent layers start every branch from a zero state, though a state was captured."""
    return _restored_without(("recurrent",), model, problem, objective)


def convolution_window_restarts(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Convolutions see zeros instead of the last prompt tokens."""
    return _restored_without(("conv",), model, problem, objective)


def _restored_without(
    kinds: tuple[str, ...], model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    def handed(state: Cache, leaves: Leaves) -> Cache:
        return map_state(state, lambda slot, t: torch.zeros_like(t) if slot.kind in kinds else t)

    return Sharing(claim="detach", handed=handed)(model, problem, objective)


def cache_dropped_on_the_way(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Something between the path and the layers replaces the cache by an empty one: no branch sees its prompt."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        empty = new_cache(unwrapped(model).config)
        return run_branch(model, problem, i, empty, boundary)

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


def shared_path_never_entered(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Claims to share the prompt and runs the ordinary path, with the ordinary path's correct gradient."""
    result = full_autograd(model, problem, objective)
    return StepResult(loss=result.loss, log_probs=result.log_probs, reference="exact")


def captured_as_inference_tensors(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The prompt runs under inference_mode, whose tensors autograd refuses for good."""

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        with torch.inference_mode():
            return run_prompt(model, tokens)

    def handed(state: Cache, leaves: Leaves) -> Cache:
        return map_state(state, lambda _, tensor: tensor)

    return Sharing(claim="detach", prompt=prompt, handed=handed)(model, problem, objective)


FAULTS = (
    Fault(
        path=keys_appended_without_gradient,
        report="ST-01",
        rung="gradient",
        points_at=r"no gradient at all for \d+ parameters \([^)]*\bk?v\b",
    ),
    Fault(
        path=recurrent_state_not_differentiated,
        report="ST-16",
        rung="gradient",
        points_at=r"linear_attn",
        architectures=("qwen3_5",),
    ),
    Fault(
        path=values_not_differentiated,
        report="ST-02",
        rung="gradient",
        points_at=r"layers\.3\.self_attn\.(v_proj|kv_a)",
    ),
    Fault(
        path=sibling_pollutes_the_snapshot,
        report="ST-04",
        rung="forward",
        points_at=r"response [1-9]",
        elsewhere={
            "glm_moe_dsa": (
                "execution",
                r"decisions changed between passes over the same token, first in \S*indexer",
            )
        },
    ),
    Fault(
        path=only_the_last_siblings_cotangent,
        report="",
        rung="gradient",
        points_at=r"through that state is missing or wrong",
    ),
    Fault(
        path=indexer_keys_not_saved,
        report="ST-08",
        rung="forward",
        points_at=r"decisions differ, first \S*indexer",
        architectures=("glm_moe_dsa",),
    ),
    Fault(
        path=recurrent_state_restarts,
        report="UC-03",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("qwen3_5",),
    ),
    Fault(
        path=convolution_window_restarts,
        report="UC-04",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("qwen3_5",),
    ),
    Fault(
        path=cache_dropped_on_the_way,
        report="UC-10",
        rung="forward",
        points_at=r"response \d+ token",
        elsewhere={"glm_moe_dsa": ("forward", r"decisions differ, first \S*indexer chose \[0\]")},
    ),
    Fault(
        path=shared_path_never_entered,
        report="ST-09",
        rung="execution",
        points_at=r"shared path was not entered",
    ),
    Fault(
        path=captured_as_inference_tensors,
        report="OT-11",
        rung="execution",
        points_at=r"[Ii]nference tensor",
    ),
)
