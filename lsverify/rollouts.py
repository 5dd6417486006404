"""Problems from rollouts as a trainer holds them: whole rows with group ids, and what sharing
prompts will cost."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.problem_types import LOGP_NAMES, Group, Problem, Response
from lsverify.spans import Spans


class UnsharedPromptWarning(UserWarning):
    """A prompt serves one response only, so a shared path forwards more tokens than ordinary
    training."""


@dataclass(frozen=True)
class ForwardedTokens:
    """Tokens that each way of running a problem's step forwards, summed over the problem."""

    capture: int
    """Each distinct prompt once, without its live tail: B."""
    replay: int
    """The live tail and all but the last token of each response: k + R - 1."""
    sweep: int
    """Each distinct prompt once more, with autograd: B (none under a policy without a sweep)."""
    ordinary: int
    """Full autograd: P + R for each response."""

    @property
    def shared(self) -> int:
        return self.capture + self.replay + self.sweep


def forwarded_tokens(problem: Problem, live_tail: int = 1) -> ForwardedTokens:
    """What a shared path with a full sweep and ordinary training forward; prompts of equal content
    count once.

    live_tail: k >= 1, prompt tokens replayed in each branch; clamped to the prompt.
    """
    if live_tail < 1:
        raise InputError(f"live_tail is {live_tail}; at least one prompt token is replayed")
    distinct = {problem.prompt_hash(group): group for group in range(len(problem.groups))}
    captured = sum(max(problem.prompt_lengths[group] - live_tail, 0) for group in distinct.values())
    rows = [
        (problem.prompt_lengths[group], length)
        for group, length in zip(problem.group_of, problem.response_lengths, strict=True)
    ]
    return ForwardedTokens(
        capture=captured,
        replay=sum(min(live_tail, prompt) + length - 1 for prompt, length in rows),
        sweep=captured,
        ordinary=sum(prompt + length for prompt, length in rows),
    )


def warn_unshared(problem: Problem, live_tail: int = 1) -> None:
    """One UnsharedPromptWarning, with the predicted cost, if some prompt serves one response only.

    Prompts are told apart by content: a group of one whose prompt another group has too is no cause.
    """
    served: dict[str, list[int]] = {}
    for group in problem.group_of:
        served.setdefault(problem.prompt_hash(group), []).append(group)
    alone = [groups[0] for groups in served.values() if len(groups) == 1]
    if not alone:
        return
    if len(alone) == len(served):
        what, part = "no prompt is shared by two responses", problem
    else:
        names = ", ".join(str(group) for group in alone[:5]) + (", ..." if len(alone) > 5 else "")
        what = (
            f"the prompts of {len(alone)} of {len(problem.groups)} groups ({names}) are not shared"
        )
        part = problem.select(alone)
    cost = forwarded_tokens(part, live_tail)
    warnings.warn(
        f"{what}: for them a shared path forwards {cost.shared} tokens (capture {cost.capture}, replay "
        f"{cost.replay}, sweep {cost.sweep}) where ordinary training forwards {cost.ordinary}, "
        f"{cost.shared / cost.ordinary:.2f} times as many",
        UnsharedPromptWarning,
        stacklevel=2,
    )


def from_rollouts(
    sequences: Sequence[Any],
    *,
    prompt_lengths: int | Sequence[int] | Mapping[Any, int],
    group_ids: Sequence[Hashable] | Tensor,
    rewards: Sequence[float] | Tensor,
    old_logp: Sequence[Any],
    masks: Sequence[Any] | None = None,
    ref_logp: Sequence[Any] | None = None,
    sampler_logp: Sequence[Any] | None = None,
    truncated: Sequence[bool] | Tensor | None = None,
    spans: Sequence[Spans] | None = None,
    seed: int | None = None,
) -> Problem:
    """A problem from N rows, each a prompt and its response in one, without padding.

    sequences       [L_i] token ids each, L_i >= 2.
    prompt_lengths  tokens of row i that are prompt, 1 <= P < L_i: one number, one per row, or a
                    mapping from group id to number.
    group_ids       one per row. Rows belong together when their ids are equal, wherever they stand;
                    neither a stride nor the prompt's content decides. Groups come in order of first
                    appearance, rows within a group in theirs, so members keep the order of rows
                    only where groups stand together.
    rewards         one per row.
    old_logp        [R_i] each, R_i = L_i - P; likewise ref_logp and sampler_logp. Any float dtype,
                    kept as float64.
    masks           [R_i] bool, or integers 0 and 1; all True when left out.
    truncated       one per row; all False when left out.
    spans           of each row's prompt, (start, end) pairs counted from its first token; none when
                    left out.

    Raises InputError for what does not fit, and for rows of one group whose prompts differ: it
    names the group, both rows, the first position that differs and both tokens. Warns with
    UnsharedPromptWarning.
    """
    rows = len(sequences)
    if rows == 0:
        raise InputError("there are no rollouts; at least one row is needed")
    ids = [_plain(each) for each in _listed(group_ids)]
    columns: dict[str, Sequence[Any] | None] = {
        "group_ids": ids,
        "rewards": _listed(rewards),
        "old_logp": old_logp,
        "masks": masks,
        "ref_logp": ref_logp,
        "sampler_logp": sampler_logp,
        "truncated": None if truncated is None else _listed(truncated),
        "spans": spans,
    }
    for name, values in columns.items():
        if values is not None and len(values) != rows:
            raise InputError(f"{name} has {len(values)} entries for {rows} rows; give one per row")
    lengths = _prompt_length_per_row(prompt_lengths, ids)
    members: dict[Hashable, list[int]] = {}
    for row, group_id in enumerate(ids):
        members.setdefault(group_id, []).append(row)
    tokens = [_tokens(row, sequence) for row, sequence in enumerate(sequences)]
    groups = []
    for group_id, its_rows in members.items():
        responses = []
        for row in its_rows:
            if not 1 <= lengths[row] < tokens[row].numel():
                raise InputError(
                    f"row {row}: prompt length {lengths[row]} of {tokens[row].numel()} tokens; at least one token "
                    "of prompt and one of response are needed"
                )
            _check_same_prompt(group_id, its_rows[0], row, tokens, lengths)
            if spans is not None and spans[row] != spans[its_rows[0]]:
                raise InputError(
                    f"group {group_id!r}: row {its_rows[0]} has the spans {spans[its_rows[0]]}, row {row} {spans[row]}; "
                    "responses of one group must continue the same prompt"
                )
            try:
                responses.append(_response(row, tokens[row][lengths[row] :], columns))
            except InputError as error:
                raise InputError(f"row {row}: {error}") from None
        prompt = tokens[its_rows[0]][: lengths[its_rows[0]]]
        own = spans[its_rows[0]] if spans is not None else ()
        groups.append(Group(prompt=prompt, responses=tuple(responses), spans=own))
    problem = Problem(groups=tuple(groups), seed=seed)
    warn_unshared(problem)
    return problem


