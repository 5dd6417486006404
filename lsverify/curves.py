"""The curve of one training: a row for each optimizer step and each test, kept as JSON lines that are written whole.

A process killed at any moment leaves at most its last line torn. Reading drops that line, and the training makes it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lsverify.errors import InputError
from lsverify.stale_drift import Drift
from lsverify.whole_files import write_whole

NAME = "curve.jsonl"


class ToFull(BaseModel):
    """The step's gradient against full autograd's at the same weights and problem; None where a norm is zero or not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cosine: float | None
    rel_l2: float | None
    norm_ratio: float | None


class StepRow(BaseModel):
    """One optimizer step, `step` counted from 1. Of rollouts sampled before it, by the weights of their first step.

    reward, reward_sd: over all responses (divided by their number). kl_to_start: mean over response tokens of k3 against the
    start's weights, in nats. entropy: mean over response tokens, in nats. clip_share: of response tokens whose gradient the clip
    cuts. gradient_norm: before clipping. tokens_forwarded: by the arm, counted at the embedding, scores included. seconds: of
    the step and its rollout. peak_resident: the largest resident size of the process since its training began or went on, in
    bytes, None where the system does not tell. These two do not repeat.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["step"] = "step"
    step: int
    loss: float
    reward: float
    reward_sd: float
    kl_to_start: float
    entropy: float
    gradient_norm: float
    clip_share: float
    response_length: float
    tokens_forwarded: int
    seconds: float
    peak_resident: int | None = None
    to_full: ToFull | None = None
    drift: Drift | None = None


class TestRow(BaseModel):
    """The frozen test set after `step` optimizer steps: the mean reward of each prompt over its responses, [P]."""

    __test__ = False
    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["test"] = "test"
    step: int
    rewards: tuple[float, ...]

    @property
    def reward(self) -> float:
        return sum(self.rewards) / len(self.rewards)


class Cell(BaseModel):
    """Tasks of one prompt length whose evidence is more than `above` and up to `upto` tokens from the prompt's end.

    rewards: of each task over its responses.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    above: int
    upto: int
    rewards: tuple[float, ...]


class LongRangeRow(BaseModel):
    """The test by prompt length and distance of the evidence, after `step` optimizer steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["long_range"] = "long_range"
    step: int
    cells: tuple[Cell, ...]


Row = StepRow | TestRow | LongRangeRow
_ROW: TypeAdapter[Row] = TypeAdapter(Annotated[Row, Field(discriminator="kind")])


@dataclass(frozen=True)
class Curve:
    """All rows of a training so far, in order."""

    rows: tuple[Row, ...]

    @property
    def steps(self) -> list[StepRow]:
        return [row for row in self.rows if isinstance(row, StepRow)]

    @property
    def tests(self) -> list[TestRow]:
        return [row for row in self.rows if isinstance(row, TestRow)]

    @property
    def long_range(self) -> list[LongRangeRow]:
        return [row for row in self.rows if isinstance(row, LongRangeRow)]

    @property
    def start(self) -> TestRow:
        """The test before the first step."""
        return self.tests[0]

    @property
    def end(self) -> TestRow:
        """The test after the last step."""
        return self.tests[-1]

    def repeatable(self) -> list[dict[str, Any]]:
        """Everything but seconds and memory, to be equal to the bit in every run of the same training."""
        return [row.model_dump(exclude={"seconds", "peak_resident"}) for row in self.rows]

    def reaches(self, step: int) -> bool:
        """Whether it ends with the test after this step."""
        return bool(self.rows) and self.rows[-1].kind == "test" and self.rows[-1].step == step

    def up_to(self, step: int) -> Curve:
        return Curve(tuple(row for row in self.rows if row.step <= step))


def final_rewards(curves: Sequence[Curve]) -> NDArray[np.float64]:
    """[S, P] of the last tests, one curve for each seed: what `verdicts.compare` takes."""
    return np.array([curve.end.rewards for curve in curves])


def read_curve(folder: Path) -> Curve:
    """The curve in a training's folder, without a torn last line; empty where there is none. Raises `InputError` for others."""
    file = folder / NAME
    if not file.exists():
        return Curve(())
    *whole, _ = file.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(whole, 1):
        try:
            rows.append(_ROW.validate_json(line))
        except ValidationError:
            raise InputError(
                f"{file}, line {number} is no row of a curve: remove the folder and train again"
            ) from None
    return Curve(tuple(rows))


class CurveFile:
    """A curve's file, cut back to rows that stand, and open for more inside `with`."""

    def __init__(self, folder: Path, standing: Curve) -> None:
        write_whole(folder / NAME, "".join(map(_line, standing.rows)))
        self._path, self._rows = folder / NAME, list(standing.rows)

    def __enter__(self) -> CurveFile:
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    @property
    def curve(self) -> Curve:
        return Curve(tuple(self._rows))

    def add(self, row: Row) -> None:
        """One row in one write, so that a kill tears none but the last."""
        self._file.write(_line(row))
        self._file.flush()
        self._rows.append(row)

    def settle(self) -> None:
        """Wait until the disk has the rows: a checkpoint must not outlast the curve that led to it."""
        os.fsync(self._file.fileno())


def _line(row: Row) -> str:
    return json.dumps(row.model_dump(), allow_nan=False) + "\n"
