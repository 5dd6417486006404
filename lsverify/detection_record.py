"""What many trials came to, fault by fault: small enough to be kept, exact enough to be run again and held against.

One letter for each problem, in the order of their numbers: the number alone draws the problem, so a letter can be made
again by anybody.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from lsverify.detection import Trial
from lsverify.evidence import RUNGS, RungName

LETTERS = {"caught": "c", "elsewhere": "e", "miss": "m", "ineligible": "i"}
# Caught, and not pointed at the right place.
UNPOINTED = "n"
ELIGIBLE = "cnem"


class Row(BaseModel):
    """One fault: the rung that must refuse it, a letter for each problem from number 0 on, and which rungs did refuse.

    `least` is the smallest relative L2 of its gradient at which it was refused, of those that are not zero: a fault may
    leave the gradient as it is, and one of a tensor is small beside all of them.
    """

    model_config = ConfigDict(extra="forbid")

    must: RungName
    letters: str = ""
    refused_by: dict[str, int] = {}
    least: float | None = None

    def count(self, letters: str) -> int:
        return sum(self.letters.count(letter) for letter in letters)

    @property
    def eligible(self) -> int:
        return self.count(ELIGIBLE)

    @property
    def caught(self) -> int:
        return self.count("cn")


class Record(BaseModel):
    """All that was seen: `shown` are the trials that were not caught and pointed at as they must be, and the alarms."""

    model_config = ConfigDict(extra="forbid")

    transformers: str = importlib.metadata.version("transformers")
    torch: str = importlib.metadata.version("torch")
    dtype: str
    faults: dict[str, Row] = {}
    honest: int = 0
    shown: list[Trial] = []

    def add(self, trials: Iterable[Trial]) -> None:
        """Take in trials; those of one fault must come in the order of their numbers."""
        for trial in trials:
            if trial.honest:
                self.honest += 1
            else:
                self._row(trial)
            if trial.outcome != "passed" and letter_of(trial) not in "ci":
                self.shown.append(trial)

    def _row(self, trial: Trial) -> None:
        must = trial.expected
        row = self.faults.setdefault(trial.fault, Row.model_validate({"must": must}))
        if trial.number != len(row.letters):
            raise ValueError(f"{trial.fault}: problem {trial.number} after {len(row.letters)}")
        row.letters += letter_of(trial)
        if trial.eligible and trial.refused_by is not None:
            if trial.size and math.isfinite(trial.size):
                row.least = min(trial.size, row.least or math.inf)
            row.refused_by[trial.refused_by] = row.refused_by.get(trial.refused_by, 0) + 1

    @property
    def alarms(self) -> list[Trial]:
        return [trial for trial in self.shown if trial.honest]

    @property
    def misses(self) -> list[Trial]:
        return [trial for trial in self.shown if trial.outcome in ("miss", "elsewhere")]

    def table(self) -> Table:
        """Fault by rung: how often each refused it, of how many eligible problems; and the scores."""
        drawn = Table(*COLUMNS)
        for cells in self.rows():
            drawn.add_row(*cells)
        return drawn

    def rows(self) -> Iterable[list[str]]:
        for name, row in self.faults.items():
            by_rung = [row.refused_by.get(rung, 0) for rung in RUNGS[1:]]
            counts = [len(row.letters), row.eligible, *(count or "" for count in by_rung)]
            shares = [share(row.caught, row.eligible), share(row.count("c"), row.eligible)]
            yield [name, row.must, *map(str, counts), *shares]

    def summary(self) -> str:
        """One line: caught, pointed at the right place, false alarms."""
        rows = [row for row in self.faults.values() if row.eligible]
        eligible, caught = sum(row.eligible for row in rows), sum(row.caught for row in rows)
        pointed = sum(row.count("c") for row in rows)
        least = min((row.caught / row.eligible for row in rows), default=0.0)
        return (
            f"{len(rows)} faults on {eligible} eligible problems: {share(caught, eligible)} caught by the rung that "
            f"must (the least {100 * least:.4g}%), {share(pointed, eligible)} pointed at the right place; "
            f"{len(self.alarms)} false alarms in {self.honest} honest runs"
        )


COLUMNS = ("fault", "must refuse", "problems", "eligible", *RUNGS[1:], "caught", "pointed")


def letter_of(trial: Trial) -> str:
    """The trial's letter in a row; that of an honest path says passed or alarm by its outcome's first."""
    if trial.honest:
        return trial.outcome[0]
    return UNPOINTED if trial.outcome == "caught" and not trial.pointed else LETTERS[trial.outcome]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g}%" if whole else "-"


def markdown(records: Iterable[Record]) -> str:
    """docs/detection.md: the matrix of each record, and every trial that was not as it must be."""
    text = [INTRODUCTION]
    for record in records:
        text += [f"## {record.dtype}", "", f"{record.summary()}.", ""]
        shown = [f"- {_told(trial)}" for trial in record.shown]
        text += [*(shown or ["Nothing was missed, refused elsewhere, or accused."]), ""]
        table = [list(COLUMNS), ["---"] * len(COLUMNS), *record.rows()]
        text += [f"| {' | '.join(cells)} |" for cells in table] + [""]
    return "\n".join(text)


def _told(trial: Trial) -> str:
    where = f"`{trial.fault}` on {trial.arch}, problem {trial.number}"
    return f"{where}: {trial.outcome}{'' if trial.pointed else ', not pointed at'}: {trial.detail}"


INTRODUCTION = """# The detection matrix

Every planted fault ([what they are](faults.md)) on problems drawn by their number, and honest paths among them. Made by
`lsverify faults --problems 300 --workers 2 --out fixtures/faults/float64.json` (it goes on where the record ends), written here
by `python -m lsverify.detection_record fixtures/faults/*.json > docs/detection.md`, and run again in parts by `ci/test.sh`.
`eligible`: problems on which the fault does something, measured without the ladder. The columns after it count by which rung it
was refused there. `caught`: by the rung that must; `pointed`: and in words that point at the right place.
"""


if __name__ == "__main__":
    import sys
    from pathlib import Path

    from lsverify.whole_files import read_record

    sys.stdout.write(markdown(read_record(Record, Path(name)) for name in sys.argv[1:]))
