"""False alarms and misses in the precisions that people train in, counted over many runs and all families.

An honest run is LongStraw with the policy that it claims: whatever accuses it is a false alarm; where the reference itself
is further from the oracle than the cap, nobody is accused and nothing is passed, which is counted apart. A faulty one claims the
whole gradient and sends nothing back through the state, of one layer or of all, which can be planted wherever there is a
state: whatever but a failed gradient refuses it, or nothing, is a miss.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, product

import torch
from pydantic import BaseModel, ConfigDict
from rich.table import Table
from torch import nn

from lsverify.errors import PrecisionRefused
from lsverify.evidence import HOLDS, CaseConfig, CaseReceipt
from lsverify.ladder import judge
from lsverify.objective import Objective
from lsverify.paths import StepResult, longstraw
from lsverify.problems import Problem
from lsverify.prompt import capture

DTYPES = ("float32", "bfloat16-autocast", "bfloat16")
POLICIES = ("exact", "detach")
REFUSED = "refused"


class Alarm(BaseModel):
    """One run. `honest` is whether its claim is true; `statuses` are those of the rungs up to `gradient`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    dtype: str
    policy: str
    seed: int
    honest: bool
    reached: bool
    statuses: tuple[str, ...]
    detail: str = ""

    @property
    def wrong(self) -> bool:
        """An honest run that is accused; a faulty one that is not, by `gradient` and by nothing before it.

        What is too coarse accuses no honest run, and catches nothing.
        """
        if self.refused:
            return False
        if self.honest:
            return not self.reached and not self.too_coarse
        return [status for status in self.statuses if status not in HOLDS] != ["failed"]

    @property
    def too_coarse(self) -> bool:
        """Whether the precision cannot tell: the reference itself is further from the oracle than the cap."""
        return set(self.statuses) - HOLDS == {"reference_inconsistent"}

    @property
    def refused(self) -> bool:
        """Whether the library's own code does not run in the precision, which the user is told in one line."""
        return self.statuses == (REFUSED,)


class Tally(BaseModel):
    """All runs, and the versions that they were made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transformers: str
    torch: str
    runs: tuple[Alarm, ...]

    def wrong(self, *, honest: bool) -> list[Alarm]:
        """False alarms, or misses."""
        return [run for run in self.runs if run.honest == honest and run.wrong]

    def table(self) -> Table:
        """By precision: honest runs, and each planted fault; judged wrongly, decided by forced choices, not decided."""
        drawn = Table("precision", "runs", "of", *COUNTED)
        groups: dict[tuple[str, str], list[Alarm]] = {}
        for run in self.runs:
            groups.setdefault((run.dtype, "honest" if run.honest else run.policy), []).append(run)
        for (dtype, what), its in groups.items():
            counts = (
                sum(run.wrong for run in its),
                sum("undecidable" in run.statuses for run in its),
                sum(run.too_coarse for run in its),
                sum(run.refused for run in its),
            )
            drawn.add_row(dtype, str(len(its)), what, *map(str, counts))
        return drawn


COUNTED = ("judged wrongly", "undecidable", "too coarse", "refused")


def one_layers_state_lost(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A planted fault: the sweep of `exact` without the cotangents of the first layer that holds a state."""
    # Of a prompt that is not the problem's, so that no pass over its own is one too many.
    rows = capture(
        model, torch.zeros(2, dtype=torch.long), boundary=2, chunk=2, keep_from=2
    ).inventory()
    layers = sorted({row.layer for row in rows if row.layer is not None and row.kind != "index"})
    kept = ",".join(map(str, layers[1:]))
    policy = f"layers:{kept}" if kept else "detach"
    return replace(longstraw(model, problem, objective, policy=policy, chunk=8), reference="exact")


def whole_state_lost(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A planted fault: no sweep at all by a path that claims `exact`, which is what LongStraw's claim would be."""
    return replace(longstraw(model, problem, objective, policy="detach"), reference="exact")


FAULTY = (one_layers_state_lost, whole_state_lost)


def honest_cases(archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[CaseConfig]:
    """Without end: every precision, architecture and policy before the next seed."""
    for seed in count():
        for dtype, arch, policy in product(dtypes, archs, POLICIES):
            yield _case(arch, dtype, seed, policy=policy)


def faulty_cases(archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[CaseConfig]:
    """Each planted fault on every architecture and precision, once."""
    for dtype, arch, fault in product(dtypes, archs, FAULTY):
        yield _case(arch, dtype, 0, candidate=f"{__name__}:{fault.__name__}")


def _case(
    arch: str, dtype: str, seed: int, *, policy: str | None = None, candidate: str | None = None
) -> CaseConfig:
    return CaseConfig(
        arch=arch,
        dtype=dtype,
        seed=seed,
        policy=policy,
        candidate=candidate,
        prompt_length=14,
        group_size=2,
        response_lengths=(3, 1, 4),
        require="gradient",
    )


def alarm(case: CaseConfig) -> Alarm:
    """Judge one case of either kind; an error of ours is wrong for both: it refuses the honest and catches nothing."""
    what = case.policy or str(case.candidate).rpartition(":")[2]
    try:
        receipt = judge(case)
    except Exception as error:
        return Alarm(
            arch=case.arch,
            dtype=case.dtype,
            policy=what,
            seed=case.seed,
            honest=case.candidate is None,
            reached=False,
            statuses=(REFUSED if isinstance(error, PrecisionRefused) else "error",),
            detail=f"{type(error).__name__}: {error}",
        )
    return Alarm(
        arch=case.arch,
        dtype=case.dtype,
        policy=what,
        seed=case.seed,
        honest=case.candidate is None,
        reached=receipt.reached,
        statuses=tuple(rung.status for rung in receipt.rungs[:4]),
        detail=_refusal(receipt),
    )


def _refusal(receipt: CaseReceipt) -> str:
    return next((f"{r.name}: {r.detail}" for r in receipt.rungs[:4] if not r.holds), "")


def counted(honest: int, archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[Alarm]:
    """`honest` honest runs, then the planted faults everywhere, one by one."""
    yield from map(alarm, islice(honest_cases(archs, dtypes), honest))
    yield from map(alarm, faulty_cases(archs, dtypes))


def tally(runs: Sequence[Alarm]) -> Tally:
    return Tally(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch"),
        runs=tuple(runs),
    )
