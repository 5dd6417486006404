"""Faults at the boundary: positions, windows, masks and labels of a continued sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense, Sharing
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem
from lsverify.prompt import continue_from, unwrapped


def last_prompt_token_fed_twice(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The state holds the whole prompt, and the branch begins with the last prompt token once more."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        tokens, length = problem.tokens(i)[boundary - 1 : -1], len(problem.responses[i].tokens)
        return continue_from(model, tokens, cache, boundary - 1, length)[0]

    step = Sharing(claim="detach", boundary=lambda prompt_length: prompt_length, branch=branch)
    return step(model, problem, objective)


def positions_restart_at_the_boundary(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Every branch numbers its tokens from 0."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        tokens, length = problem.tokens(i)[boundary:-1], len(problem.responses[i].tokens)
        return continue_from(model, tokens, cache, 0, length)[0]

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


def window_one_key_short(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A continued token sees one key fewer than the sliding window has."""

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        width = int(unwrapped(model).config.sliding_window) - 1
        return (keys <= queries[:, None]) & (keys > queries[:, None] - width)

    return _masked_by(mask, model, problem, objective)


def future_tokens_visible(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """With a cache and several new tokens no causal mask is applied: a token sees those after it."""

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.ones(len(queries), len(keys), dtype=torch.bool)

    return _masked_by(mask, model, problem, objective)


def causal_mask_at_the_wrong_corner(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The causal mask starts at the first key instead of ending at the last: the prompt is hidden."""

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        return keys - keys[0] <= queries[:, None] - queries[0]

    return _masked_by(mask, model, problem, objective)


def _masked_by(mask, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:  # type: ignore[no-untyped-def]
    """Branches under an explicit mask [queries, keys] of absolute positions, True where a key is seen."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        tokens = problem.tokens(i)[boundary:-1]
        length, offset = cache.get_mask_sizes(len(tokens), 0)
        queries, keys = torch.arange(len(tokens)) + boundary, torch.arange(length) + offset
        output = model(
            input_ids=tokens[None],
            position_ids=queries[None],
            attention_mask=mask(queries, keys)[None, None],
            cache=cache,
            use_cache=True,
        )
        logits: Tensor = output.logits[0, -len(problem.responses[i].tokens) :]
        return logits

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


def labels_not_shifted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Token t is scored with the logits at t, which have already seen it."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        tokens, length = problem.tokens(i), len(problem.responses[i].tokens)
        output = model(
            input_ids=tokens[None], position_ids=torch.arange(len(tokens))[None], use_cache=False
        )
        found: Tensor = output.logits[0, -length:]
        return found

    return Dense(logits=logits)(model, problem, objective)


FAULTS = (
    Fault(
        path=last_prompt_token_fed_twice,
        report="BP-01",
        rung="forward",
        points_at=r"response \d+ token",
        elsewhere={
            "glm_moe_dsa": (
                "execution",
                r"decisions changed between passes over the same token, first in \S*indexer",
            )
        },
    ),
    Fault(
        path=positions_restart_at_the_boundary,
        report="BP-11",
        rung="forward",
        points_at=r"response \d+ token",
    ),
    Fault(
        path=window_one_key_short,
        report="UC-07",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("mistral",),
    ),
    Fault(
        path=future_tokens_visible,
        report="BP-19",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("llama", "mistral"),
    ),
    Fault(
        path=causal_mask_at_the_wrong_corner,
        report="BP-18",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("llama", "mistral"),
    ),
    Fault(
        path=labels_not_shifted,
        report="BP-03",
        rung="forward",
        points_at=r"not the ones it computed",
    ),
)
