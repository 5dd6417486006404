"""The load-balancing loss against an outside oracle: the library's own function, on router logits drawn for a problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lsverify.auxiliary import Balance, Routed, Routers, Tally, token_weights
from lsverify.objective_options import Objective
from lsverify.oracles import EQUALITY_LIMIT
from lsverify.precision import promoting
from lsverify.problems import Problem

LAYERS = 3


def check_balance(
    library: Any, routers: Routers, objective: Objective, problem: Problem, seed: int
) -> tuple[float, float, str]:
    """(measure, limit, detail): value and gradient of the sum of all parts against `library`, relative, in float64.

    Every token has logits [E] of its own in each of 3 layers, a prompt's the same for all its members. The library gets
    each counted token as a row with weight 1, as often as `aux_prompt` counts it, and rows of padding that weigh 0.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts: dict[str, Tensor] = {}
    tokens: list[tuple[Tensor, Tensor]] = []
    for i, group in enumerate(problem.group_of):
        sizes = len(problem.prompt(i)), len(problem.responses[i]) - 1
        prompt, response = (
            torch.randn(LAYERS, size, routers.experts, generator=generator, dtype=torch.float64)
            for size in sizes
        )
        prompt = prompts.setdefault(problem.prompt_hash(group), prompt)
        tokens.append((prompt.requires_grad_(), response.requires_grad_()))
    leaves = [*prompts.values(), *(response for _, response in tokens)]

    value, gradient = _with_gradient(_parts(routers, objective, problem, tokens), leaves)
    once = objective.aux_prompt == "once"
    shown = leaves if once else [part for pair in tokens for part in pair]
    padding = torch.randn(LAYERS, 2, routers.experts, generator=generator, dtype=torch.float64)
    rows = torch.cat([padding, *shown], dim=1)
    mask = torch.ones(rows.shape[1], dtype=torch.float64)
    mask[: padding.shape[1]] = 0
    with promoting():
        whole = library(tuple(rows), routers.experts, routers.top_k, mask)
    expected, its = _with_gradient(objective.aux_coef * whole, leaves)
    # Where every expert is always chosen the gradient is zero: it is measured against what it would be otherwise.
    size = max(float(its.norm()), 1e-3 * objective.aux_coef / rows[0, :, 0].numel() ** 0.5)
    apart = abs(value - expected) / abs(expected), float((gradient - its).norm()) / size
    measure = max(apart) if all(map(math.isfinite, apart)) else math.inf
    return measure, EQUALITY_LIMIT, f"balancing loss against the library's: {measure:.1e}"


def _parts(
    routers: Routers,
    objective: Objective,
    problem: Problem,
    tokens: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The sum of the responses' parts."""
    passes = []
    for pair in tokens:
        passes.append(Routed())
        for layer, logits in enumerate(torch.cat(pair, dim=1)):
            passes[-1].keep(layer, logits)
    tally, weights = Tally(routers=routers), token_weights(problem, objective.aux_prompt)
    for routed, own in zip(passes, weights, strict=True):
        for logits in routed.layers():
            tally.add(logits, own)
    balance = Balance(tally, objective, problem)
    parts = [balance.part(*each) for each in zip(passes, weights, strict=True)]
    return torch.stack(parts).sum()


def _with_gradient(loss: Tensor, leaves: Sequence[Tensor]) -> tuple[float, Tensor]:
    gradients = torch.autograd.grad(loss, leaves)
    return loss.detach().item(), torch.cat([each.flatten() for each in gradients])
