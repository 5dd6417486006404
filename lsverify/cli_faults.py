"""`lsverify faults` and `lsverify alarms`: the mistakes of the verifier itself, counted."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lsverify.errors import InputError

if TYPE_CHECKING:
    from lsverify.detection import Trial
    from lsverify.evidence import CaseConfig


def alarms(
    arch: Annotated[
        list[str] | None, typer.Option(help="As for gate; every family if none is named.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Honest runs; the planted fault is run besides.")] = 500,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, bfloat16-autocast, bfloat16; all if none is named."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for all runs.")] = None,
) -> int:
    """Count false alarms over honest runs of every family, and misses of a planted state fault; 1 if there is any."""
    from lsverify import alarms as counting
    from lsverify import report
    from lsverify.cases import DTYPES, expanded, require_known
    from lsverify.whole_files import write_whole

    archs, dtypes = expanded(tuple(arch or ["all"])), tuple(dtype or counting.DTYPES)
    for name in archs:
        require_known(name)
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise InputError(f"dtype {unknown[0]!r} is not known: use one of {', '.join(DTYPES)}")
    if runs < 1:
        raise InputError(f"runs {runs} is not allowed: use 1 or more")
    notes, found = report.wide_console(stderr=True), []
    for one in counting.counted(runs, archs, dtypes):
        found.append(one)
        if one.wrong:
            text = (
                f"{one.arch} {one.dtype} {one.policy} seed {one.seed}: {one.detail or 'was passed'}"
            )
            notes.print(text, highlight=False, markup=False, soft_wrap=True)
        elif len(found) % 50 == 0:
            notes.print(f"{len(found)} runs", highlight=False)
    made = counting.tally(found)
    if out is not None:
        write_whole(out, made.model_dump_json(indent=1))
    report.wide_console().print(made.table())
    return 1 if made.wrong(honest=True) or made.wrong(honest=False) else 0


def faults(
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Name of a fault; all if none is named.")
    ] = None,
    problems: Annotated[int, typer.Option(help="Problems drawn for each fault.")] = 1,
    share: Annotated[
        float, typer.Option(help="Run this share of all cases, drawn by --seed; in (0, 1].")
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="float64 (oracle) or float32.")] = "float64",
    seed: Annotated[int, typer.Option(help="Of the first problem.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print all trials as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for all trials.")] = None,
) -> int:
    """Show that every planted fault is caught by its rung, and no honest path by any; 1 if one is not."""
    from lsverify import report
    from lsverify.detection import cases, matrix
    from lsverify.faults import FAULTS
    from lsverify.whole_files import write_whole

    if unknown := [name for name in fault or () if name not in FAULTS]:
        raise InputError(f"fault {unknown[0]!r} is not known: use a name of docs/faults.md")
    if dtype not in ("float64", "float32"):
        raise InputError(f"dtype {dtype!r} is not allowed: use float64 or float32")
    if problems < 1 or workers < 1:
        raise InputError(
            f"problems {problems} and workers {workers} are not allowed: use 1 or more"
        )
    if not 0 < share <= 1:
        raise InputError(f"share {share} is not allowed: use more than 0 and at most 1")
    chosen = [FAULTS[name] for name in fault or FAULTS]
    given = list(cases(chosen, problems, dtype=dtype, seed=seed))
    if share < 1:
        kept = sorted(
            random.Random(f"share {seed}").sample(
                range(len(given)), max(1, round(share * len(given)))
            )
        )
        given = [given[at] for at in kept]
    notes, found = report.wide_console(stderr=True), []
    for trial in _trials(given, workers):
        found.append(trial)
        if trial.outcome in ("miss", "elsewhere", "alarm"):
            text = (
                f"{trial.outcome}: {trial.fault} on {trial.arch} seed {trial.seed}: {trial.detail}"
            )
            notes.print(text, highlight=False, markup=False, soft_wrap=True)
        elif len(found) % 100 == 0:
            notes.print(f"{len(found)} of {len(given)}", highlight=False)
    made = matrix(found, seed)
    if out is not None:
        write_whole(out, made.model_dump_json(indent=1))
    if as_json:
        typer.echo(made.model_dump_json(indent=1))
    else:
        console = report.wide_console()
        console.print(made.table())
        console.print(made.summary(), highlight=False)
    return 1 if made.alarms or made.misses else 0


def _trials(given: list[tuple[str, CaseConfig]], workers: int) -> Iterator[Trial]:
    from lsverify.detection import tried

    if workers == 1:
        yield from (tried(name, case) for name, case in given)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        # Neighbours share references, so a worker gets a stretch of them.
        size = max(1, min(64, len(given) // workers))
        yield from pool.map(tried, *zip(*given, strict=True), chunksize=size)
