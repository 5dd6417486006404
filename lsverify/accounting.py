"""A case's accounting: what was measured from outside beside what shapes ask for. Tokens, bytes, seconds."""

from __future__ import annotations

from typing import Any

import torch

from lsverify.ledger import (
    checkpoint_bytes,
    cotangent_bytes,
    ideal_work,
    pieces,
    shared,
    state_bytes,
)
from lsverify.observe import Run
from lsverify.policies import Policy
from lsverify.prompt import InventoryRow, capture
from lsverify.referee import Claim, Referee


def account(
    claim: Claim, referee: Referee, *, chunk: int, run: Run, again: Run, weight: Run
) -> dict[str, Any]:
    """`run` was recorded (tokens), `again` timed, `weight` weighed; the same for full autograd where it says so.

    tokens_*: forwarded, and what the claim's ideal schedule and full autograd ask for. live_bytes_peak: over what was
    alive before. state, checkpoint and cotangent bytes: of the longest prompt, from shapes; None without a policy.
    """
    prompts, policy, scored = shared(referee.setting.problem), claim.policy, claim.scored
    ideal = ideal_work("longstraw", prompts, policy, scored=scored) if policy else None
    return {
        "tokens_forwarded": run.tokens.total,
        "tokens_under_autograd": run.tokens.grad,
        "tokens_ideal": ideal.tokens if ideal else None,
        "tokens_full": ideal_work("full_serial", prompts, scored=scored).tokens,
        "live_bytes_peak": None if weight.error else weight.live_bytes_peak,
        "live_bytes_peak_full": referee.full_live_bytes,
        **_state(referee, policy, chunk),
        "threads": torch.get_num_threads(),
        "seconds": again.seconds,
        "seconds_full": referee.full_timed.seconds,
    }


def _state(referee: Referee, policy: Policy | None, chunk: int) -> dict[str, int | None]:
    names = ("state_bytes", "checkpoint_bytes", "cotangent_bytes")
    if policy is None:
        return dict.fromkeys(names)
    longest = max(referee.setting.problem.groups, key=lambda group: len(group.prompt))
    prompt, spans = longest.prompt, longest.spans
    boundary, stop = policy.boundary(len(prompt)), policy.stop(len(prompt))
    state = capture(
        referee.setting.model,
        prompt,
        boundary=boundary,
        chunk=chunk,
        keep_from=boundary,
        spans=spans,
    )
    rows: list[InventoryRow] = state.inventory()
    swept = len(pieces(stop, boundary, chunk, spans))
    sizes = (
        state_bytes(rows),
        checkpoint_bytes(rows, swept),
        cotangent_bytes(rows) if swept else 0,
    )
    return dict(zip(names, sizes, strict=True))
