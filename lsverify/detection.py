"""The detection matrix: every planted fault on many drawn problems, which rung refused it, and whether it pointed right.

A fault that changes nothing on a problem (no hole to count wrongly, no second sibling to confuse) cannot be caught there. Whether
it does is measured without the ladder: by its loss, log-probs and gradient beside those of an honest path of the same
claim. A problem on which they are equal is not eligible; every other one that ends in a claim reached is a miss.
"""

from __future__ import annotations

import importlib.metadata
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from rich.table import Table
from torch import Tensor, nn

from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt
from lsverify.faults import FAULTS, Fault
from lsverify.faults.honest import HONEST, Sharing, dense
from lsverify.ladder import judge
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.precision import threads
from lsverify.problems import Problem
from lsverify.references import take_gradients
from lsverify.setting import make_setting

# A fault that moves no number by this much, relative, does nothing: a thousand times the limit at oracle precision.
NOTHING = 1e-9
# Prompts around windows and top-k of 8; groups that differ in size; ragged responses.
PROMPTS, GROUPS = range(9, 21), (2, 3, 4)
RESPONSES = ((3, 1), (4, 2, 5), (1, 3, 2), (7, 5, 6), (2, 6))


class Trial(BaseModel):
    """One fault, or honest path, on one problem. `outcome`: caught, elsewhere (another rung), miss, ineligible; or
    passed and alarm for an honest path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: str
    arch: str
    dtype: str
    seed: int
    prompt_length: int
    group_size: int
    response_lengths: tuple[int, ...]
    expected: str
    refused_by: str | None
    outcome: str
    pointed: bool = False
    detail: str = ""


class Matrix(BaseModel):
    """All trials, and what they were made with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transformers: str
    torch: str
    seed: int
    trials: tuple[Trial, ...]

    def of(self, fault: str) -> list[Trial]:
        return [trial for trial in self.trials if trial.fault == fault]

    @property
    def alarms(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.outcome == "alarm"]

    @property
    def misses(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.outcome in ("miss", "elsewhere")]

    def table(self) -> Table:
        """Fault by rung: how often each refused it, of how many eligible problems; and the scores."""
        drawn = Table(
            "fault", "must refuse", "problems", "eligible", *RUNGS[1:], "caught", "pointed"
        )
        for fault in dict.fromkeys(trial.fault for trial in self.trials):
            its = self.of(fault)
            eligible = [t for t in its if t.outcome in ("caught", "elsewhere", "miss")]
            if its[0].outcome in ("passed", "alarm"):
                continue
            by_rung = [sum(t.refused_by == rung for t in eligible) for rung in RUNGS[1:]]
            cells = [its[0].expected, len(its), len(eligible), *(count or "" for count in by_rung)]
            scores = [
                _share(sum(t.outcome == "caught" for t in eligible), len(eligible)),
                _share(sum(t.pointed for t in eligible), len(eligible)),
            ]
            drawn.add_row(fault, *map(str, cells), *scores)
        return drawn

    def summary(self) -> str:
        """One line: caught, pointed at the right place, false alarms."""
        eligible = [t for t in self.trials if t.outcome in ("caught", "elsewhere", "miss")]
        honest = [t for t in self.trials if t.outcome in ("passed", "alarm")]
        caught = sum(t.outcome == "caught" for t in eligible)
        return (
            f"{len({t.fault for t in eligible})} faults on {len(eligible)} eligible problems: "
            f"{_share(caught, len(eligible))} caught by the rung that must, "
            f"{_share(sum(t.pointed for t in eligible), len(eligible))} pointed at the right place; "
            f"{len(self.alarms)} false alarms in {len(honest)} honest runs"
        )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g}%" if whole else "-"


