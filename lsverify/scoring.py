"""What is computed without a graph before a step: log-probs under a policy, and how often experts are chosen.

Also the two passes that scoring and training share: a response's own, and branches from a captured prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lsverify.auxiliary import Balance, Tally, prompt_weight, routers_of, token_weights
from lsverify.errors import InputError
from lsverify.objective import Objective, Scores, token_logp
from lsverify.policies import Policy, parse_policy
from lsverify.problems import Problem
from lsverify.prompt import PromptState, capture, continue_from, keep_logits
from lsverify.span_masks import padded_arguments, span_arguments
from lsverify.spans import require_uncut

CHUNK = 512


def full_logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
    """The logits [R_i, V] that predict response i, from one uncached, unpadded forward pass."""
    device = next(model.parameters()).device
    tokens, length = problem.tokens(i)[:-1].to(device), len(problem.responses[i].tokens)
    positions = torch.arange(len(tokens), device=device)
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        **span_arguments(model, problem.spans(i), len(tokens), device=device),
        **keep_logits(model, length),
    )
    logits: Tensor = output.logits[0, -length:]
    return logits


def padded_logits(
    model: nn.Module, problem: Problem, padding: Literal["left", "right"] = "left"
) -> list[Tensor]:
    """The logits of `full_logits`, of all responses, from one padded pass; the longest row's last token is not forwarded.

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


def branch_logits(
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
    branches: int = 1,
) -> tuple[Tensor, ...]:
    """Log-probs [R_i] of every response under the current parameters, without graph, over a captured prompt.

    `branches` responses share a pass, as in `longstraw`.
    """
    policy = parse_policy(policy) if isinstance(policy, str) else policy
    scored: dict[int, Tensor] = {}
    for prompt, members in shared_prompts(problem):
        boundary, spans = policy.boundary(len(prompt)), problem.spans(members[0])
        require_uncut(policy, len(prompt), spans)
        state = capture(
            model, prompt, boundary=boundary, chunk=chunk, keep_from=boundary, spans=spans
        )
        for together in batched(members, branches):
            rows = branch_logits(model, problem, together, state, {})
            for i, logits in zip(together, rows, strict=True):
                scored[i] = token_logp(logits, problem.responses[i].tokens, temperature)
    return tuple(scored[i] for i in range(len(problem)))


@torch.no_grad()
def full_score(
    model: nn.Module, problem: Problem, *, temperature: float = 1.0, batched: bool = False
) -> tuple[Tensor, ...]:
    """The same log-probs from uncached forward passes: one unpadded for each response, or one padded for all."""
    if batched:
        rows: Iterable[Tensor] = padded_logits(model, problem)
    else:
        rows = (full_logits(model, problem, i) for i in range(len(problem)))
    return tuple(
        token_logp(logits, response.tokens, temperature)
        for logits, response in zip(rows, problem.responses, strict=True)
    )


def reference_scores(
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


@torch.no_grad()
def frozen_balance(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    policy: Policy | None = None,
    chunk: int = CHUNK,
) -> Balance:
    """The load-balancing loss with its counts frozen, from a scoring round of its own; `Balance()` without `aux_coef`.

    With a policy over captured prompts, else from uncached passes. Raises `InputError` for a model type without such a
    loss, and for a policy that keeps states over steps.
    """
    if objective.aux_coef == 0:
        return Balance()
    captured = Tally(routers=routers_of(model))
    replayed = Tally(routers=captured.routers)
    weights = token_weights(problem, objective.aux_prompt)
    if policy is None:
        for i, own in enumerate(weights):
            with replayed.adding(own):
                full_logits(model, problem, i)
        return Balance(replayed, objective, problem)
    if policy.refresh:
        raise InputError(
            f"policy {policy.spec!r} keeps the prompt's routing of older parameters, whose load-balancing loss is no "
            "step's own: use aux_coef=0, or another policy"
        )
    for prompt, members in shared_prompts(problem):
        boundary, spans = policy.boundary(len(prompt)), problem.spans(members[0])
        with captured.adding(prompt_weight(objective.aux_prompt, members)):
            state = capture(
                model, prompt, boundary=boundary, chunk=chunk, keep_from=boundary, spans=spans
            )
        for i in members:
            with replayed.adding(weights[i][boundary:]):
                branch_logits(model, problem, [i], state, {})
    return Balance(captured.plus(replayed), objective, problem, captured)
