"""False alarms and misses in the precisions that people train in, counted over many runs and all families.

An honest run is LongStraw with the policy that it claims: whatever accuses it is a false alarm; where the reference itself
is further from the oracle than the cap, nobody is accused and nothing is passed, which is counted apart. A faulty one claims the
whole gradient and sends nothing back through the state of one layer, which can be planted wherever there is a state:
whatever passes it is a miss.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count, islice, product

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
LOST = "exact without one layer's state"


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
        """An honest run that is accused; a faulty one that anything but a failed `gradient` refuses, or nothing."""
        if self.refused:
            return False
        if self.honest:
            return not self.reached and not self.too_coarse
        return not (len(self.statuses) == 4 and self.statuses[3] == "failed")

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
        """By precision and kind: how many runs, how many judged wrongly, decided by forced choices, not decided at all."""
        drawn = Table(
            "precision", "runs", "of them", "judged wrongly", "undecidable", "too coarse", "refused"
        )
        for dtype, honest in product(dict.fromkeys(run.dtype for run in self.runs), (True, False)):
            its = [run for run in self.runs if (run.dtype, run.honest) == (dtype, honest)]
            cells = (
                len(its),
                "honest" if honest else "faulty",
                sum(run.wrong for run in its),
                sum("undecidable" in run.statuses for run in its),
                sum(run.too_coarse for run in its),
                sum(run.refused for run in its),
            )
            drawn.add_row(dtype, *map(str, cells))
        return drawn


def one_layers_state_lost(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The planted fault: the sweep of `exact` without the cotangents of the first layer that holds a state."""
    prompt = max((group.prompt for group in problem.groups), key=len)
    boundary = len(prompt) - 1
    rows = capture(model, prompt, boundary=boundary, chunk=boundary, keep_from=boundary).inventory()
    layers = sorted({row.layer for row in rows if row.layer is not None and row.kind != "index"})
    kept = ",".join(map(str, layers[1:]))
    policy = f"layers:{kept}" if kept else "detach"
    return replace(longstraw(model, problem, objective, policy=policy, chunk=8), reference="exact")


def honest_cases(archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[CaseConfig]:
    """Without end: every precision, architecture and policy before the next seed."""
    for seed in count():
        for dtype, arch, policy in product(dtypes, archs, POLICIES):
            yield _case(arch, dtype, seed, policy=policy)


def faulty_cases(archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[CaseConfig]:
    """The planted fault on every architecture and precision, once."""
    for dtype, arch in product(dtypes, archs):
        yield _case(arch, dtype, 0, candidate=f"{__name__}:one_layers_state_lost")


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
    try:
        receipt = judge(case)
    except Exception as error:
        return Alarm(
            arch=case.arch,
            dtype=case.dtype,
            policy=case.policy or LOST,
            seed=case.seed,
            honest=case.candidate is None,
            reached=False,
            statuses=(REFUSED if isinstance(error, PrecisionRefused) else "error",),
            detail=f"{type(error).__name__}: {error}",
        )
    return Alarm(
        arch=case.arch,
        dtype=case.dtype,
        policy=case.policy or LOST,
        seed=case.seed,
        honest=case.candidate is None,
        reached=receipt.reached,
        statuses=tuple(rung.status for rung in receipt.rungs[:4]),
        detail=_refusal(receipt),
    )


def _refusal(receipt: CaseReceipt) -> str:
    return next((f"{r.name}: {r.detail}" for r in receipt.rungs[:4] if not r.holds), "")


def counted(honest: int, archs: Sequence[str], dtypes: Sequence[str]) -> Iterator[Alarm]:
    """`honest` honest runs, then the planted fault everywhere, one by one."""
    yield from map(alarm, islice(honest_cases(archs, dtypes), honest))
    yield from map(alarm, faulty_cases(archs, dtypes))


def tally(runs: Sequence[Alarm]) -> Tally:
    return Tally(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch"),
        runs=tuple(runs),
    )
