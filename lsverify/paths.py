"""The two ways to run one GRPO step: full autograd, and LongStraw. Same signature, same result.

A path takes (model, problem, objective), finds every `.grad` None, and leaves the step's gradient there. Full
autograd builds tokens, positions and masks from the Problem and uses no cache. LongStraw captures each distinct
prompt once, replays one response at a time from the boundary state, and sweeps back through the prompt as far as
its policy says:

    d loss / d theta = (partial loss / partial theta at fixed z) + (partial loss / partial z) (d z / d theta)
                              replay                                    sweep
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lsverify.auxiliary import Balance, BatchBalance
from lsverify.cache import by_path, leaves_of, with_leaves
from lsverify.decisions import DecisionDigest
from lsverify.errors import InputError
from lsverify.objective import Objective, Plan, monolithic, prepare, token_logp
from lsverify.policies import Policy, parse_policy, require_chosen
from lsverify.problems import Problem
from lsverify.prompt import Chunk, PromptState, capture, continue_from, unwrapped
from lsverify.scoring import (
    CHUNK,
    adapters_off,
    batched,
    branch_logits,
    frozen_balance,
    full_logits,
    full_score,
    padded_logits,
    reference_scores,
    score,
    shared_prompts,
)
from lsverify.spans import require_uncut
from lsverify.stale import StaleStates
from lsverify.tags import tags_of

# How closely a recomputed chunk must reproduce its saved state: relative L2, above what another summation order costs.
REPRODUCED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class SweepMismatch(RuntimeError):
    """A recomputed prompt chunk did not reproduce its saved state or decisions, so its gradient would be wrong."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """An optimizer step that a path has taken itself. Units as in torch.optim; `max_grad_norm` None: no clipping."""

    kind: Literal["sgd", "adamw"]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a path says of its step. Only `loss` is asked for; whatever else is None is watched from outside.

    loss: the objective's value at the current parameters.
    log_probs: one [R_i] per response, of the response's tokens under the current parameters.
    reference: what the gradient claims to equal, `full` or a policy such as `detach` or `window:64`.
    objective: the objective really used, when it is not the one asked for.
    update: the optimizer step already taken, if any.
    over_ranks: how gradients combine over ranks.
    """

    loss: float
    log_probs: tuple[Tensor, ...] | None = None
    reference: str | None = None
    objective: Objective | None = None
    update: Update | None = None
    over_ranks: Literal["sum", "mean"] = "sum"


class Path(Protocol):
    """Any callable of this signature can be judged."""

    def __call__(
        self, model: nn.Module, problem: Problem, objective: Objective
    ) -> StepResult | None: ...


def full_autograd(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    *,
    batched: bool = False,
    padding: Literal["left", "right"] = "left",
    reference_model: nn.Module | None = None,
) -> StepResult:
    """The ordinary GRPO step, one graph from the first prompt token to the loss.

    Serial (the truth): one response at a time, unpadded. Batched: every response in one padded forward pass, and the
    objective in its monolithic form. Both give the same gradient. With a load-balancing loss the serial form passes all
    responses once more before, without a graph, to count; the batched form has all tokens at once.
    """
    _require_trainable(model)
    scores = reference_scores(model, problem, objective, reference_model)
    if batched:
        batch = BatchBalance(model, problem, objective)
        with batch.watched():
            logits = padded_logits(model, problem, padding)
        loss = batch.added_to(monolithic(objective, problem, logits, scores), padding)
        _backward(loss)
        log_probs = [
            token_logp(row, response.tokens, objective.temperature).detach()
            for row, response in zip(logits, problem.responses, strict=True)
        ]
        return StepResult(loss=loss.detach().item(), log_probs=tuple(log_probs), reference="full")
    plan = prepare(objective, problem, scores)
    balance = frozen_balance(model, problem, objective)
    total, log_probs = 0.0, []
    for i in range(len(problem)):
        with balance.watched() as routed:
            member = plan.member(i, full_logits(model, problem, i))
        loss = balance.added_to(member.loss, routed, balance.whole(i))
        _backward(loss)
        total += loss.detach().item()
        log_probs.append(member.logp.detach())
    return StepResult(loss=total, log_probs=tuple(log_probs), reference="full")


