"""Faults of discrete decisions: other experts, weights of experts, routers without gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import dense
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem

MOE = ("glm_moe_dsa",)
Routing = tuple[Tensor, Tensor, Tensor]


def router_without_gradient(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The weights of the chosen experts are constants: the router learns nothing from the loss."""

    def cut(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, weights, chosen = routing
        return scores, weights.detach(), chosen

    with _on_routers(model, lambda router: router.register_forward_hook(cut)):
        return dense(model, problem, objective)


def expert_weights_not_normalised(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The weights of the chosen experts are their scores, not their shares of the chosen scores."""

    def raw(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, _, chosen = routing
        return scores, scores.sigmoid().gather(1, chosen), chosen

    with _on_routers(model, lambda router: router.register_forward_hook(raw)):
        return dense(model, problem, objective)


def other_experts_than_the_sampler(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Router inputs differ a little from what they were when the response was sampled: some experts flip."""

    def nudge(router: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        wave = torch.linspace(-1, 1, inputs[0].shape[-1], dtype=inputs[0].dtype)
        return (inputs[0] + 0.3 * wave,)

    with _on_routers(model, lambda router: router.register_forward_pre_hook(nudge)):
        return dense(model, problem, objective)


@contextmanager
def _on_routers(model: nn.Module, install: Callable[[nn.Module], Any]) -> Iterator[None]:
    routers = [m for m in model.modules() if hasattr(m, "e_score_correction_bias")]
    handles = [install(router) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


FAULTS = (
    Fault(
        path=router_without_gradient,
        report="MD-08",
        rung="gradient",
        points_at=r"layers\.\d\.mlp\.gate\.weight",
        architectures=MOE,
    ),
    Fault(
        path=expert_weights_not_normalised,
        report="MD-09",
        rung="forward",
        points_at=r"decisions differ, first layers\.[23]\.",
        architectures=MOE,
    ),
    Fault(
        path=other_experts_than_the_sampler,
        report="MD-14",
        rung="forward",
        points_at=r"decisions differ, first \S*gate chose",
        architectures=MOE,
    ),
)
