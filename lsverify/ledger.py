"""What a step must cost: its schedule in tokens, its state in bytes, and LongStraw's model of both.

Everything here follows from shapes. Nothing is reported by the path under test; `watch` and `memory` measure, and
the two are held against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

import torch

from lsverify.errors import InputError
from lsverify.policies import Policy
from lsverify.problems import Problem
from lsverify.spans import Spans, whole_pieces
from lsverify.watch import Forward

PathName = Literal["full_batched", "full_serial", "longstraw"]
PhaseName = Literal["score", "capture", "replay", "sweep", "whole"]
PATHS = ("full_batched", "full_serial", "longstraw")
# A token that gradients go back through costs its forward pass and twice as much again.
GRAD_FACTOR = 3
REWRITTEN = ("sliding", "conv", "recurrent")


@dataclass(frozen=True)
class Shared:
    """One distinct prompt of `prompt` tokens, the lengths of the responses that share it, and whether it is swept.

    No chunk cuts one of its `spans`.
    """

    prompt: int
    responses: tuple[int, ...]
    swept: bool = True
    spans: Spans = ()


def shared(problem: Problem, policy: Policy | None = None) -> tuple[Shared, ...]:
    """The distinct prompts of a problem, groups with equal prompts taken together; swept as the policy's coins fell."""
    lengths: dict[str, int] = {}
    responses: dict[str, list[int]] = {}
    spans: dict[str, Spans] = {}
    for i, group in enumerate(problem.group_of):
        key = problem.prompt_hash(group)
        lengths[key], spans[key] = problem.prompt_lengths[group], problem.groups[group].spans
        responses.setdefault(key, []).append(problem.response_lengths[i])
    return tuple(
        Shared(
            lengths[key],
            tuple(found),
            swept=policy is None or policy.scale(key, problem.seed or 0) > 0,
            spans=spans[key],
        )
        for key, found in responses.items()
    )


