"""`lsverify faults`, `alarms` and `floors`: the mistakes of the verifier itself, counted, and what its limits rest on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lsverify.errors import InputError
from lsverify.whole_files import write_whole


def alarms(
    arch: Annotated[
        list[str] | None, typer.Option(help="As for gate; every family if none is named.")
    ] = None,
    runs: Annotated[
        int, typer.Option(help="Honest runs; the planted faults are run besides.")
    ] = 500,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float32, bfloat16-autocast, bfloat16; all if none is named."),
    ] = None,
    drawn: Annotated[
        bool,
        typer.Option(
            "--drawn",
            help="Draw lengths, groups, objectives, policies and harmless changes too, in float64 unless one --dtype is "
            "named; the record in --out is continued, and no fault is planted.",
        ),
    ] = False,
    workers: Annotated[int, typer.Option(help="Processes, with --drawn.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file for all runs.")] = None,
) -> int:
    """Count false alarms over honest runs of every family, and misses of two planted state faults; 1 if there is any."""
    from lsverify import alarms as counting
    from lsverify import report
    from lsverify.cases import DTYPES, expanded, require_known

    archs, dtypes = expanded(tuple(arch or ["all"])), tuple(dtype or counting.DTYPES)
    for name in archs:
        require_known(name)
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise InputError(f"dtype {unknown[0]!r} is not known: use one of {', '.join(DTYPES)}")
    if runs < 1 or workers < 1:
        raise InputError(f"runs {runs} and workers {workers} are not allowed: use 1 or more")
    if drawn:
        return _drawn(archs, dtype or ["float64"], runs, workers, out)
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


def _drawn(
    archs: tuple[str, ...], dtypes: list[str], runs: int, workers: int, out: Path | None
) -> int:
    from lsverify import report
    from lsverify.honest_draws import Honest, continued
    from lsverify.whole_files import read_record

    if len(dtypes) > 1:
        raise InputError(f"dtypes {', '.join(dtypes)} with --drawn: name one")
    record = (
        read_record(Honest, out) if out is not None and out.exists() else Honest(dtype=dtypes[0])
    )
    if record.dtype != dtypes[0]:
        raise InputError(
            f"record {str(out)!r} is of {record.dtype}, not {dtypes[0]}: give another --out"
        )
    notes, told = report.wide_console(stderr=True), len(record.wrong)
    for _ in continued(record, archs, runs, workers):
        for wrong in record.wrong[told:]:
            text = f"{wrong.case.model_dump_json(exclude_defaults=True)}: {wrong.refusal}"
            notes.print(text, highlight=False, markup=False, soft_wrap=True)
        told = len(record.wrong)
        notes.print(f"{record.cases} cases", highlight=False)
        if out is not None:
            write_whole(out, record.model_dump_json(indent=1))
    report.wide_console().print(record.summary(), highlight=False)
    return 1 if record.wrong or not record.cases else 0


def faults(
    fault: Annotated[
        list[str] | None, typer.Option("--fault", help="Name of a fault; all if none is named.")
    ] = None,
    problems: Annotated[
        int,
        typer.Option(
            help="Problems on which each fault must do something; more are drawn where it does nothing."
        ),
    ] = 1,
    dtype: Annotated[str, typer.Option(help="float64 (oracle) or float32.")] = "float64",
    again: Annotated[
        Path | None,
        typer.Option(help="A record: run a share of its problems again and compare, instead."),
    ] = None,
    share: Annotated[float, typer.Option(help="Of the record's problems; in (0, 1].")] = 0.02,
    seed: Annotated[int, typer.Option(help="Draws the share.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File for the record; what it has already is not run again.")
    ] = None,
) -> int:
    """Show that every planted fault is caught by its rung, and no honest path by any; 1 if one is not."""
    from lsverify import report
    from lsverify.detection_record import Record
    from lsverify.detection_runs import continued, rerun
    from lsverify.faults import FAULTS
    from lsverify.whole_files import read_record

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
    notes, console = report.wide_console(stderr=True), report.wide_console()

    def note(text: str) -> None:
        notes.print(text, highlight=False, markup=False, soft_wrap=True)

    if again is not None:
        count, differing = rerun(
            read_record(Record, again), fault or None, share, seed, workers, note
        )
        console.print(f"{count} trials run again, {len(differing)} differ from the record")
        return 1 if differing or not count else 0
    record = read_record(Record, out) if out is not None and out.exists() else Record(dtype=dtype)
    if record.dtype != dtype:
        raise InputError(
            f"record {str(out)!r} is of {record.dtype}, not {dtype}: give another --out"
        )
    chosen = [FAULTS[name] for name in fault or FAULTS]
    for _ in continued(record, chosen, problems, workers, note):
        if out is not None:
            write_whole(out, record.model_dump_json(indent=1))
    if as_json:
        typer.echo(record.model_dump_json(indent=1))
    else:
        console.print(record.table())
        console.print(record.summary(), highlight=False)
    return 1 if record.alarms or record.misses else 0


def floors(
    arch: Annotated[
        list[str] | None, typer.Option(help="As for gate; every family if none is named.")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="float64, float32, bfloat16-autocast, bfloat16; all if none is named."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for floors.json and floors.md.")] = None,
) -> int:
    """Show how far rounding carries each family's gradient, what limits follow, and how far off a planted fault is."""
    from rich.table import Table

    from lsverify import report
    from lsverify.cases import expanded, require_known
    from lsverify.floors import COLUMNS, DTYPES, AllFloors, cells, markdown, measure

    archs, dtypes = expanded(tuple(arch or ["all"])), tuple(dtype or DTYPES)
    for name in archs:
        require_known(name)
    if unknown := [name for name in dtypes if name not in DTYPES]:
        raise InputError(f"dtype {unknown[0]!r} is not known: use one of {', '.join(DTYPES)}")
    found = AllFloors(rows=tuple(row for name in archs for row in measure(name, dtypes)))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "floors.json", found.model_dump_json(indent=1))
        named = [f"--arch {name}" for name in arch or ()] + [
            f"--dtype {name}" for name in dtype or ()
        ]
        write_whole(out / "floors.md", markdown(found, " ".join(["lsverify floors", *named])))
    table = Table(*COLUMNS)
    for row in found.rows:
        table.add_row(*cells(row))
    report.wide_console().print(table)
    return 0
