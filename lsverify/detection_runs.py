"""Runs of the detection matrix: continued until every fault has enough problems, or a share of a record run again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from lsverify.at_work import at_work
from lsverify.detection import Trial, cases, tried
from lsverify.detection_record import Record, letter_of
from lsverify.errors import InputError
from lsverify.faults import FAULTS, Fault

# Problems between two writings of the record.
BLOCK = 5
# A fault that does nothing on so many problems of those asked for is given up: a fault eligible on 30% needs 3.4 times as many.
PATIENCE = 4

Note = Callable[[str], None]


def continued(
    record: Record, faults: Sequence[Fault], problems: int, workers: int, note: Note
) -> Iterator[Record]:
    """Add trials until each fault has `problems` eligible ones, or PATIENCE times as many drawn; the record after each block.

    Faults go on from where the record ends, so it may be stopped at any moment and continued.
    """
    yield record
    with at_work(tried, workers) as tried_all:
        while wanting := [fault for fault in faults if _wants(record, fault, problems)]:
            first = min(_drawn(record, fault) for fault in wanting)
            # Those that are ahead wait: neighbours share references.
            level = [fault for fault in wanting if _drawn(record, fault) == first]
            numbers = range(first, first + min(BLOCK, problems))
            found = list(tried_all(list(cases(level, numbers, dtype=record.dtype))))
            record.add(found)
            for trial in found:
                if trial.outcome in ("miss", "elsewhere", "alarm"):
                    where = f"{trial.fault} on {trial.arch}, problem {trial.number}"
                    note(f"{trial.outcome}: {where}: {trial.detail}")
            note(f"to problem {numbers[-1]}, {len(level)} faults: {record.summary()}")
            yield record


def _drawn(record: Record, fault: Fault) -> int:
    row = record.faults.get(fault.name)
    return len(row.letters) if row else 0


def _wants(record: Record, fault: Fault, problems: int) -> bool:
    row = record.faults.get(fault.name)
    return row is None or (row.eligible < problems and len(row.letters) < PATIENCE * problems)


def rerun(
    record: Record, names: Sequence[str] | None, share: float, seed: int, workers: int, note: Note
) -> tuple[int, list[Trial]]:
    """Run a share of the record's problems again, all their faults: how many trials, and those that came out differently.

    Raises `InputError` for a record of a fault that is no more.
    """
    if unknown := sorted(record.faults.keys() - FAULTS.keys()):
        raise InputError(f"the record has {unknown[0]!r}, which is no fault any more: make it anew")
    rows = {name: row for name, row in record.faults.items() if names is None or name in names}
    most = max((len(row.letters) for row in rows.values()), default=0)
    count = min(most, max(1, round(share * most)))
    numbers = sorted(random.Random(f"share {seed}").sample(range(most), count))
    note(f"problems {', '.join(map(str, numbers))} of {most}")
    given = [
        case
        for number in numbers
        for case in cases(
            [FAULTS[name] for name, row in rows.items() if number < len(row.letters)],
            [number],
            dtype=record.dtype,
        )
    ]
    with at_work(tried, workers) as tried_all:
        found = list(tried_all(given))
    differing = [trial for trial in found if _expected(record, trial) != letter_of(trial)]
    for trial in differing:
        was = _expected(record, trial)
        note(
            f"{trial.fault} on problem {trial.number}: {letter_of(trial)}, was {was}: {trial.detail}"
        )
    return len(found), differing


def _expected(record: Record, trial: Trial) -> str:
    if not trial.honest:
        return record.faults[trial.fault].letters[trial.number]
    alarms = {(alarm.fault, alarm.arch, alarm.number) for alarm in record.alarms}
    return "a" if (trial.fault, trial.arch, trial.number) in alarms else "p"
