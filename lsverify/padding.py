"""Padded batches: a Problem's members as rows of one rectangle, and back.

Letters in shapes: N rows (members), L columns, C columns of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.problem_types import Problem
from lsverify.rollouts import from_rollouts
from lsverify.spans import Spans

PromptSide = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedBatch:
    """N rows of prompt and response with padding around them. Raises InputError for rows that
    cannot be read back.

    prompt_side "left": a block of prompts padded on their left, then a block of responses padded on
    their right, so that all responses start in one column (TRL's layout). "right": each row packed
    to the left, padding after it.

    input_ids       [N, L] int64; pad_token_id where there is no token. That id may also occur as a
                    token: only attention_mask tells.
    attention_mask  [N, L] int64, 1 at tokens (masked holes included), 0 at padding; one run of ones
                    per row.
    position_ids    [N, L] int64, counting from 0 at a row's first token; 0 at padding on either
                    side.
    response_start  [N] int64, the column of the first response token. Logits at columns
                    response_start - 1 up to response_start + R - 2 predict the response.
    response_mask   [N, C] bool, what the objective counts; column j is response token j, False
                    beyond R.
    group_of        [N] int64, row -> group.
    spans           per row, those of its prompt, counted from the row's first token; empty when no
                    row has any.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    response_start: Tensor
    response_mask: Tensor
    group_of: Tensor
    prompt_side: PromptSide
    pad_token_id: int
    spans: tuple[Spans, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_side not in ("left", "right"):
            raise InputError(f"prompt_side is {self.prompt_side!r}; give 'left' or 'right'")
        if self.input_ids.ndim != 2:
            raise InputError(f"input_ids has shape {tuple(self.input_ids.shape)}; give [N, L]")
        rows, columns = self.input_ids.shape
        for name, shape, dtype in (
            ("input_ids", (rows, columns), torch.int64),
            ("attention_mask", (rows, columns), torch.int64),
            ("position_ids", (rows, columns), torch.int64),
            ("response_start", (rows,), torch.int64),
            ("response_mask", (rows, self.response_mask.shape[-1]), torch.bool),
            ("group_of", (rows,), torch.int64),
        ):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise InputError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {dtype} {shape}"
                )
        if self.spans and len(self.spans) != rows:
            raise InputError(
                f"spans has {len(self.spans)} entries for {rows} rows; give one per row"
            )
        for row in range(rows):
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        real = self.attention_mask[row].nonzero().flatten()
        start = int(self.response_start[row])
        if not len(real) or not torch.equal(real, torch.arange(int(real[0]), int(real[-1]) + 1)):
            raise InputError(f"row {row}: attention_mask must be one run of ones, without gaps")
        if not int(real[0]) < start <= int(real[-1]):
            raise InputError(
                f"row {row}: response_start is {start}; tokens stand in columns {int(real[0])} to {int(real[-1])} and "
                "at least one of prompt and one of response are needed"
            )
        if not torch.equal(self.position_ids[row, real], torch.arange(len(real))):
            raise InputError(
                f"row {row}: position_ids must count 0, 1, 2, ... from the first token"
            )
        if bool(self.response_mask[row, int(real[-1]) + 1 - start :].any()):
            raise InputError(f"row {row}: response_mask counts columns beyond the response")

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def first_column(self) -> Tensor:
        """[N] int64, the column of each row's first token."""
        return self.attention_mask.argmax(dim=1)

    @property
    def prompt_lengths(self) -> Tensor:
        """[N] int64, per row."""
        return self.response_start - self.first_column

    @property
    def response_lengths(self) -> Tensor:
        """[N] int64, per row."""
        return self.attention_mask.sum(dim=1) - self.prompt_lengths

    def response_logits(self, logits: Tensor) -> tuple[Tensor, ...]:
        """[N, L, V] logits of this batch -> per row the [R_i, V] that predict its response
        tokens."""
        return tuple(
            logits[row, start - 1 : start - 1 + length]
            for row, (start, length) in enumerate(
                zip(self.response_start.tolist(), self.response_lengths.tolist(), strict=True)
            )
        )


def pad(problem: Problem, prompt_side: PromptSide = "left", pad_token_id: int = 0) -> PaddedBatch:
    """All members of a problem as rows, in member order; see `PaddedBatch` for the layout."""
    if prompt_side not in ("left", "right"):
        raise InputError(f"prompt_side is {prompt_side!r}; give 'left' or 'right'")
    prompts = [problem.prompt_lengths[group] for group in problem.group_of]
    responses = problem.response_lengths
    widest = max(prompts)
    starts = [widest - length if prompt_side == "left" else 0 for length in prompts]
    columns = max(
        start + prompt + response
        for start, prompt, response in zip(starts, prompts, responses, strict=True)
    )
    shape = (len(problem), columns)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    response_mask = torch.zeros(len(problem), max(responses), dtype=torch.bool)
    for row, start in enumerate(starts):
        tokens = problem.tokens(row)
        span = slice(start, start + len(tokens))
        input_ids[row, span] = tokens
        attention_mask[row, span] = 1
        position_ids[row, span] = torch.arange(len(tokens))
        response_mask[row, : responses[row]] = problem.responses[row].mask
    spans = tuple(problem.spans(row) for row in range(len(problem)))
    return PaddedBatch(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        response_start=torch.tensor(starts) + torch.tensor(prompts),
        response_mask=response_mask,
        group_of=torch.tensor(problem.group_of),
        prompt_side=prompt_side,
        pad_token_id=pad_token_id,
        spans=spans if any(spans) else (),
    )


def from_padded(
    batch: PaddedBatch,
    *,
    rewards: Sequence[float] | Tensor,
    old_logp: Sequence[Tensor] | Tensor,
    ref_logp: Sequence[Tensor] | Tensor | None = None,
    sampler_logp: Sequence[Tensor] | Tensor | None = None,
    truncated: Sequence[bool] | Tensor | None = None,
    seed: int | None = None,
) -> Problem:
    """The problem that a padded batch holds: the inverse of `pad` where the rows of a group stand
    together.

    rewards    one per row; likewise truncated.
    old_logp   [N, C], column j for response token j and anything beyond R; or N tensors [R_i].
               Likewise ref_logp and sampler_logp. Any float dtype, kept as float64.

    Errors and warnings are those of `rollouts.from_rollouts`, groups given by batch.group_of.
    """
    lengths = batch.response_lengths.tolist()
    ends = (batch.first_column + batch.attention_mask.sum(dim=1)).tolist()

    def unpad(values: Any) -> Any:
        if not isinstance(values, Tensor):
            return values
        if values.shape != batch.response_mask.shape:
            raise InputError(
                f"padded log-probs have shape {tuple(values.shape)}; the batch's responses are "
                f"{tuple(batch.response_mask.shape)}"
            )
        return [values[row, :length] for row, length in enumerate(lengths)]

    return from_rollouts(
        [
            batch.input_ids[row, start:end]
            for row, (start, end) in enumerate(zip(batch.first_column.tolist(), ends, strict=True))
        ],
        prompt_lengths=batch.prompt_lengths.tolist(),
        group_ids=batch.group_of,
        rewards=rewards,
        old_logp=unpad(old_logp),
        masks=unpad(batch.response_mask),
        ref_logp=unpad(ref_logp),
        sampler_logp=unpad(sampler_logp),
        truncated=truncated,
        spans=batch.spans or None,
        seed=seed,
    )
