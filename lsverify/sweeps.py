"""A sweep: one training for each architecture, task, arm and seed, over processes or a Ray cluster.

Every training has a folder of its own and goes on from what is there, so a sweep that was stopped is run again.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from lsverify.convergence import claim, train
from lsverify.curves import NAME, Curve, CurveFile, final_rewards, read_curve
from lsverify.errors import InputError, TrainingBroke
from lsverify.trainings import Training

Engine = Literal["local", "ray"]
GLANCE = 1.0  # seconds between two looks at how far the trainings are


@dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `steps` optimizer steps of all trainings; `left` in seconds at the pace so far, None before the first step."""

    done: int
    steps: int
    finished: int
    trainings: int
    left: float | None


Report = Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations; `options` are those of `Training` that all of them share."""

    archs: tuple[str, ...]
    tasks: tuple[str, ...]
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    options: Mapping[str, Any]

    def trainings(self) -> list[Training]:
        """By architecture, task, arm, seed. Raises `InputError` for what is missing, given twice or not allowed."""
        axes = {"arch": self.archs, "task": self.tasks, "arm": self.arms, "seed": self.seeds}
        for name, values in axes.items():
            if not values:
                raise InputError(f"a sweep without any {name}: give at least one")
            if len(set(values)) < len(values):
                raise InputError(f"{name} {_repeated(values)!r} is given twice: give each once")
            if name in self.options:
                raise InputError(f"option {name!r} is an axis of the sweep: give it there")
        return [
            Training.parse({**self.options, **dict(zip(axes, values, strict=True))})
            for values in product(*axes.values())
        ]


def folder_of(training: Training) -> str:
    """Where a training lives below its sweep's folder."""
    names = (training.arch, training.task, training.arm, f"seed{training.seed}")
    return "/".join(name.replace(":", "-").replace("/", "_") for name in names)


def run(
    sweep: Sweep,
    folder: Path,
    *,
    processes: int = 1,
    engine: Engine = "local",
    progress: Report = lambda progress: None,
) -> dict[Training, Curve]:
    """Every training to its end, each in `folder_of` it below `folder`; see `trained`. Raises what the first training raised."""
    places = {each: folder / folder_of(each) for each in sweep.trainings()}
    return trained(places, processes=processes, engine=engine, progress=progress)


