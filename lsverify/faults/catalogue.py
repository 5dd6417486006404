"""What a planted fault is: a wrong path, the rung that must refuse it, and what the refusal must point at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt
from lsverify.models import TINY
from lsverify.paths import Path

EVERY = tuple(TINY)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault, built to show a kind of mistake and nothing else.

    path: the broken path, a function on module level, so that `lsverify gate --candidate` can be given it too.
    report: the public reports it re-creates the kind of, by their ids in docs/faults.md; empty for one of our own.
    rung: the first rung that must refuse it; every rung below holds.
    points_at: regular expression that the rung's text must match: parameters, tokens or what was done.
    architectures: where the fault can be made, the most telling first.
    options: further fields of `CaseConfig` that it needs in order to show.
    """

    name: str
    kind: str
    report: str
    path: Path
    rung: str
    points_at: str
    architectures: tuple[str, ...] = EVERY
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def candidate(self) -> str:
        """The path as the command line names it: MODULE:NAME."""
        return candidate(self.path)

    def config(self, arch: str, **fields: Any) -> CaseConfig:
        """The case that must refuse the fault, with the rungs up to the one that does."""
        given = {"candidate": self.candidate, "require": self.rung, **self.options, **fields}
        return CaseConfig(arch=arch, **given)

    def missed(self, receipt: CaseReceipt) -> Iterator[str]:
        """What is wrong with a refusal, one line each; nothing when the fault was caught as it must be."""
        if receipt.reached:
            yield f"{self.name} reached its claim on {receipt.arch}"
            return
        rungs = {rung.name: rung for rung in receipt.rungs}
        below = RUNGS[: RUNGS.index(self.rung)]
        early = [rungs[name] for name in below if not rungs[name].holds]
        if early:
            yield f"{early[0].name} refused it before {self.rung}: {early[0].detail}"
        if rungs[self.rung].holds:
            yield f"{self.rung} holds: {rungs[self.rung].detail}"
        elif re.search(self.points_at, rungs[self.rung].detail) is None:
            yield f"{self.rung} does not point at {self.points_at!r}: {rungs[self.rung].detail}"


def candidate(path: Any) -> str:
    """A function on module level as MODULE:NAME."""
    return f"{path.__module__}:{path.__qualname__}"


def planted(
    report: str, *, rung: str, points_at: str, **fields: Any
) -> Callable[[Path], Fault]:
    raise NotImplementedError