def longstraw(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    *,
    policy: str | Policy = "exact",
    chunk: int = CHUNK,
    branches: int = 1,
    states: StaleStates | None = None,
    reference_model: nn.Module | None = None,
) -> StepResult:
    """The LongStraw step: capture, frozen scores, replay one response at a time, sweep (arXiv 2607.14952).

    At most one chunk's or one branch's graph is alive at a time, whatever the group size; gradient checkpointing is
    off inside it, where a smaller chunk saves as much. Prompts of equal content are captured and swept once.
    `branches` responses share a replay: every backward pass moves all gradients through memory, so short responses go
    faster together, each with a copy of the state. `states` keeps what `stale:n` reuses from step to step; without it
    each step is the first. A load-balancing loss costs a scoring round of its own before (`frozen_balance`); the prompt's
    tokens then have a loss themselves, which the sweep adds chunk by chunk, as far back as it goes.

    Raises `InputError` for a malformed policy or one that does not fit the model or cuts a span of a prompt, a chunk or
    branches below 1, a model that keeps state out of its cache, and a load-balancing loss that the model type lacks,
    `StalePromptState` when the weights change under the step, and `SweepMismatch` when a recomputed chunk is not the
    captured one.
    """
    if branches < 1:
        raise InputError(f"branches {branches} is not allowed: replay 1 or more responses together")
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    _require_trainable(model)
    plan = prepare(
        objective,
        problem,
        reference_scores(model, problem, objective, reference_model, policy, chunk),
    )
    balance = frozen_balance(model, problem, objective, policy, chunk)
    total = balance.captured
    log_probs: dict[int, Tensor] = {}
    kept = (states or StaleStates(policy.refresh)) if policy.refresh else None
    if kept:
        kept.begin(model)
    for prompt, members in shared_prompts(problem):
        boundary, scale = policy.boundary(len(prompt)), _scale(policy, problem, members[0])
        spans = problem.spans(members[0])
        require_uncut(policy, len(prompt), spans)
        stop = policy.stop(len(prompt)) if scale else boundary
        capturing = partial(
            capture, model, prompt, boundary=boundary, chunk=chunk, keep_from=stop, spans=spans
        )
        state = kept.of(prompt, boundary, capturing, spans) if kept else capturing()
        require_chosen(policy, state)
        leaves = state.leaves(policy.carries) if boundary > stop else {}
        for together in batched(members, branches):
            loss, replayed = _replay(model, problem, together, plan, state, leaves, balance)
            total += loss
            log_probs |= replayed
        if kept:
            kept.check(state, tags_of(model, prompt, boundary, spans))
        else:
            state.check(model, prompt, boundary, spans)
        cotangents = {
            path: leaf.grad if scale == 1.0 else scale * leaf.grad
            for path, leaf in leaves.items()
            if leaf.grad is not None
        }
        del leaves
        _sweep(model, state, cotangents, balance, scale * balance.of_prompt(members))
    ordered = tuple(log_probs[i] for i in range(len(problem)))
    return StepResult(loss=total, log_probs=ordered, reference=policy.spec)


def _scale(policy: Policy, problem: Problem, member: int) -> float:
    """What the state term of the member's prompt is multiplied by."""
    if policy.probability is not None and problem.seed is None:
        raise InputError(
            f"policy {policy.spec!r} tosses a coin for each step and prompt: give the problem a seed of its own"
        )
    return policy.scale(problem.prompt_hash(problem.group_of[member]), problem.seed or 0)


