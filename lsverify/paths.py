"""The two ways to run one GRPO step: full autograd, and LongStraw. Same signature, same result.

A path takes (model, problem, objective), finds every `.grad` None, and leaves the step's gradient there. Full
autograd builds tokens, positions and masks from the Problem and uses no cache. LongStraw captures each distinct
prompt once, replays one response at a time from the boundary state, and sweeps back through the prompt as far as
its policy says:

    d loss / d theta = (partial loss / partial theta at fixed z) + (partial loss / partial z) (d z / d theta)
                              replay                                    sweep
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lsverify.cache import by_path, leaves_of, with_leaves
from lsverify.decisions import DecisionDigest
from lsverify.errors import InputError
from lsverify.objective import Objective, Plan, Scores, monolithic, prepare, token_logp
from lsverify.policies import Policy, parse_policy, require_chosen
from lsverify.problems import Problem
from lsverify.prompt import Chunk, PromptState, capture, continue_from, keep_logits, unwrapped
from lsverify.span_masks import padded_arguments, span_arguments
from lsverify.spans import require_uncut
from lsverify.stale import StaleStates
from lsverify.tags import tags_of

CHUNK = 512
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
    objective in its monolithic form. Both give the same gradient.
    """
    _require_trainable(model)
    scores = _scores(model, problem, objective, reference_model)
    if batched:
        logits = _batched_logits(model, problem, padding)
        loss = monolithic(objective, problem, logits, scores)
        _backward(loss)
        log_probs = [
            token_logp(row, response.tokens, objective.temperature).detach()
            for row, response in zip(logits, problem.responses, strict=True)
        ]
        return StepResult(loss=loss.detach().item(), log_probs=tuple(log_probs), reference="full")
    plan = prepare(objective, problem, scores)
    total, log_probs = 0.0, []
    for i in range(len(problem)):
        member = plan.member(i, full_logits(model, problem, i))
        _backward(member.loss)
        total += member.loss.detach().item()
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
    each step is the first. Raises `InputError` for a malformed policy or one that does not fit the model or cuts a span
    of a prompt, a chunk or branches below 1, and a model that keeps state out of its cache, `StalePromptState` when the
    weights change under the step, and `SweepMismatch` when a recomputed chunk is not the captured one.
    """
    if branches < 1:
        raise InputError(f"branches {branches} is not allowed: replay 1 or more responses together")
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    _require_trainable(model)
    plan = prepare(
        objective, problem, _scores(model, problem, objective, reference_model, policy, chunk)
    )
    total = 0.0
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
            loss, replayed = _replay(model, problem, together, plan, state, leaves)
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
        _sweep(model, state, cotangents)
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
) -> tuple[float, dict[int, Tensor]]:
    """Branches and their backward pass: the response term, and their share of d loss / d z in the leaves."""
    logits = _branch_logits(model, problem, together, state, leaves)
    members = {i: plan.member(i, own) for i, own in zip(together, logits, strict=True)}
    loss = torch.stack([member.loss for member in members.values()]).sum()
    _backward(loss)
    return loss.detach().item(), {i: member.logp.detach() for i, member in members.items()}


def _branch_logits(
    model: nn.Module,
    problem: Problem,
    together: Sequence[int],
    state: PromptState,
    leaves: dict[str, Tensor],
) -> list[Tensor]:
    """The logits [R_i, V] of each response, from one pass over branches that are padded on the right.

    Without a mask for the padding: no token sees what comes after it, but for a span of the live tail, and the state
    after the padding is used by nobody.
    """
    boundary, lengths = state.tags.boundary, [len(problem.responses[i].tokens) for i in together]
    spans = problem.spans(together[0])
    branches = [problem.tokens(i)[boundary:-1] for i in together]
    if len(branches) == 1:
        cache = state.branch(leaves)
        return [continue_from(model, branches[0], cache, boundary, lengths[0], spans)[0]]
    tokens = pad_sequence(branches, batch_first=True)
    cache = state.branches(leaves, len(branches))
    logits, _ = continue_from(model, tokens, cache, boundary, max(lengths), spans)
    return [row[:length] for row, length in zip(logits, lengths, strict=True)]


def _sweep(model: nn.Module, state: PromptState, cotangents: dict[str, Tensor]) -> None:
    """Add the state term: back through the kept chunks, each recomputed with autograd from its incoming state.

    `cotangents` maps a state tensor's path to d loss / d z at B; it is consumed.
    """
    outgoing = by_path(state.cache)
    for chunk in reversed(state.chunks):
        if not cotangents:
            return
        incoming = chunk.incoming(outgoing)
        leaves = leaves_of(incoming)
        recomputed = _recompute(model, chunk, with_leaves(incoming, leaves), outgoing)
        outputs = [path for path in cotangents if recomputed[path].requires_grad]
        if outputs:
            torch.autograd.backward(
                [recomputed[path] for path in outputs], [cotangents.pop(path) for path in outputs]
            )
        del recomputed
        cotangents = {path: leaf.grad for path, leaf in leaves.items() if leaf.grad is not None}
        outgoing = by_path(incoming)


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


def full_logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
    """The logits [R_i, V] that predict response i, from one uncached, unpadded forward pass."""
    tokens, length = problem.tokens(i)[:-1], len(problem.responses[i].tokens)
    positions = torch.arange(len(tokens), device=tokens.device)
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        **span_arguments(model, problem.spans(i), len(tokens), device=tokens.device),
        **keep_logits(model, length),
    )
    logits: Tensor = output.logits[0, -length:]
    return logits


def _batched_logits(
    model: nn.Module, problem: Problem, padding: Literal["left", "right"]
) -> list[Tensor]:
    """The same logits from one padded pass; the longest row's last token is not forwarded.

    Padded on the left, all prompts end at one column, so that the responses' columns can be asked for.
    """
    batch, lengths = problem.padded(padding), problem.response_lengths
    keep = max(lengths) if padding == "left" else 0
    output = model(
        input_ids=batch.input_ids[:, :-1],
        position_ids=batch.position_ids[:, :-1],
        use_cache=False,
        **padded_arguments(model, batch.attention_mask[:, :-1], batch.spans),
        **(keep_logits(model, keep) if keep else {}),
    )
    logits: Tensor = output.logits
    before = batch.input_ids.shape[1] - 1 - logits.shape[1]
    starts = [int(start) - 1 - before for start in batch.response_start]
    return [logits[i, start : start + lengths[i]] for i, start in enumerate(starts)]


def batched(members: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Consecutive members, `size` at a time."""
    for at in range(0, len(members), size):
        yield members[at : at + size]


