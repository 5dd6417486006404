"""The command of trainings: `lsverify nightly`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from lsverify.errors import InputError

OUT = Path("lsverify-nightly")


def nightly(
    context: typer.Context,
    suite: Annotated[
        str | None,
        typer.Option(
            help="TOML file that says what to train, or smollm2: LoRA trainings of the pretrained model, hours; the package's "
            "nightly.toml if none is named."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(help="Folder that keeps all nights: each adds its seeds to those before it."),
    ] = OUT,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with a night that was stopped, if there is one."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One small comparison, under 5 minutes on 2 cores.")
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="All entries, also those that take turns.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Fresh seeds for each entry, instead of the suite's number.")
    ] = None,
    processes: Annotated[int, typer.Option(help="Trainings at a time, of one thread each.")] = 1,
    wandb: Annotated[str, typer.Option(help="offline, online or disabled.")] = "offline",
    engine: Annotated[str, typer.Option(help="local, or ray for a Ray cluster.")] = "local",
) -> int:
    """Train arms side by side, decide whether they learn the same policy, and keep it all for the next night.

    A code version's seeds count together, and its verdicts are corrected for the nights that have looked. Exit code 1: a
    comparison is void (nothing was learned, the control is not seen or the yardstick is accused), or exact parts from full
    autograd, step by step in float64 or by its verdict. What detach, windows or other arms lose is measured and fails nothing.
    """
    from lsverify import report, tracking
    from lsverify.nightly import night
    from lsverify.nightly_page import write_page
    from lsverify.nightly_record import RECORD, Nightly
    from lsverify.nightly_report import show
    from lsverify.nightly_suite import read_suite, suite_file
    from lsverify.sweeps import bar
    from lsverify.tracking_trainings import log_night

    tracking.check_mode(wandb)
    if quick and suite is not None:
        raise InputError(f"--quick and --suite {suite} exclude each other: leave one out")
    spec = suite or ("quick" if quick else "nightly")
    chosen = read_suite(suite_file(spec)).with_seeds(seeds)
    notes = report.wide_console(stderr=True)

    def note(text: str) -> None:
        notes.print(text, highlight=False, markup=False, soft_wrap=True)

    def finish(record: Nightly) -> None:
        files = [out / RECORD]
        try:
            files.append(write_page(out))
        except InputError as error:  # a page that cannot be drawn loses no night
            note(str(error))
        log_night(record, out, mode=wandb, files=files, warn=note)

    with bar() as progress:
        record = night(
            chosen,
            out,
            command=tuple(context.obj),
            full=full,
            resume=resume,
            processes=processes,
            engine=engine,  # type: ignore[arg-type]
            progress=progress,
            finish=finish,
        )
    show(record, report.wide_console())
    for failure in record.failures:
        note(failure)
    note(f"night {record.number} of {record.version.name}: {out / RECORD}")
    if wandb == "offline":
        note(f"for W&B: wandb sync {shlex.quote(str(out / 'wandb'))}/offline-run-*")
    return record.exit_code
