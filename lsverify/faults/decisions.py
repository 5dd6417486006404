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


def experts_of_the_token_before(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Recorded experts are replayed one row late: a token gets those of its neighbour."""

    def late(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, weights, chosen = routing
        return scores, weights.roll(1, 0), chosen.roll(1, 0)

    with _on_routers(model, lambda router: router.register_forward_hook(late)):
        return dense(model, problem, objective)


def one_expert_less(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The weakest of the chosen experts is dropped: its capacity was full."""

    def dropped(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, weights, chosen = routing
        kept = weights.clone()
        kept.scatter_(1, weights.argmin(1, keepdim=True), 0.0)
        return scores, kept, chosen

    with _on_routers(model, lambda router: router.register_forward_hook(dropped)):
        return dense(model, problem, objective)


def expert_weights_swapped(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The chosen experts and their weights are in different orders."""

    def swapped(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, weights, chosen = routing
        return scores, weights.flip(1), chosen

    with _on_routers(model, lambda router: router.register_forward_hook(swapped)):
        return dense(model, problem, objective)


def router_gradient_doubled(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The router's gradient is reduced over a group that already holds the whole of it."""

    def doubled(router: nn.Module, inputs: Any, routing: Routing) -> Routing:
        scores, weights, chosen = routing
        return scores, 2 * weights - weights.detach(), chosen

    with _on_routers(model, lambda router: router.register_forward_hook(doubled)):
        return dense(model, problem, objective)


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
    Fault(
        path=experts_of_the_token_before,
        report="MD-10",
        rung="execution",
        points_at=r"decisions changed between passes over the same token, first in \S*(gate|indexer)",
        architectures=MOE,
    ),
    Fault(
        path=one_expert_less,
        report="",
        rung="forward",
        points_at=r"decisions differ|response \d+ token",
        architectures=MOE,
    ),
    Fault(
        path=expert_weights_swapped,
        report="MD-11",
        rung="forward",
        points_at=r"decisions differ|response \d+ token",
        architectures=MOE,
    ),
    Fault(
        path=router_gradient_doubled,
        report="MD-05",
        rung="gradient",
        points_at=r"mismatch",
        architectures=MOE,
    ),
)