def shared_prompts(problem: Problem) -> Iterator[tuple[Tensor, list[int]]]:
    """Each distinct prompt, by content, with the members that answer it."""
    members: dict[str, list[int]] = {}
    for i, group in enumerate(problem.group_of):
        members.setdefault(problem.prompt_hash(group), []).append(i)
    for indices in members.values():
        yield problem.prompt(indices[0]), indices


@torch.no_grad()
def score(
    model: nn.Module,
    problem: Problem,
    *,
    temperature: float = 1.0,
    policy: str | Policy = "detach",
    chunk: int = CHUNK,
) -> tuple[Tensor, ...]:
    """Log-probs [R_i] of every response under the current parameters, without graph, over a captured prompt."""
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    scored: dict[int, Tensor] = {}
    for prompt, members in shared_prompts(problem):
        boundary = policy.boundary(len(prompt))
        spans = problem.spans(members[0])
        require_uncut(policy, len(prompt), spans)
        state = capture(
            model, prompt, boundary=boundary, chunk=chunk, keep_from=boundary, spans=spans
        )
        for i in members:
            (logits,) = _branch_logits(model, problem, [i], state, {})
            scored[i] = token_logp(logits, problem.responses[i].tokens, temperature)
    return tuple(scored[i] for i in range(len(problem)))


@torch.no_grad()
def full_score(
    model: nn.Module, problem: Problem, *, temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """The same log-probs from uncached, unpadded forward passes."""
    return tuple(
        token_logp(full_logits(model, problem, i), response.tokens, temperature)
        for i, response in enumerate(problem.responses)
    )


def _scores(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    reference_model: nn.Module | None,
    policy: Policy | None = None,
    chunk: int = CHUNK,
) -> Scores:
    """Freeze what couples the responses: reference log-probs, each from a capture of its own, never the policy's."""
    given = all(response.ref_logp is not None for response in problem.responses)
    if objective.beta == 0 or given:
        return Scores()

    def scored(judge: nn.Module) -> tuple[Tensor, ...]:
        if policy is None:
            return full_score(judge, problem, temperature=objective.temperature)
        return score(judge, problem, temperature=objective.temperature, policy=policy, chunk=chunk)

    if reference_model is not None:
        return Scores(ref_logp=scored(reference_model))
    with adapters_off(model):
        return Scores(ref_logp=scored(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The base model under an adapter. Raises `InputError` for a model that has none to switch off."""
    wrapper: Any = model
    if not hasattr(wrapper, "disable_adapter"):
        raise InputError(
            "objective has beta > 0 but the problem has no ref_logp and the model no adapter to switch off: "
            "give ref_logp, a reference_model, or beta=0"
        )
    with wrapper.disable_adapter():
        yield


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
