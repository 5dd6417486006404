"""The detection matrix: every planted fault on many drawn problems, which rung refused it, and whether it pointed right.

A fault that changes nothing on a problem (no hole to count wrongly, no second sibling to confuse) cannot be caught there. Whether
it does is measured without the ladder: by its loss and gradient, or by the weights after three steps, beside those of an
honest path of the same claim. A problem on which they are equal is not eligible; every other one that ends in a claim reached is a miss.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from lsverify.evidence import CaseConfig, CaseReceipt
from lsverify.faults import FAULTS, Fault
from lsverify.faults.honest import HONEST, Sharing, dense
from lsverify.ladder import judge
from lsverify.objective import Objective
from lsverify.observe import restore, weights_of
from lsverify.optimizers import PROBES, TorchStep
from lsverify.paths import StepResult, Update
from lsverify.precision import threads
from lsverify.problems import Problem
from lsverify.references import Gradients, take_gradients
from lsverify.setting import Setting, make_setting

# A fault that moves no number by this much, relative, does nothing: a thousand times the limit at oracle precision, and
# in float32 some hundred roundings, of a tensor or of this share of the whole gradient.
NOTHING = {"float64": 1e-9, "float32": 1e-5}
SHARE_OF_ALL = {"float64": 0.0, "float32": 1e-3}
# Prompts around windows and top-k of 8; groups that differ in size; ragged responses.
PROMPTS, GROUPS = range(9, 21), (2, 2, 3, 4)
RESPONSES = ((3, 1), (4, 2, 5), (1, 3, 2), (7, 5, 6), (2, 6))


class Trial(BaseModel):
    """One fault, or honest path, on one problem. `outcome`: caught, elsewhere (another rung), miss, ineligible; or
    passed and alarm for an honest path. `number` draws the problem; `size` is the relative L2 of the path's gradient to
    that of its claim."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fault: str
    arch: str
    dtype: str
    number: int
    prompt_length: int
    group_size: int
    response_lengths: tuple[int, ...]
    expected: str
    refused_by: str | None
    outcome: str
    pointed: bool = False
    size: float | None = None
    detail: str = ""

    @property
    def honest(self) -> bool:
        return self.outcome in ("passed", "alarm")

    @property
    def eligible(self) -> bool:
        return self.outcome in ("caught", "elsewhere", "miss")


Case = tuple[str, int, CaseConfig]


def cases(
    faults: Sequence[Fault], numbers: Iterable[int], *, dtype: str = "float64"
) -> Iterator[Case]:
    """(name, number, case) for each fault on the problems of these numbers, neighbours sharing references.

    A problem is drawn by its number alone, so faults of one architecture and objective meet the same ones. Honest paths
    run on all of them.
    """
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in faults:
        for arch in fault.architectures:
            groups.setdefault((arch, repr(sorted(fault.options.items()))), []).append(fault)
    for number in numbers:
        for (arch, _), members in groups.items():
            drawn = {"dtype": dtype, **_drawn(number)}
            # Each fault meets every number once, its architectures in turn.
            its = [f for f in members if f.architectures[number % len(f.architectures)] == arch]
            for fault in its:
                yield fault.name, number, fault.config(arch, **drawn)
            if its and not members[0].options:
                name = HONEST[number % len(HONEST)]
                candidate = f"lsverify.faults.honest:{name}"
                yield name, number, CaseConfig(arch=arch, candidate=candidate, **drawn)


def _drawn(number: int) -> dict[str, Any]:
    draw = random.Random(f"0 {number}")
    return {
        "prompt_length": draw.choice(PROMPTS),
        "group_size": draw.choice(GROUPS),
        "response_lengths": draw.choice(RESPONSES),
        "seed": number,
        "training": draw.random() < 0.5,
        "chunk": draw.choice((4, 8, 64)),
    }


def tried(name: str, number: int, case: CaseConfig) -> Trial:
    """Judge one case and say what came of it."""
    receipt = judge(case, brief=True)
    refused = next((r.name for r in receipt.rungs if not r.holds and r.status != "not_run"), None)
    if receipt.reached:
        refused = None
    fault = FAULTS.get(name)
    made: dict[str, Any] = {
        "fault": name,
        "arch": case.arch,
        "dtype": case.dtype,
        "number": number,
        "prompt_length": case.prompt_length,
        "group_size": case.group_size,
        "response_lengths": case.response_lengths,
        "refused_by": refused,
        "size": receipt.gradient.rel_l2 if receipt.gradient else None,
    }
    if fault is None:
        outcome = "alarm" if refused else "passed"
        return Trial(**made, expected="", outcome=outcome, detail=_said(receipt, refused))
    expected, _ = fault.expected(case.arch)
    missed = list(fault.missed(receipt))
    if refused is None:
        outcome = "miss" if effect(fault, case) > NOTHING[case.dtype] else "ineligible"
    else:
        outcome = "caught" if refused == expected else "elsewhere"
    detail = "; ".join(missed)[:500]
    return Trial(**made, expected=expected, outcome=outcome, pointed=not missed, detail=detail)


def _said(receipt: CaseReceipt, rung: str | None) -> str:
    return next((r.detail[:500] for r in receipt.rungs if r.name == rung), "")


def effect(fault: Fault, case: CaseConfig) -> float:
    """The largest relative difference that the fault makes to the loss, a gradient or a change of weights; inf where it breaks.

    Faults of `execution` are held to have one: what they leave behind is compared by nothing else.
    """
    if fault.rung == "execution":
        return math.inf
    setting = make_setting(case.model_copy(update={"candidate": None, "policy": None}))
    with setting.computing(), threads(1):
        step = setting.model, setting.problem, setting.objective
        try:
            wrong, left = _ran(fault.path, *step)
            if fault.rung == "optimizer_delta":
                left = _trained(fault.path, setting, wrong.update)
        except Exception:
            return math.inf
        honest = Sharing(claim=wrong.reference) if wrong.reference in ("exact", "detach") else dense
        right, expected = _ran(honest, *step)
        if fault.rung == "optimizer_delta":
            expected = _trained(honest, setting, wrong.update)
    whole = math.hypot(*(float(g.norm()) for g in expected.values() if g is not None))
    floor = SHARE_OF_ALL[case.dtype] * whole
    apart = [_apart(left[name], expected[name], floor) for name in expected]
    return max(*apart, abs(wrong.loss - right.loss) / (abs(right.loss) or 1.0))


def _trained(path: Any, setting: Setting, update: Update | None) -> Gradients:
    """The change of the weights over the first problem twice and the second, by the update that the fault declares, or SGD.

    A path that declares one is a class, as its optimizer keeps something, and steps itself; others are stepped.
    """
    model, before = setting.model, weights_of(setting.model)
    path = path() if isinstance(path, type) else path
    try:
        stepper = TorchStep(model, update or PROBES[0])
        for problem in (setting.problem, setting.problem, setting.second):
            take_gradients(model)
            result = path(model, copy.deepcopy(problem), setting.objective)
            if result is None or result.update is None:
                stepper.step()
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        return {name: p.detach() - before[name] for name, p in trained}
    finally:
        take_gradients(model)
        restore(model, before)


def _ran(
    path: Any, model: nn.Module, problem: Problem, objective: Objective
) -> tuple[StepResult, Gradients]:
    take_gradients(model)
    result: StepResult = path(model, problem, objective)
    return result, take_gradients(model)


def _apart(left: Tensor | None, right: Tensor | None, floor: float) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf
    found = float((left - right).norm()) / (max(float(right.norm()), floor) or 1.0)
    return found if math.isfinite(found) else math.inf
