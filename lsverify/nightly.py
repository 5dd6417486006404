"""A night: fresh seeds for each entry of a suite, and conclusions from all seeds that this code version has had in a folder.

What the night is to do is written down before it begins, so a night that was killed goes on as the same night; what the folder
holds is described in `lsverify.nightly_record`. Seeds are counted up over all nights and versions of a folder and none is used
twice, so that what a version is judged by was drawn for it alone.

The yardstick of a seed is a training of its own, and not the reference of another seed. With the reference of the next seed in
a circle the gaps would sum to zero whatever was trained, and the yardstick, which is there to accuse the comparison, never could.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lsverify.code_version import code_version
from lsverify.curves import Curve
from lsverify.errors import InputError
from lsverify.evidence import Environment, check_folder, environment
from lsverify.nightly_analysis import entry_record, over_entries
from lsverify.nightly_record import (
    LEDGER,
    RECORD,
    EntryRecord,
    Ledger,
    Night,
    Nightly,
    Planned,
    read_curves,
)
from lsverify.nightly_suite import Entry, Suite
from lsverify.precision import deterministic, threads
from lsverify.sweeps import Engine, Report, check, folder_of, trained
from lsverify.trainings import Training
from lsverify.whole_files import read_record, write_whole


def night(
    suite: Suite,
    out: Path,
    *,
    command: Sequence[str] = (),
    full: bool = False,
    resume: bool = False,
    processes: int = 1,
    engine: Engine = "local",
    progress: Report = lambda progress: None,
    finish: Callable[[Nightly], None] = lambda record: None,
) -> Nightly:
    """Train what the suite has for tonight, decide, and write the record below `out`.

    full: all entries, also those that would have to wait for their turn. resume: go on with a night that did not come to its
    end, if there is one. finish: what else belongs to the night, with the record; a night that is killed in it is not finished.
    Raises `InputError`, for a suite or folder that does not fit before anything is trained.
    """
    check(processes, engine)
    check_folder(out)
    version = code_version()
    ledger = _opened(read_ledger(out), suite, full, version.name, resume, out)
    write_whole(out / LEDGER, ledger.model_dump_json(indent=1) + "\n")
    tonight, entries = ledger.nights[-1], {entry.name: entry for entry in suite.entries}
    plan = [(entries[planned.entry], planned) for planned in tonight.planned]
    trained(
        _places(plan, out / version.name),
        processes=processes,
        engine=engine,
        breaking=True,
        progress=progress,
    )
    found = tuple(_recorded(entry, planned, ledger, out) for entry, planned in plan)
    record = Nightly(
        number=len(ledger.nights),
        version=version,
        environment=_here(),
        command=tuple(command),
        suite=suite,
        full=full,
        entries=found,
        correlation=over_entries(found),
    )
    for name in (f"nights/{record.number:04}.json", RECORD):
        write_whole(out / name, record.model_dump_json(indent=1) + "\n")
    finish(record)
    ledger = _closed(ledger, record)
    write_whole(out / LEDGER, ledger.model_dump_json(indent=1) + "\n")
    return record


def read_ledger(out: Path) -> Ledger:
    """Empty where there is none. Raises `InputError` for what is none."""
    file = out / LEDGER
    return read_record(Ledger, file) if file.exists() else Ledger()


def _opened(
    ledger: Ledger, suite: Suite, full: bool, version: str, resume: bool, out: Path
) -> Ledger:
    """With tonight as its last night."""
    last = ledger.nights[-1] if ledger.nights else None
    # A night of other code cannot be gone on with, and nothing was concluded from it.
    if last and not last.finished and last.version == version:
        if not resume:
            raise InputError(
                f"night {len(ledger.nights)} in {out} is not finished: add --resume to go on with it, or use another --out"
            )
        if (last.suite, last.full) != (suite.digest, full):
            raise InputError(
                f"night {len(ledger.nights)} in {out} was begun with another suite: give the options that it was begun with, "
                "or use another --out"
            )
        return ledger
    planned = tuple(
        Planned(
            entry=entry.name, trains=entry.trains, seeds=_fresh(ledger, entry.name, suite.seeds)
        )
        for entry in suite.tonight(len(ledger.nights), full=full)
    )
    if not planned:
        raise InputError(
            "the suite has nothing for tonight: let an entry not rotate, or raise rotating"
        )
    for each in planned:
        _earlier(ledger, version, each)
    tonight = Night(version=version, suite=suite.digest, full=full, planned=planned)
    return Ledger(nights=(*ledger.nights, tonight))


def _closed(ledger: Ledger, record: Nightly) -> Ledger:
    *before, tonight = ledger.nights
    planned = tuple(
        each.model_copy(
            update={
                "decisions": found.verdicts,
                "broken": {
                    arm.arm: tuple(seed for seed in arm.broken if seed in each.seeds)
                    for arm in found.arms
                },
            }
        )
        for each, found in zip(tonight.planned, record.entries, strict=True)
    )
    return Ledger(
        nights=(*before, tonight.model_copy(update={"planned": planned, "finished": True}))
    )


def _fresh(ledger: Ledger, entry: str, number: int) -> tuple[int, ...]:
    """Seeds that no night of this folder gave to an entry of this name."""
    used = [
        seed
        for night in ledger.nights
        for planned in night.planned
        if planned.entry == entry
        for seed in planned.seeds
    ]
    first = max(used, default=-1) + 1
    return tuple(range(first, first + number))


def _earlier(ledger: Ledger, version: str, tonight: Planned) -> list[Planned]:
    """Of finished nights of this version, with the same entry. Raises `InputError` where that was another one."""
    found = [
        planned
        for night in ledger.nights
        if night.finished and night.version == version
        for planned in night.planned
        if planned.entry == tonight.entry
    ]
    if any(planned.trains != tonight.trains for planned in found):
        raise InputError(
            f"entry {tonight.entry!r} was trained with other options or arms by this code version: give it another name"
        )
    return found


def _places(plan: Sequence[tuple[Entry, Planned]], folder: Path) -> dict[Training, Path]:
    return {
        training: folder / entry.name / folder_of(training)
        for entry, planned in plan
        for training in entry.sweep(planned.seeds).trainings()
    }


def _recorded(entry: Entry, planned: Planned, ledger: Ledger, out: Path) -> EntryRecord:
    version = ledger.nights[-1].version
    folder, earlier = f"{version}/{entry.name}", _earlier(ledger, version, planned)
    curves = read_curves(out / folder, entry, planned.seeds)
    for night in earlier:
        found = read_curves(out / folder, entry, night.seeds)
        for training, curve in found.items():
            _require_whole(training, curve, night, out / folder)
        curves |= found
    return entry_record(entry, planned, earlier, curves, folder)


def _require_whole(training: Training, curve: Curve, night: Planned, folder: Path) -> None:
    """A curve that lost its end since its night must not count as a training that broke off."""
    if not curve.reaches(training.steps) and training.seed not in night.broken[training.arm]:
        raise InputError(
            f"{folder / folder_of(training)} is not whole any more, and an earlier night counted it: put it back, or use "
            "another --out"
        )


def _here() -> Environment:
    with threads(1), deterministic():  # as every training runs
        return environment()
