"""`execution`: the path did what its claim says, seen from hooks of ours, and left nothing behind but `.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from lsverify.evidence import CaseConfig, Rung
from lsverify.ledger import expected_schedule, ideal_work, shared
from lsverify.observe import Run
from lsverify.paths import shared_prompts
from lsverify.problems import Problem
from lsverify.referee import Claim, floor_dtype
from lsverify.trace import Choice, Place, Site


def execution(
    config: CaseConfig, claim: Claim, problem: Problem, run: Run, later: Sequence[Run] = ()
) -> Rung:
    """Forward passes as scheduled (ours) or enough and not too many (a candidate's); weights and all else untouched.

    `later` are further runs of the same step, which may leave no traces either.
    """
    if run.error is not None:
        kind = type(run.error).__name__
        return Rung(name="execution", status="error", detail=f"the path raised {kind}: {run.error}")
    if run.tokens.total == 0:
        return Rung(
            name="execution",
            status="vacuous",
            detail="no token was forwarded through the model: the path never entered it",
        )
    eps = torch.finfo(floor_dtype(config.dtype)).eps
    faults = [*_side_effects(run, eps)]
    for number, other in enumerate(later, start=2):
        again = _side_effects(other, eps)
        faults += [f"in run {number}: {fault}" for fault in again if fault not in faults]
    faults += (
        _schedule(config, claim, problem, run)
        if config.candidate is None
        else _sharing(claim, problem, run)
    )
    tokens = run.tokens
    seen = f"{tokens.total} tokens forwarded, {tokens.grad} of them under autograd"
    return Rung(
        name="execution",
        status="failed" if faults else "proven",
        measure=float(len(faults)),
        limit=0.0,
        detail="; ".join([*faults, seen]),
    )


def _side_effects(run: Run, eps: float) -> Iterator[str]:
    """What the run left changed, and decisions that were made twice and differently by more than rounding."""
    steps = run.result.update if run.result else None
    for change in run.changes:
        # A path that declares an update of its own has moved what it trains on purpose, and nothing else.
        moved = change.startswith("parameter") and change.split(" ")[1] in run.gradients
        if steps is None or not moved:
            yield change
    changed = [*_decided(run.trace.unstable, eps)] if run.trace else []
    if changed:
        site, place = changed[0]
        yield (
            f"{len(changed)} decisions changed between passes over the same token, "
            f"first in {site.module} at position {place.position}"
        )


def _decided(
    unstable: Sequence[tuple[Site, Place, Choice]], eps: float
) -> Iterator[tuple[Site, Place]]:
    """Changes by more than rounding, without those at a token that reads one where an earlier choice was undecided."""
    undecided: list[Place] = []
    for site, place, choice in unstable:
        if any(_reads(place, other) for other in undecided):
            continue
        if choice.decided(eps):
            yield site, place
        else:
            undecided.append(place)


def _reads(place: Place, other: Place) -> bool:
    """Whether what happens at `other` reaches `place`: it is of the same row and not behind it."""
    same_row = place.prompt == other.prompt and other.member in (-1, place.member)
    return same_row and other.position <= place.position


def _schedule(config: CaseConfig, claim: Claim, problem: Problem, run: Run) -> Iterator[str]:
    """Every forward pass in order: capture without graph, replay, sweep."""
    assert run.watch is not None
    plan = expected_schedule(
        "longstraw",
        shared(problem, claim.policy),
        claim.policy,
        chunk=config.chunk,
        branches=config.branches,
        scored=claim.scored,
    )
    expected = [(p.rows * p.tokens, p.grad) for p in plan]
    seen = [(event.tokens, event.grad_enabled) for event in run.watch.forwards]
    if seen != expected:
        pairs = list(zip_longest(seen, expected))
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        yield (
            f"{len(seen)} forward passes where the policy asks for {len(expected)}; they part at pass {at}: "
            f"{pairs[at][0]} instead of {pairs[at][1]} (tokens, autograd)"
        )


def _sharing(claim: Claim, problem: Problem, run: Run) -> Iterator[str]:
    responses = sum(problem.response_lengths)
    if run.tokens.grad < responses:
        yield f"{run.tokens.grad} tokens under autograd for {responses} response tokens: some were not trained on"
    if claim.policy is None:
        return
    yield from _as_often_as_without_sharing(claim, problem, run)
    # Once to score, once to replay; a candidate may also recompute each branch.
    most = ideal_work("longstraw", shared(problem), claim.policy, scored=2 + claim.scored).tokens
    dense = ideal_work("full_serial", shared(problem), scored=claim.scored).tokens
    if run.tokens.total > most and run.tokens.total >= dense:
        yield (
            f"{run.tokens.total} tokens forwarded where sharing the prompt needs at most {most} and the ordinary "
            f"path {dense}: the shared path was not entered"
        )


def _as_often_as_without_sharing(claim: Claim, problem: Problem, run: Run) -> Iterator[str]:
    """Sharing shows in how often a prompt token is forwarded for each pass over a response, whatever the totals.

    Each pass over a response costs a pass over its prompt without sharing, and with G siblings G of them.
    """
    assert run.trace is not None
    assert claim.policy is not None
    passes = run.trace.passes
    for prompt, members in shared_prompts(problem):
        boundary, group = claim.policy.boundary(len(prompt)), len(members)
        if group == 1 or boundary == 0:
            continue
        name = problem.prompt_hash(problem.group_of[members[0]])
        captured = [Place(name, -1, position) for position in range(boundary)]
        branches = [
            Place(name, i, position)
            for i in members
            for position in range(len(prompt), len(prompt) + len(problem.responses[i].tokens) - 1)
        ]
        trained = max((passes[place, True] for place in branches), default=1)
        run_at_all = max(
            (passes[place, True] + passes[place, False] for place in branches), default=1
        )
        under_autograd = min(passes[place, True] for place in captured)
        without = min(passes[place, False] for place in captured)
        if under_autograd >= group * max(trained, 1) or without >= group * max(run_at_all, 1):
            yield (
                f"the prompt of responses {members[0]} to {members[-1]} was forwarded {under_autograd} times under "
                f"autograd and {without} times without, as often as its {group} responses ask for when "
                "nothing is shared: the shared path was not entered"
            )
            return
