"""Honest steps with replaceable pieces, written apart from `lsverify.paths`: a fault is one piece put in wrong.

`Dense` runs every response together with its prompt. `Sharing` runs a prompt once, keeps its graph, replays the
responses from leaf copies of the state, and goes back through the prompt once with what they sent. As they stand both
are right, which is tested: what is refused is the one wrong piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import Slot, leaves_of, new_cache, state_of, with_leaves
from lsverify.candidates import checkpointed
from lsverify.objective import Objective, Plan, prepare
from lsverify.paths import StepResult, full_autograd, full_logits, longstraw, shared_prompts
from lsverify.problems import Problem
from lsverify.prompt import continue_from, unwrapped

Leaves = dict[str, Tensor]


def run_prompt(model: nn.Module, tokens: Tensor) -> Cache:
    """The state after `tokens` [B], from nothing; with a graph where autograd is on."""
    cache = new_cache(unwrapped(model).config)
    if len(tokens):
        continue_from(model, tokens, cache, 0, keep=1)
    return cache


def run_branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
    """The logits [R_i, V] of response i, continued from the state of its first `boundary` tokens."""
    branch = problem.tokens(i)[boundary:-1]
    logits, _ = continue_from(model, branch, cache, boundary, len(problem.responses[i].tokens))
    return logits


def one_token_live(prompt_length: int) -> int:
    """B = P - 1: the last prompt token belongs to every branch."""
    return prompt_length - 1


def all_of_it(slot: Slot, cotangent: Tensor) -> Tensor | None:
    """What goes back into the prompt for one tensor of its state; None for nothing."""
    return cotangent


def plain_backward(model: nn.Module, i: int, loss: Tensor) -> None:
    """Response i's backward pass: gradients add up in `.grad`."""
    loss.backward()


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One pass per response, from its first prompt token; claims `full`."""

    prepare: Callable[[Objective, Problem], Plan] = prepare
    logits: Callable[[nn.Module, Problem, int], Tensor] = full_logits
    backward: Callable[[nn.Module, int, Tensor], None] = plain_backward

    def __call__(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
        """Leave the step's gradient in `.grad`."""
        plan, total, log_probs = self.prepare(objective, problem), 0.0, []
        for i in range(len(problem)):
            member = plan.member(i, self.logits(model, problem, i))
            self.backward(model, i, member.loss)
            total += member.loss.detach().item()
            log_probs.append(member.logp)
        return StepResult(loss=total, log_probs=tuple(log_probs), reference="full")


def planned(
    kind: type[Plan], model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """`Dense` with a plan of another kind: one formula of it is wrong."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        return kind(**vars(prepare(objective, problem)))

    return Dense(prepare=plan)(model, problem, objective)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """One pass per distinct prompt and one per response from its state; claims `exact`, or `detach` without a graph."""

    claim: str = "exact"
    boundary: Callable[[int], int] = one_token_live
    prompt: Callable[[nn.Module, Tensor], Cache] = run_prompt
    handed: Callable[[Cache, Leaves], Cache] = with_leaves
    branch: Callable[[nn.Module, Problem, int, Cache, int], Tensor] = run_branch
    returned: Callable[[Slot, Tensor], Tensor | None] = all_of_it

    def __call__(self, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
        """Leave the step's gradient in `.grad`."""
        plan, total = prepare(objective, problem), 0.0
        log_probs: dict[int, Tensor] = {}
        for prompt, members in shared_prompts(problem):
            boundary = self.boundary(len(prompt))
            with torch.set_grad_enabled(self.claim != "detach"):
                state = self.prompt(model, prompt[:boundary])
            leaves = leaves_of(state)
            for i in members:
                cache = self.handed(state, leaves)
                member = plan.member(i, self.branch(model, problem, i, cache, boundary))
                member.loss.backward()
                total += member.loss.detach().item()
                log_probs[i] = member.logp
            self._into_prompt(state, leaves)
        ordered = tuple(log_probs[i] for i in range(len(problem)))
        return StepResult(loss=total, log_probs=ordered, reference=self.claim)

    def _into_prompt(self, state: Cache, leaves: Leaves) -> None:
        outputs, cotangents = [], []
        for slot, tensor in state_of(state).items():
            leaf = leaves.get(slot.path)
            if not tensor.requires_grad or leaf is None or leaf.grad is None:
                continue
            cotangent = self.returned(slot, leaf.grad)
            if cotangent is not None:
                outputs.append(tensor)
                cotangents.append(cotangent)
        if outputs:
            torch.autograd.backward(outputs, cotangents)


def last_response_first(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Another order of summation."""
    plan, total = prepare(objective, problem), 0.0
    for i in reversed(range(len(problem))):
        member = plan.member(i, full_logits(model, problem, i))
        member.loss.backward()
        total += member.loss.detach().item()
    return StepResult(loss=total, reference="full")


def one_backward_pass(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """One graph for the whole batch, and one pass back through it."""
    plan = prepare(objective, problem)
    members = [plan.member(i, full_logits(model, problem, i)) for i in range(len(problem))]
    loss = torch.stack([member.loss for member in members]).sum()
    loss.backward()
    return StepResult(loss=loss.item(), reference="full")


def eager_attention(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Attention by plain matrix products, the fused kernel's opposite, or the other way round."""
    config = unwrapped(model).config
    before = config._attn_implementation
    config._attn_implementation = "sdpa" if before == "eager" else "eager"
    try:
        return dense(model, problem, objective)
    finally:
        config._attn_implementation = before


dense = Dense()
sharing = Sharing()

full_serial = full_autograd
full_padded_left = partial(full_autograd, batched=True, padding="left")
full_padded_right = partial(full_autograd, batched=True, padding="right")
longstraw_exact = partial(longstraw, policy="exact", chunk=5)
longstraw_detach = partial(longstraw, policy="detach", chunk=5)
longstraw_window = partial(longstraw, policy="window:6", chunk=4)
longstraw_tail = partial(longstraw, policy="tail:3", chunk=4)
recomputed = checkpointed.step

HONEST = (
    "dense",
    "sharing",
    "full_serial",
    "full_padded_left",
    "full_padded_right",
    "longstraw_exact",
    "longstraw_detach",
    "longstraw_window",
    "longstraw_tail",
    "recomputed",
    "last_response_first",
    "one_backward_pass",
    "eager_attention",
)
"""Names in this module of harmless changes: paths that must never be refused."""
