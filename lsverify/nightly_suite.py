"""What a night trains: entries that are trained every night, and others that take turns. Read from a TOML file."""

from __future__ import annotations

import hashlib
import tomllib
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lsverify.arms import CONTROL, REFERENCE, YARDSTICK
from lsverify.errors import InputError
from lsverify.sweeps import Sweep

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$"
NEEDED = (REFERENCE, YARDSTICK, CONTROL)


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Entry(_Table):
    """One architecture and task, trained by several arms; `options` are those of `Training` that all of them share.

    kind: `comparison` decides about each arm against `full`, with `other_seeds` as yardstick and `scrambled` as control;
    `drift` measures how far kept states are from fresh ones, decides nothing, and every arm of it is `stale:N`.
    """

    name: str = Field(pattern=NAME)
    arch: str
    task: str = "recall"
    kind: Literal["comparison", "drift"] = "comparison"
    rotates: bool = False
    """Whether it takes turns with the others that rotate, instead of being trained every night."""
    arms: tuple[str, ...] = (REFERENCE, "exact", "detach", "window:8", YARDSTICK, CONTROL)
    options: dict[str, Any] = {}

    @model_validator(mode="after")
    def _fits(self) -> Entry:
        kept = [arm for arm in self.arms if arm.startswith("stale:")]
        if self.kind == "drift" and len(kept) < len(self.arms):
            raise ValueError(f"entry {self.name!r} is of drift: give it no arms but stale:N")
        missing = [arm for arm in NEEDED if arm not in self.arms]
        if self.kind == "comparison" and (missing or len(self.arms) == len(NEEDED)):
            raise ValueError(
                f"entry {self.name!r} compares {', '.join(self.arms) or 'nothing'}: "
                f"give it {', '.join(NEEDED)} and at least one more arm"
            )
        self.sweep((0,)).trainings()
        return self

    @property
    def trains(self) -> str:
        """A hash of its kind and of its trainings without seeds: seeds of entries with equal ones belong together."""
        trainings = sorted(each.model_dump_json() for each in self.sweep((0,)).trainings())
        return _hash(self.kind, *trainings)

    def sweep(self, seeds: tuple[int, ...]) -> Sweep:
        """Of these seeds. Its `trainings` raise `InputError`."""
        return Sweep(
            archs=(self.arch,),
            tasks=(self.task,),
            arms=self.arms,
            seeds=seeds,
            options=self.options,
        )


class Suite(_Table):
    """seeds: fresh ones that a night adds to each entry. rotating: how many of the entries that take turns are trained in a night."""

    seeds: int = Field(ge=2)
    rotating: int = Field(default=0, ge=0)
    entries: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _apart(self) -> Suite:
        for one, other in combinations(self.entries, 2):
            if one.name == other.name:
                raise ValueError(f"two entries are named {one.name!r}: give each a name of its own")
            if set(one.sweep((0,)).trainings()) & set(other.sweep((0,)).trainings()):
                raise ValueError(
                    f"entries {one.name!r} and {other.name!r} train the same: leave one out"
                )
        return self

    def with_seeds(self, seeds: int | None) -> Suite:
        """Itself where `seeds` is None. Raises `InputError`."""
        if seeds is not None and seeds < 2:
            raise InputError(
                f"seeds {seeds} is not allowed: give 2 or more, so that they have a spread"
            )
        return self if seeds is None else self.model_copy(update={"seeds": seeds})

    @property
    def digest(self) -> str:
        return _hash(self.model_dump_json())

    def tonight(self, before: int, *, full: bool = False) -> tuple[Entry, ...]:
        """The entries of a night with `before` nights before it; all of them where `full`."""
        turning = [entry for entry in self.entries if entry.rotates]
        count = min(self.rotating, len(turning))
        chosen = {turning[(before * count + place) % len(turning)].name for place in range(count)}
        return tuple(e for e in self.entries if full or not e.rotates or e.name in chosen)


def read_suite(file: Path) -> Suite:
    """Raises `InputError` in one line for a file that is no suite."""
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        said = " ".join(str(error).split())
        raise InputError(
            f"suite {str(file)!r} cannot be read ({said}): give a TOML file like {shipped()}"
        ) from None
    try:
        return Suite.model_validate(values)
    except ValidationError as error:
        raise InputError(f"suite {str(file)!r}: {_one_line(error)}") from None


def shipped(name: str = "nightly") -> Path:
    """A suite that comes with the package: `nightly`, `quick` or `smollm2`."""
    return Path(__file__).parent / ("nightly.toml" if name == "nightly" else f"nightly_{name}.toml")


def suite_file(spec: str) -> Path:
    """The shipped suite of that name, else the file."""
    return shipped(spec) if spec.isidentifier() and shipped(spec).is_file() else Path(spec)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        owner = Entry if first["loc"][0] == "entries" else Suite
        return f"no key {where!r}; there are {', '.join(owner.model_fields)}"
    return f"{where}: {message}" if where else message
