"""Faults of prompts whose tokens see each other both ways: spans lost, cut, carried too far, or lost on the way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import by_path, new_cache, with_leaves
from lsverify.faults.catalogue import DECIDED, Fault
from lsverify.faults.honest import Sharing
from lsverify.objective import Objective
from lsverify.paths import StepResult, longstraw
from lsverify.problems import Problem
from lsverify.prompt import continue_from, unwrapped
from lsverify.spans import Spans


def span_read_in_order(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The mask is causal everywhere: tokens of an image see only those before them."""
    return longstraw(model, _changed(problem, lambda spans: ()), objective)


def chunk_cuts_the_span(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A chunk ends in the middle of every span: its first half never sees the second."""

    def halves(spans: Spans) -> Spans:
        both = [((a, (a + b) // 2), ((a + b) // 2, b)) for a, b in spans if b - a > 1]
        return tuple(half for pair in both for half in pair)

    return longstraw(model, _changed(problem, halves), objective)


def branch_marked_as_a_span(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The marks of the span go on through the response: the tokens of a branch see each other both ways."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        tokens, length = problem.tokens(i)[boundary:-1], len(problem.responses[i].tokens)
        marked = ((boundary, boundary + len(tokens)),)
        return continue_from(model, tokens, cache, boundary, length, marked)[0]

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        return _run(model, tokens, _spans_of(problem, tokens))

    return Sharing(claim="detach", prompt=prompt, branch=branch)(model, problem, objective)


def sweep_forgets_the_span(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The state is right, and the pass that sends its gradient back into the prompt is causal."""
    right: dict[int, dict[str, Tensor]] = {}

    def prompt(model: nn.Module, tokens: Tensor) -> Cache:
        causal = _run(model, tokens, ())
        with torch.no_grad():
            right[id(causal)] = by_path(_run(model, tokens, _spans_of(problem, tokens)))
        return causal

    def handed(state: Cache, leaves: dict[str, Tensor]) -> Cache:
        for path, leaf in leaves.items():
            leaf.data = right[id(state)][path]
        return with_leaves(state, leaves)

    return Sharing(prompt=prompt, handed=handed)(model, problem, objective)


def _changed(problem: Problem, change: Callable[[Spans], Spans]) -> Problem:
    groups = (replace(group, spans=change(group.spans)) for group in problem.groups)
    return replace(problem, groups=tuple(groups))


def _spans_of(problem: Problem, tokens: Tensor) -> Spans:
    """The spans of the prompt that begins with these tokens."""
    return next(g.spans for g in problem.groups if torch.equal(g.prompt[: len(tokens)], tokens))


def _run(model: nn.Module, tokens: Tensor, spans: Spans) -> Cache:
    cache = new_cache(unwrapped(model).config)
    return continue_from(model, tokens, cache, 0, 1, spans)[1] if len(tokens) else cache


_ATTENTION = ("llama", "mistral", "glm_moe_dsa")
_IMAGE = {"spans": "image"}
FAULTS = (
    Fault(
        path=span_read_in_order,
        report="",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=_ATTENTION,
        elsewhere={"glm_moe_dsa": ("forward", DECIDED)},
        options=_IMAGE,
    ),
    Fault(
        path=chunk_cuts_the_span,
        report="",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=_ATTENTION,
        elsewhere={"glm_moe_dsa": ("forward", DECIDED)},
        options=_IMAGE,
    ),
    Fault(
        path=branch_marked_as_a_span,
        report="",
        rung="forward",
        points_at=r"response \d+ token",
        architectures=("llama", "mistral"),
        options=_IMAGE,
    ),
    Fault(
        path=sweep_forgets_the_span,
        report="",
        rung="gradient",
        points_at=r"self_attn\.[kv]_proj",
        architectures=("llama", "mistral"),
        options=_IMAGE,
    ),
)