@dataclass(frozen=True, kw_only=True)
class Pass:
    """`rows` sequences of `tokens` tokens each, forwarded at once from position `start` on."""

    phase: PhaseName
    start: int
    tokens: int
    grad: bool
    rows: int = 1

    @property
    def pairs(self) -> int:
        """Query-key pairs of causal attention, per layer, all rows; what a span adds is not counted."""
        return self.rows * (self.tokens * self.start + self.tokens * (self.tokens + 1) // 2)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Forwarded tokens and attention pairs per layer, without and with a graph."""

    tokens_no_grad: int
    tokens_grad: int
    pairs_no_grad: int
    pairs_grad: int

    @property
    def tokens(self) -> int:
        return self.tokens_no_grad + self.tokens_grad

    def cost(self, *, per_token: float, per_pair: float) -> float:
        """Arithmetic of the step, in the unit of its arguments: one token's, one pair's forward pass."""
        tokens = self.tokens_no_grad + GRAD_FACTOR * self.tokens_grad
        return tokens * per_token + (self.pairs_no_grad + GRAD_FACTOR * self.pairs_grad) * per_pair


def expected_schedule(
    path: PathName,
    prompts: Sequence[Shared],
    policy: Policy | None = None,
    *,
    chunk: int | None = None,
    branches: int = 1,
    scored: int = 0,
) -> tuple[Pass, ...]:
    """Every forward pass that a path has to make, in order.

    The last response token is never forwarded. Full autograd forwards P + R - 1 tokens per response, in batched form
    as many rows as there are responses, padded to the longest prompt and the longest response. LongStraw captures
    B = P - k tokens once per distinct prompt, replays k + R - 1 per response and sweeps over the last m captured ones.

    chunk: tokens per capture and sweep pass, fewer in front of a span that would be cut and more for a span that is
    longer; None runs each prefix in one. branches: responses per replay, padded to
    the longest of them. scored: scoring rounds without graph
    before the step (1 for a reference policy), each with a capture of its own.
    Raises InputError for an unknown path, or a LongStraw path without a policy.
    """
    if path not in PATHS:
        raise InputError(f"path {path!r} is not known: use one of {', '.join(PATHS)}")
    if path == "longstraw":
        if policy is None:
            raise InputError("path 'longstraw' needs a policy to say what is forwarded")
        rounds = [*_score(prompts, policy, chunk)] * scored
        return (*rounds, *_longstraw(prompts, policy, chunk, branches))
    serial = [
        Pass(phase="whole", start=0, tokens=shape.prompt + length - 1, grad=True)
        for shape in prompts
        for length in shape.responses
    ]
    rounds = [Pass(phase="score", start=0, tokens=one.tokens, grad=False) for one in serial]
    if path == "full_serial":
        return (*rounds * scored, *serial)
    width = max(s.prompt for s in prompts) + max(max(s.responses) for s in prompts) - 1
    batch = Pass(phase="whole", start=0, tokens=width, grad=True, rows=len(serial))
    return (*rounds * scored, batch)


def ideal_work(
    path: PathName, prompts: Sequence[Shared], policy: Policy | None = None, *, scored: int = 0
) -> Work:
    """The schedule's sums: what a path costs when it does nothing twice."""
    passes = expected_schedule(path, prompts, policy, scored=scored)
    without, under = [p for p in passes if not p.grad], [p for p in passes if p.grad]
    return Work(
        tokens_no_grad=sum(p.rows * p.tokens for p in without),
        tokens_grad=sum(p.rows * p.tokens for p in under),
        pairs_no_grad=sum(p.pairs for p in without),
        pairs_grad=sum(p.pairs for p in under),
    )


def _longstraw(
    prompts: Sequence[Shared], policy: Policy, chunk: int | None, branches: int
) -> Iterator[Pass]:
    for shape in prompts:
        boundary = policy.boundary(shape.prompt)
        stop = policy.stop(shape.prompt) if shape.swept else boundary
        yield from _captured(shape, boundary, chunk, stop)
        yield from _branches(shape, boundary, "replay", grad=True, together=branches)
        for start, end in reversed(pieces(stop, boundary, chunk, shape.spans)):
            yield Pass(phase="sweep", start=start, tokens=end - start, grad=True)


def _score(prompts: Sequence[Shared], policy: Policy, chunk: int | None) -> Iterator[Pass]:
    for shape in prompts:
        boundary = policy.boundary(shape.prompt)
        yield from _captured(shape, boundary, chunk, boundary)
        yield from _branches(shape, boundary, "score", grad=False)


def _captured(shape: Shared, boundary: int, chunk: int | None, cut: int) -> Iterator[Pass]:
    before, after = pieces(0, cut, chunk, shape.spans), pieces(cut, boundary, chunk, shape.spans)
    for start, end in (*before, *after):
        yield Pass(phase="capture", start=start, tokens=end - start, grad=False)


def _branches(
    shape: Shared, boundary: int, phase: PhaseName, *, grad: bool, together: int = 1
) -> Iterator[Pass]:
    for at in range(0, len(shape.responses), together):
        lengths = shape.responses[at : at + together]
        tokens = shape.prompt - boundary + max(lengths) - 1
        yield Pass(phase=phase, start=boundary, tokens=tokens, grad=grad, rows=len(lengths))


def pieces(start: int, end: int, chunk: int | None, spans: Spans = ()) -> list[tuple[int, int]]:
    """Consecutive [a, b) that cover [start, end), each `chunk` long but for the last and where a span would be cut."""
    return whole_pieces(start, end, chunk or max(end - start, 1), spans)


def phase_of(forward: Forward, problem: Problem) -> PhaseName:
    """What a watched forward is for, judged by its tokens and positions alone.

    Tokens that belong to a prompt at their positions are captured (no graph) or swept (graph). Others are a branch:
    scored (no graph) or replayed (graph). Under a graph from position 0 past a prompt, the step is full autograd's.
    """
    start = 0
    if forward.position_ids is not None:
        start = int(forward.position_ids.reshape(-1, forward.shape[-1])[0, 0])
    if forward.input_ids is not None and forward.input_ids.shape[0] == 1:
        tokens = forward.input_ids[0]
        for group in problem.groups:
            # A prompt's last token belongs to every branch, never to the captured prefix.
            if torch.equal(group.prompt[:-1][start : start + len(tokens)], tokens):
                return "sweep" if forward.grad_enabled else "capture"
    if not forward.grad_enabled:
        return "score"
    return "replay" if start else "whole"


class StateTensor(Protocol):
    """One tensor of a prompt's state, as `PromptState.inventory` lists it; dtype in torch's words."""

    @property
    def kind(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


def state_bytes(inventory: Iterable[StateTensor]) -> int:
    """Bytes of the boundary state."""
    return sum(prod(row.shape) * _itemsize(row.dtype) for row in inventory)


def checkpoint_bytes(inventory: Iterable[StateTensor], chunks: int) -> int:
    """Bytes that keeping the incoming state of every one of `chunks` chunks adds to the boundary state.

    Keys, values and latents only grow, so an earlier state is a prefix of the last one and adds nothing. What is
    rewritten (sliding windows, convolution and recurrent states) needs a copy per chunk; the first starts empty.
    """
    return max(chunks - 1, 0) * state_bytes(row for row in inventory if row.kind in REWRITTEN)


def cotangent_bytes(inventory: Iterable[StateTensor]) -> int:
    """Bytes of d loss / d z: as much as the state, without an indexer's keys, which carry no gradient."""
    return state_bytes(row for row in inventory if row.kind != "index")


def _itemsize(dtype: str) -> int:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise InputError(f"dtype {dtype!r} is not known: use a name of torch, such as float32")
    return kind.itemsize


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """LongStraw's ledger (arXiv 2607.14952), in bytes.

    M_live ~ M_fixed + M_prompt(P) + M_grad + max_i M_branch(R_i) + M_score(sum R_i). Independent of the group size
    but for the scores. A sweep adds `swept`: cotangents of the state and one chunk's graph, alive when no branch is.
    """

    fixed: int
    prompt: int
    gradients: int
    branches: tuple[int, ...]
    scores: int = 0
    swept: int = 0

    @property
    def live(self) -> int:
        step = max(*self.branches, self.swept) if self.branches else self.swept
        return self.fixed + self.prompt + self.gradients + self.scores + step


def update_seconds(prompt: float, replays: Sequence[float], sweep: float = 0.0) -> float:
    """T_update = T_prompt(P) + sum_i T_replay(R_i), and the sweep's time where there is one."""
    return prompt + sum(replays) + sweep