def cases(
    faults: Sequence[Fault], problems: int, *, dtype: str = "float64", seed: int = 0
) -> Iterator[tuple[str, CaseConfig]]:
    """(name, case) for each fault on `problems` drawn problems, in an order in which neighbours share references.

    A problem is drawn by its number alone, so faults of one architecture and objective meet the same ones. Honest paths
    run on all of them.
    """
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        for arch in fault.architectures:
            groups.setdefault((arch, repr(sorted(fault.options.items()))), []).append(fault)
    for number in range(problems):
        for (arch, _), members in groups.items():
            drawn = {"dtype": dtype, **_drawn(number, seed)}
            for fault in members:
                # Each fault meets `problems` problems in all, its architectures in turn.
                if fault.architectures[number % len(fault.architectures)] == arch:
                    yield fault.name, fault.config(arch, **drawn)
            if not members[0].options:
                name = HONEST[number % len(HONEST)]
                candidate = f"lsverify.faults.honest:{name}"
                yield name, CaseConfig(arch=arch, candidate=candidate, **drawn)


def _drawn(number: int, seed: int) -> dict[str, Any]:
    draw = random.Random(f"{seed} {number}")
    return {
        "prompt_length": draw.choice(PROMPTS),
        "group_size": draw.choice(GROUPS),
        "response_lengths": draw.choice(RESPONSES),
        "seed": seed + number,
        "training": draw.random() < 0.5,
        "chunk": draw.choice((4, 8, 64)),
    }


def tried(name: str, case: CaseConfig) -> Trial:
    """Judge one case and say what came of it."""
    receipt = judge(case)
    refused = next((r.name for r in receipt.rungs if not r.holds and r.status != "not_run"), None)
    if receipt.reached:
        refused = None
    fault = FAULTS.get(name)
    made: dict[str, Any] = {
        "fault": name,
        "arch": case.arch,
        "dtype": case.dtype,
        "seed": case.seed,
        "prompt_length": case.prompt_length,
        "group_size": case.group_size,
        "response_lengths": case.response_lengths,
        "refused_by": refused,
    }
    if fault is None:
        outcome = "alarm" if refused else "passed"
        return Trial(**made, expected="", outcome=outcome, detail=_said(receipt, refused))
    expected, _ = fault.expected(case.arch)
    missed = list(fault.missed(receipt))
    if refused is None:
        outcome = "miss" if effect(fault, case) > NOTHING else "ineligible"
    else:
        outcome = "caught" if refused == expected else "elsewhere"
    detail = "; ".join(missed)[:500]
    return Trial(**made, expected=expected, outcome=outcome, pointed=not missed, detail=detail)


def _said(receipt: CaseReceipt, rung: str | None) -> str:
    return next((r.detail[:500] for r in receipt.rungs if r.name == rung), "")


def effect(fault: Fault, case: CaseConfig) -> float:
    """The largest relative difference that the fault makes to loss, log-probs or any gradient; inf where it breaks.

    Faults of the optimizer's step are held to have one: their steps are compared by nothing else.
    """
    if fault.rung in ("execution", "optimizer_delta"):
        return math.inf
    setting = make_setting(case.model_copy(update={"candidate": None, "policy": None}))
    with setting.computing(), threads(1):
        step = setting.model, setting.problem, setting.objective
        try:
            wrong = _ran(fault.path, *step)
        except Exception:
            return math.inf
        honest = Sharing(claim=wrong[0]) if wrong[0] in ("exact", "detach") else dense
        right = _ran(honest, *step)
    return max((_apart(w, r) for w, r in zip(wrong[1], right[1], strict=True)), default=math.inf)


def _ran(
    path: Any, model: nn.Module, problem: Problem, objective: Objective
) -> tuple[str | None, list[Tensor | float | None]]:
    take_gradients(model)
    result: StepResult = path(model, problem, objective)
    gradients = take_gradients(model)
    return result.reference, [result.loss, *gradients.values()]


def _apart(left: Tensor | float | None, right: Tensor | float | None) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    if isinstance(left, float) or isinstance(right, float):
        return abs(float(left) - float(right)) / (abs(float(right)) or 1.0)
    size = float(right.norm())
    found = float((left - right).norm()) / (size or 1.0)
    return found if math.isfinite(found) else math.inf


def matrix(trials: Iterable[Trial], seed: int) -> Matrix:
    return Matrix(
        transformers=importlib.metadata.version("transformers"),
        torch=importlib.metadata.version("torch"),
        seed=seed,
        trials=tuple(trials),
    )
