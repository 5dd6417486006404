"""What a planted fault is: a wrong path, the rung that must refuse it, and what the refusal must point at."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lsverify.cases import DEFAULT_ARCHS
from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt, RungName
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem

EVERY = DEFAULT_ARCHS
# What the refusals of many faults have in common.
LOSS = r"loss is \S+ instead of"
STEPS = r"after 3 (sgd|adamw) steps"
# Where experts and keys are chosen, a wrong value tells there before it tells in a log-prob.
DECIDED = r"decisions differ, first \S*(indexer|gate|router)|response \d+ token"
Candidate = Callable[[nn.Module, Problem, Objective], StepResult | None]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault: shows one kind of mistake and nothing else.

    path: the broken path, a function on module level, so that `lsverify gate --candidate` can be given it too.
    report: public id of the report whose kind it re-creates, written anew; empty for one that nobody reported.
    rung: the first rung that must refuse it; every rung below holds.
    points_at: regular expression that the rung's text must match: parameters, tokens, or what was done.
    architectures: where the fault can be made, the most telling first.
    options: further fields of `CaseConfig` without which it would not show.
    elsewhere: rung and text by architecture, where they are others: experts and keys tell before log-probs do.
    """

    path: Candidate
    report: str
    rung: RungName
    points_at: str
    architectures: tuple[str, ...] = EVERY
    options: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: Mapping[str, tuple[RungName, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the path's function."""
        return self.path.__name__

    @property
    def kind(self) -> str:
        """The name of the path's module: state, boundary, mask, ..."""
        return self.path.__module__.rpartition(".")[2]

    def expected(self, arch: str) -> tuple[RungName, str]:
        """The rung that must refuse it on this architecture, and what its text must match."""
        return self.elsewhere.get(arch, (self.rung, self.points_at))

    def config(self, arch: str, **fields: Any) -> CaseConfig:
        """The case that must refuse the fault, with the rungs up to the one that does."""
        rung, _ = self.expected(arch)
        given = {"candidate": spec_of(self.path), "require": rung, **fields, **self.options}
        return CaseConfig(arch=arch, **given)

    def missed(self, receipt: CaseReceipt) -> Iterator[str]:
        """What is wrong with a refusal, one line each; nothing when the fault was caught as it must be."""
        expected, points_at = self.expected(receipt.arch)
        rungs = {rung.name: rung for rung in receipt.rungs}
        for name in RUNGS[: RUNGS.index(expected)]:
            if not rungs[name].holds:
                yield f"{name} refused it before {expected}: {rungs[name].detail}"
        last = rungs[expected]
        if receipt.reached or last.holds:
            yield f"{expected} is {last.status}: {last.detail}"
        elif re.search(points_at, last.detail) is None:
            yield f"{expected} does not point at {points_at!r}: {last.detail}"


def spec_of(path: Candidate) -> str:
    """A function on module level as the command line names it: MODULE:NAME."""
    return f"{path.__module__}:{path.__name__}"