def trained(
    places: Mapping[Training, Path],
    *,
    processes: int = 1,
    engine: Engine = "local",
    breaking: bool = False,
    progress: Report = lambda progress: None,
) -> dict[Training, Curve]:
    """Every training in its place, `processes` at a time in new processes, or as many as a Ray cluster has cores for.

    On a cluster nothing but the finished curves comes back. Raises `InputError` before anything runs, and what the first
    training raised that failed; the others keep what they have. Where `breaking` is allowed, a training that broke off
    (`TrainingBroke`) gives the rows that it made.
    """
    check(processes, engine)
    watched = _Watched(places, progress)
    if engine == "ray":
        return _on_ray(places, watched, breaking)
    with _pool(min(processes, len(places))) as pool:
        futures = {
            each: pool.submit(_train, each, place, breaking) for each, place in places.items()
        }
        pending = set(futures.values())
        while pending:
            done, pending = wait(pending, timeout=GLANCE, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            watched.look()
    return {each: future.result() for each, future in futures.items()}


def check(processes: int, engine: Engine) -> None:
    """Raises `InputError` for what `trained` could not work with."""
    if processes < 1:
        raise InputError(f"processes {processes} is not allowed: use 1 or more")
    if engine not in get_args(Engine):
        raise InputError(f"engine {engine!r} is not known: use {' or '.join(get_args(Engine))}")
    if engine == "ray":
        _ray()


def _ray() -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(
            "ray is not installed: pip install ray on the cluster's nodes and here, or use engine local"
        ) from None
    return ray


def _train(training: Training, folder: Path, breaking: bool) -> Curve:
    try:
        return train(training, folder)
    except TrainingBroke:
        if not breaking:
            raise
        return read_curve(folder)


def rewards_by_arm(
    curves: Mapping[Training, Curve], arch: str, task: str
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64]]:
    """Of one architecture and task, as `verdicts.compare` takes them: by arm [S, P] after training, and [S, P] of the start.

    Rows are seeds in ascending order. Raises `InputError` for an arm that lacks seeds of another, and without curves.
    """
    own = {each: curve for each, curve in curves.items() if (each.arch, each.task) == (arch, task)}
    seeds = sorted({each.seed for each in own})
    by_arm: dict[str, dict[int, Curve]] = {}
    for each, curve in own.items():
        by_arm.setdefault(each.arm, {})[each.seed] = curve
    for arm, found in by_arm.items():
        if missing := [seed for seed in seeds if seed not in found]:
            raise InputError(f"{arch} {task}: arm {arm!r} has no curve of seed {missing[0]}")
    if not own:
        raise InputError(f"no curve of {arch} on {task}: train some first")
    rewards = {arm: final_rewards([found[seed] for seed in seeds]) for arm, found in by_arm.items()}
    any_arm = next(iter(by_arm.values()))
    return rewards, np.array([any_arm[seed].start.rewards for seed in seeds])


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Spawned: a fork would share torch's threads. Where something failed, what has not begun does not begin."""
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Watched:
    """How far the trainings are, by the lines in their files: what an earlier run has left counts too."""

    def __init__(self, places: Mapping[Training, Path], report: Report) -> None:
        self._files = {each: place / NAME for each, place in places.items()}
        self._report, self._steps = report, sum(each.steps for each in places)
        self._begun = time.perf_counter()
        self._before: int | None = None
        self._before = self.look().done

    def look(self) -> Progress:
        done = {each: _steps_in(file) for each, file in self._files.items()}
        total, seconds = sum(done.values()), time.perf_counter() - self._begun
        made = 0 if self._before is None else total - self._before
        found = Progress(
            done=total,
            steps=self._steps,
            finished=sum(steps == each.steps for each, steps in done.items()),
            trainings=len(done),
            left=seconds / made * (self._steps - total) if made else None,
        )
        self._report(found)
        return found


def _steps_in(file: Path) -> int:
    if not file.exists():
        return 0
    with file.open("rb") as lines:
        return sum(line.startswith(b'{"kind": "step"') for line in lines)


@contextmanager
def bar() -> Iterator[Report]:
    """A bar on standard error with the time that is left; there is none before the first report."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps, {task.description}"))
    shown = Bar(*columns, console=Console(stderr=True))
    task = shown.add_task("", total=None)

    def report(progress: Progress) -> None:
        left = "" if progress.left is None else f", {timedelta(seconds=int(progress.left))} left"
        shown.update(
            task,
            completed=progress.done,
            total=progress.steps,
            description=f"{progress.finished} of {progress.trainings} trainings{left}",
        )
        shown.start()

    try:
        yield report
    finally:
        shown.stop()


def _on_ray(
    places: Mapping[Training, Path], watched: _Watched, breaking: bool
) -> dict[Training, Curve]:
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    there = ray.remote(_train_there)
    found: dict[Training, Curve] = {}
    waiting: dict[Any, Training] = {}
    for each, place in places.items():
        claim(place, each)
        before = read_curve(place)
        if before.reaches(each.steps):
            found[each] = before
        else:
            waiting[there.remote(each.model_dump(), breaking)] = each
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for reference in done:
            each = waiting.pop(reference)
            found[each] = ray.get(reference)
            CurveFile(places[each], found[each])
        watched.look()
    return {each: found[each] for each in places}


def _train_there(values: Mapping[str, Any], breaking: bool) -> Curve:
    """On a node that need not share a disk with this one."""
    with tempfile.TemporaryDirectory() as folder:
        return _train(Training.parse(values), Path(folder), breaking)


def _repeated(values: Sequence[Any]) -> Any:
    return next(value for value in values if values.count(value) > 1)