def _replay(
    model: nn.Module,
    problem: Problem,
    together: Sequence[int],
    plan: Plan,
    state: PromptState,
    leaves: dict[str, Tensor],
    balance: Balance,
) -> tuple[float, dict[int, Tensor]]:
    """Branches and their backward pass: the response term, and their share of d loss / d z in the leaves."""
    with balance.watched() as routed:
        logits = branch_logits(model, problem, together, state, leaves)
    members = {i: plan.member(i, own) for i, own in zip(together, logits, strict=True)}
    loss = torch.stack([member.loss for member in members.values()]).sum()
    loss = balance.added_to(loss, routed, balance.branches(together, state.tags.boundary))
    _backward(loss)
    return loss.detach().item(), {i: member.logp.detach() for i, member in members.items()}


def _sweep(
    model: nn.Module,
    state: PromptState,
    cotangents: dict[str, Tensor],
    balance: Balance = Balance(),  # noqa: B008 - it holds nothing
    weight: float = 0.0,
) -> None:
    """Add the state term: back through the kept chunks, each recomputed with autograd from its incoming state.

    `cotangents` maps a state tensor's path to d loss / d z at B; it is consumed. `weight` is that of the prompt's
    tokens in the load-balancing loss, of which each chunk adds its own part.
    """
    outgoing = by_path(state.cache)
    for chunk in reversed(state.chunks):
        if not cotangents and not balance:
            return
        incoming = chunk.incoming(outgoing)
        leaves = leaves_of(incoming)
        with balance.watched() as routed:
            recomputed = _recompute(model, chunk, with_leaves(incoming, leaves), outgoing)
        part = balance.part(routed, weight) if balance else None
        _send_back(recomputed, cotangents, part)
        del recomputed, routed, part
        cotangents = {path: leaf.grad for path, leaf in leaves.items() if leaf.grad is not None}
        outgoing = by_path(incoming)


def _send_back(
    recomputed: dict[str, Tensor], cotangents: dict[str, Tensor], part: Tensor | None
) -> None:
    """One backward pass through a chunk: from its outgoing state, by the cotangents, and from its own part of the loss."""
    outputs = [path for path in cotangents if recomputed[path].requires_grad]
    sources = [recomputed[path] for path in outputs]
    gradients: list[Tensor | None] = [cotangents.pop(path) for path in outputs]
    if part is not None and part.requires_grad:
        sources.append(part)
        gradients.append(None)
    if sources:
        torch.autograd.backward(sources, gradients)


def _recompute(
    model: nn.Module, chunk: Chunk, before: Any, outgoing: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Run a chunk once more, under autograd, and hold it to what was captured."""
    with DecisionDigest() as decisions:
        _, after = continue_from(model, chunk.tokens, before, chunk.start, 1, chunk.spans)
    where = f"prompt tokens {chunk.start} to {chunk.start + len(chunk.tokens) - 1}"
    if decisions.hexdigest() != chunk.decisions:
        raise SweepMismatch(
            f"{where}: recomputation chose other experts or keys than the capture did"
        )
    recomputed = by_path(after)
    if recomputed.keys() != outgoing.keys():
        raise SweepMismatch(
            f"{where}: state has {sorted(recomputed.keys() ^ outgoing.keys())} on one side only"
        )
    for path, saved in outgoing.items():
        error = (recomputed[path].detach() - saved).norm()
        if not error <= REPRODUCED[saved.dtype] * saved.norm():
            raise SweepMismatch(
                f"{where}: {path} differs from its captured value by {error.item():.3g}"
            )
    return recomputed


def _require_trainable(model: nn.Module) -> None:
    """The loss alone would not tell: in a branch it needs a gradient for the sake of the state."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "no parameter of the model requires a gradient: unfreeze what should be trained"
        )


def _backward(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise InputError(
            "the loss reaches no parameter that requires a gradient: unfreeze what should be trained"
        )
    loss.backward()


__all__ = [
    "CHUNK",
    "Path",
    "StepResult",
    "SweepMismatch",
    "Update",
    "adapters_off",
    "full_autograd",
    "full_logits",
    "full_score",
    "longstraw",
    "score",
    "shared_prompts",
    "unwrapped",
]
