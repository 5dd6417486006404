"""A night in W&B: a run for each arm and seed, grouped by entry, and one for the night with its verdicts and files.

Rows come from the curve files once trainings are done, so nothing that happens here can cost a training: what goes wrong is told
and the night goes on. Where the network fails, the rest is written offline, and `wandb sync` sends it later.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lsverify.curves import Curve, StepRow, TestRow
from lsverify.nightly_record import EntryRecord, Nightly
from lsverify.tracking import keep_files, started
from lsverify.trainings import Training

Warn = Callable[[str], None]
VERDICTS = (
    "entry", "arm", "decision", "standing", "reward", "gap", "low", "high", "margin", "p_equivalent", "p_different",
    "seeds", "reason",
)  # fmt: skip


def log_night(
    record: Nightly, out: Path, *, mode: str, files: Sequence[Path] = (), warn: Warn
) -> list[Path]:
    """Log tonight's fresh seeds and the night; returns the runs' folders, below out/wandb. `warn` gets a line for what failed.

    files: what is kept in the night's run and logged as its artifact, beside the record.
    """
    runs: list[tuple[str, Callable[[str], Path]]] = [
        (name, log) for entry in record.entries for name, log in _trainings(record, entry, out)
    ]
    runs.append(("the night", lambda mode: _log_summary(record, out, mode, files)))
    if mode == "disabled":
        return []
    with _staging_below(out):
        return _logged(runs, mode, out, warn)


def _logged(
    runs: Sequence[tuple[str, Callable[[str], Path]]], mode: str, out: Path, warn: Warn
) -> list[Path]:
    folders = []
    for name, log in runs:
        try:
            try:
                folders.append(log(mode))
            except Exception as error:
                if mode != "online":
                    raise
                warn(
                    f"wandb online: {_first_line(error)}: from here on offline below {out / 'wandb'}, wandb sync sends it"
                )
                mode = "offline"
                folders.append(log(mode))
        except Exception as error:
            warn(f"wandb: {name} is not logged: {_first_line(error)}")
    return folders


def log_training(
    training: Training,
    curve: Curve,
    *,
    entry: str,
    version: str,
    number: int,
    mode: str,
    folder: Path,
    project: str = "lsverify",
) -> Path:
    """One run: a history row for each step, the test before the first one at 0. Returns its folder."""
    name = f"{entry}/{training.arm}/seed{training.seed}"
    with started(
        mode,
        folder,
        project,
        training.arm,
        training.model_dump() | {"entry": entry, "version": version, "night": number},
        group=entry,
        name=name,
        # The same again where a night is gone on with, so that what is synced twice is one run.
        id=f"{_spelled(name)}-{hashlib.sha256(version.encode()).hexdigest()[:8]}",
    ) as run:
        for step, values in history(curve):
            run.log(values, step=step)
        run.summary["test/reward"] = curve.end.reward
        return Path(run.dir).parent


def history(curve: Curve) -> Iterator[tuple[int, dict[str, Any]]]:
    """What is logged at each step; a number that does not exist is left out."""
    rows: dict[int, dict[str, Any]] = {}
    for row in curve.rows:
        found = rows.setdefault(row.step, {})
        if isinstance(row, StepRow):
            found.update(_of_step(row))
        elif isinstance(row, TestRow):
            found.update(_of_test(row))
    yield from rows.items()


@contextmanager
def _staging_below(out: Path) -> Iterator[None]:
    """Artifacts that are not sent yet wait beside the runs they belong to, unless the user has a place for them."""
    if "WANDB_DATA_DIR" in os.environ:
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str((out / "wandb").absolute())
    try:
        yield
    finally:
        del os.environ["WANDB_DATA_DIR"]


def _trainings(
    record: Nightly, entry: EntryRecord, out: Path
) -> Iterator[tuple[str, Callable[[str], Path]]]:
    for training, curve in entry.curves(out).items():
        if training.seed in entry.fresh:

            def log(mode: str, training: Training = training, curve: Curve = curve) -> Path:
                return log_training(
                    training,
                    curve,
                    entry=entry.entry.name,
                    version=record.version.name,
                    number=record.number,
                    mode=mode,
                    folder=out,
                )

            yield f"{entry.entry.name} {training.arm} seed {training.seed}", log


def _of_step(row: StepRow) -> dict[str, Any]:
    values = {
        "reward/mean": row.reward,
        "reward/sd": row.reward_sd,
        "kl_to_start": row.kl_to_start,
        "entropy": row.entropy,
        "loss": row.loss,
        "gradient_norm": row.gradient_norm,
        "clip_share": row.clip_share,
        "response_length": row.response_length,
        "tokens_per_second": row.tokens_forwarded / row.seconds,
        "peak_resident_bytes": row.peak_resident,
    }
    for name, part in (("to_full", row.to_full), ("drift", row.drift)):
        values |= {
            f"{name}/{key}": value for key, value in (part.model_dump() if part else {}).items()
        }
    return {key: value for key, value in values.items() if value is not None}


def _of_test(row: TestRow) -> dict[str, Any]:
    import wandb

    return {
        "test/reward": row.reward,
        "test/sd_over_prompts": float(np.std(row.rewards)),
        "test/rewards": wandb.Histogram(np_histogram=np.histogram(row.rewards, 20, (0.0, 1.0))),
    }


def _log_summary(record: Nightly, out: Path, mode: str, files: Sequence[Path]) -> Path:
    import wandb

    config = record.model_dump(
        mode="json", include={"number", "version", "command", "environment", "suite", "full"}
    )
    name = f"night {record.number}"
    with started(mode, out, "lsverify", "nightly", config, name=name) as run:
        run.log({"verdicts": wandb.Table(columns=list(VERDICTS), data=verdicts(record))})
        run.summary["exit_code"] = record.exit_code
        run.summary["failures"] = list(record.failures)
        return keep_files(run, f"night-{record.number}", "night", files)


def verdicts(record: Nightly) -> list[list[Any]]:
    """A row of `VERDICTS` for each arm of each comparison, control and yardstick included."""
    return [
        [entry.entry.name, v.arm, v.decision, entry.standing.get(v.arm, ""), v.reward, v.gap, *v.interval, v.margin,
         v.p_equivalent, v.p_different, v.seeds, v.reason]
        for entry in record.entries
        if (found := entry.comparison)
        for v in (*found.arms, found.yardstick, found.control)
    ]  # fmt: skip


def _spelled(name: str) -> str:
    """As a run's id may be."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