def _check_same_prompt(
    group_id: Hashable, first: int, row: int, tokens: Sequence[Tensor], lengths: Sequence[int]
) -> None:
    if lengths[first] != lengths[row]:
        raise InputError(
            f"group {group_id!r}: row {first} has a prompt of {lengths[first]} tokens, row {row} of {lengths[row]}; "
            "responses of one group must continue the same prompt"
        )
    one, other = tokens[first][: lengths[first]], tokens[row][: lengths[row]]
    parts = (one != other).nonzero()
    if len(parts):
        where = int(parts[0])
        raise InputError(
            f"group {group_id!r}: the prompts of rows {first} and {row} differ first at position {where}, token "
            f"{int(one[where])} against {int(other[where])}; give rows with different prompts different group ids"
        )


def _response(row: int, tokens: Tensor, columns: Mapping[str, Sequence[Any] | None]) -> Response:
    def entry(name: str) -> Any:
        values = columns[name]
        return None if values is None else values[row]

    mask, reward, cut = entry("masks"), entry("rewards"), entry("truncated")
    logps: dict[str, Any] = {
        name: None if (value := entry(name)) is None else _floats(name, value)
        for name in LOGP_NAMES
    }
    return Response(
        tokens=tokens,
        mask=torch.ones_like(tokens, dtype=torch.bool) if mask is None else _mask(mask),
        reward=float(_tensor("reward", reward, torch.float64)),
        truncated=False if cut is None else bool(_plain(cut)),
        **logps,
    )


def _prompt_length_per_row(given: Any, ids: Sequence[Hashable]) -> list[int]:
    if isinstance(given, Mapping):
        missing = [group_id for group_id in ids if group_id not in given]
        if missing:
            raise InputError(f"prompt_lengths has no entry for group {missing[0]!r}")
        values = [given[group_id] for group_id in ids]
    elif isinstance(given, int):
        values = [given] * len(ids)
    else:
        values = _listed(given)
        if len(values) != len(ids):
            raise InputError(f"prompt_lengths has {len(values)} entries for {len(ids)} rows")
    try:
        return [operator.index(value) for value in values]
    except TypeError:
        raise InputError("prompt_lengths holds something other than integers") from None


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def _plain(value: Any) -> Any:
    # Tensors hash by identity: left as they are, every row would become a group of its own.
    return value.item() if isinstance(value, Tensor) else value


def _tensor(name: str, value: Any, dtype: torch.dtype | None = None) -> Tensor:
    try:
        # A copy: trainers write the next step into the same buffers.
        return torch.as_tensor(value, dtype=dtype).to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"{name} is a {type(value).__name__} that torch cannot turn into a tensor"
        ) from None


def _tokens(row: int, sequence: Any) -> Tensor:
    tokens = _tensor(f"row {row}", sequence)
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.ndim != 1:
        shape = list(tokens.shape)
        raise InputError(f"row {row} is {tokens.dtype} {shape}; give one dimension of integers")
    return tokens.to(torch.int64)


def _mask(value: Any) -> Tensor:
    mask = _tensor("mask", value)
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("mask holds values other than 0 and 1")
    return mask.bool()


def _floats(name: str, value: Any) -> Tensor:
    if not (found := _tensor(name, value)).is_floating_point():
        raise InputError(f"{name} has dtype {found.dtype}; give floats")
    # From the value once more: torch makes float32 of Python's floats unless told.
    return _tensor(name, value, torch.float64)
