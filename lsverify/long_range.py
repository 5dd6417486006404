"""Whether long-range ability is lost quietly: rewards by prompt length and by how far back the evidence stands.

At each length, those beyond training's included, the distances that occur are cut into thirds. All arms and seeds are
examined on the same tasks, so that an arm's gap to the reference in a cell is paired by seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from pydantic import BaseModel, ConfigDict
from scipy import special
from torch import nn

from lsverify.arms import REFERENCE
from lsverify.courses import Asked, Course
from lsverify.curves import Cell, Curve
from lsverify.errors import InputError
from lsverify.keyed import FAR_TEST
from lsverify.rollouts_online import rewards_of
from lsverify.trainings import Training

THIRDS = 3
# Of some kinds of task few have their evidence near: so many are drawn for each that is kept.
DRAWN = 10

Bin = tuple[int, int]
"""Distances more than the first and up to the second."""


def by_distance(course: Course, length: int, number: int) -> dict[Bin, list[Asked]]:
    """`number` tasks or fewer for each third of the distances at this prompt length, near to far; none without tasks.

    Raises `InputError` where the course has no task of such a length whose evidence is known.
    """
    drawn = [
        task for task in course.at(length, DRAWN * THIRDS * number) if task.evidence is not None
    ]
    if not drawn:
        raise InputError(
            f"long_range {length}: there are no tasks of this prompt length with evidence, use other lengths"
        )
    reach = max(map(distance_of, drawn))
    edges = [reach * i // THIRDS for i in range(THIRDS + 1)]
    found: dict[Bin, list[Asked]] = {}
    for above, upto in itertools.pairwise(edges):
        own = [task for task in drawn if above < distance_of(task) <= upto]
        if own:
            found[above, upto] = own[:number]
    return found


def distance_of(task: Asked) -> int:
    """Tokens from the first token of the evidence to the end of the prompt, both counted."""
    assert task.evidence is not None
    return len(task.prompt) - task.evidence


def cells(
    model: nn.Module,
    course: Course,
    lengths: Sequence[int],
    *,
    seed: int,
    members: int,
    temperature: float,
    number: int,
) -> list[Cell]:
    """The rewards of a policy at each length and distance, `members` responses to each of `number` tasks or fewer.

    Random numbers are keyed by seed, length and distance: the same in every arm.
    """
    found = []
    for length in lengths:
        for (above, upto), tasks in by_distance(course, length, number).items():
            rewards = rewards_of(
                model,
                tasks,
                key=FAR_TEST | seed,
                step=length << 12 | min(above, 2**12 - 1),
                members=members,
                temperature=temperature,
                ends=course.ends,
            )
            found.append(Cell(length=length, above=above, upto=upto, rewards=tuple(rewards)))
    return found


class Gap(BaseModel):
    """One arm in one cell, means over tasks and then over seeds, in units of reward.

    start: before training. gap: arm minus reference after it, paired by seed, with its t interval at 1 - 2 alpha, not
    corrected for arms or cells; None with one seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    task: str
    arm: str
    length: int
    above: int
    upto: int
    seeds: int
    start: float
    reward: float
    gap: float
    interval: tuple[float, float] | None


Key = tuple[int, int, int]


def gaps(
    curves: Mapping[Training, Curve], *, reference: str = REFERENCE, alpha: float = 0.05
) -> list[Gap]:
    """Every arm, the reference included, in every cell, from curves with `long_range`; others are left out.

    Raises `InputError` where an arm has seeds that its reference lacks, or no reference is there.
    """
    found: dict[tuple[str, str], dict[str, dict[int, tuple[dict[Key, float], ...]]]] = {}
    for training, curve in curves.items():
        if rows := curve.long_range:
            means = tuple(
                {(cell.length, cell.above, cell.upto): fmean(cell.rewards) for cell in row.cells}
                for row in (rows[0], rows[-1])
            )
            arms = found.setdefault((training.arch, training.task), {})
            arms.setdefault(training.arm, {})[training.seed] = means
    return [
        _gap(arch, task, arm, seeds, arms.get(reference, {}), key, alpha)
        for (arch, task), arms in found.items()
        for arm, seeds in arms.items()
        for key in next(iter(seeds.values()))[1]
    ]


def _gap(
    arch: str,
    task: str,
    arm: str,
    seeds: Mapping[int, tuple[dict[Key, float], ...]],
    reference: Mapping[int, tuple[dict[Key, float], ...]],
    key: Key,
    alpha: float,
) -> Gap:
    if missing := sorted(seeds.keys() - reference.keys()):
        raise InputError(f"{arch} {task}: arm {arm!r} has seed {missing[0]}, its reference has not")
    ends = [own[1][key] for own in seeds.values()]
    apart = np.array([own[1][key] - reference[seed][1][key] for seed, own in seeds.items()])
    mean, interval = float(apart.mean()), None
    if len(apart) > 1:
        half = (
            float(-special.stdtrit(len(apart) - 1, alpha) * apart.std(ddof=1)) / len(apart) ** 0.5
        )
        interval = (mean - half, mean + half)
    length, above, upto = key
    return Gap(
        arch=arch,
        task=task,
        arm=arm,
        length=length,
        above=above,
        upto=upto,
        seeds=len(apart),
        start=fmean(own[0][key] for own in seeds.values()),
        reward=fmean(ends),
        gap=mean,
        interval=interval,
    )


HEADERS = ("arch", "task", "arm", "prompt", "distance", "seeds", "start", "reward", "gap to full")


def table(found: Sequence[Gap]) -> str:
    """Markdown; prompt and distance in tokens, gaps with their interval."""
    lines = [" | ".join(HEADERS), " | ".join("---" for _ in HEADERS)]
    for row in found:
        low, high = row.interval or (float("nan"), float("nan"))
        gap = f"{row.gap:+.3f}" + (f" ({low:+.3f} to {high:+.3f})" if row.interval else "")
        lines.append(
            f"{row.arch} | {row.task} | {row.arm} | {row.length} | {row.above + 1} to {row.upto} | {row.seeds} | "
            f"{row.start:.3f} | {row.reward:.3f} | {gap}"
        )
    return "\n".join(f"| {line} |" for line in lines) + "\n"
