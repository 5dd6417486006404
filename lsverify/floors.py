"""How far rounding alone carries a gradient, and how far the smallest planted state fault does: what limits rest on.

A floor is a tensor's (or a slice's) distance between two computations that are equal by mathematics: at oracle precision
`exact` against full autograd, in a coarser one full autograd in several orders against the oracle.
"""

from __future__ import annotations

import importlib.metadata
import statistics
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from lsverify.alarms import one_layers_state_lost
from lsverify.errors import PrecisionRefused
from lsverify.evidence import CaseConfig
from lsverify.limits import ORACLE_LIMIT, measured_floors
from lsverify.paths import longstraw
from lsverify.precision import threads
from lsverify.referee import CAPS, FACTOR, Claim, Referee, floor_dtype
from lsverify.references import take_gradients
from lsverify.setting import make_setting

DTYPES = ("float64", "float32", "bfloat16-autocast", "bfloat16")


class Floors(BaseModel):
    """One architecture in one precision: least, median, 90% and largest floor over `tensors` tensors and slices.

    limit: the largest that a tensor got. capped: of how many eight times the floor is above the cap. fault: relative L2
    of the gradient without one layer's state term to the whole one, in float64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    dtype: str
    tensors: int
    least: float
    median: float
    ninetieth: float
    largest: float
    limit: float
    capped: int
    fault: float

    @property
    def gap(self) -> float:
        """How many times the median limit the fault is: above 1 it stands out in most tensors."""
        limit = ORACLE_LIMIT if self.dtype == "float64" else min(FACTOR * self.median, self.limit)
        return self.fault / limit


class AllFloors(BaseModel):
    transformers: str = importlib.metadata.version("transformers")
    torch: str = importlib.metadata.version("torch")
    rows: tuple[Floors, ...]


def measure(arch: str, dtypes: Sequence[str], seed: int = 0) -> list[Floors]:
    """The floors of one architecture on its default problem. A precision that the library does not run in is left out."""
    found = []
    for dtype in dtypes:
        case = CaseConfig(
            arch=arch,
            dtype=dtype,
            seed=seed,
            prompt_length=14,
            group_size=2,
            response_lengths=(3, 1, 4),
        )
        try:
            referee = Referee(make_setting(case))
        except PrecisionRefused:
            continue
        with referee.setting.computing(), threads(1):
            found.append(_measured(arch, dtype, referee, _fault(arch, seed)))
    return found


def _fault(arch: str, seed: int) -> float:
    case = CaseConfig(
        arch=arch, seed=seed, prompt_length=14, group_size=2, response_lengths=(3, 1, 4)
    )
    referee = Referee(make_setting(case))
    setting = referee.setting
    with setting.computing(), threads(1):
        take_gradients(setting.model)
        one_layers_state_lost(setting.model, setting.problem, setting.objective)
        compared = referee.compared(_full(referee), take_gradients(setting.model))
    return compared.rel_l2 or 0.0


def _full(referee: Referee) -> Claim:
    return Claim(label="full", policy=None, objective=referee.setting.objective)


def _measured(arch: str, dtype: str, referee: Referee, fault: float) -> Floors:
    setting, full = referee.setting, _full(referee)
    oracle = referee.oracle(full).gradients
    if dtype == "float64":
        take_gradients(setting.model)
        longstraw(setting.model, setting.problem, setting.objective, policy="exact", chunk=8)
        orders = [take_gradients(setting.model)]
        cap = limit = ORACLE_LIMIT
    else:
        orders = [order.gradients for order in referee.orders(full)]
        cap = CAPS[floor_dtype(dtype)]
        limit = max(each.value for each in referee.limits(full).per_tensor.values())
    floors, _ = measured_floors(oracle, *orders, slices=referee.slices)
    sizes = sorted(floors.values())
    factor = 1.0 if dtype == "float64" else FACTOR
    return Floors(
        arch=arch,
        dtype=dtype,
        tensors=len(sizes),
        least=sizes[0],
        median=statistics.median(sizes),
        ninetieth=sizes[int(0.9 * (len(sizes) - 1))],
        largest=sizes[-1],
        limit=limit,
        capped=sum(factor * size > cap for size in sizes),
        fault=fault,
    )


COLUMNS = (
    *("architecture", "precision", "tensors", "least floor", "median", "90%", "largest"),
    *("largest limit", "cut by the cap", "one layer's state lost", "over the limit"),
)


def cells(row: Floors) -> list[str]:
    """A row of the table, as text."""
    sizes = (row.least, row.median, row.ninetieth, row.largest, row.limit)
    return [
        row.arch,
        row.dtype,
        str(row.tensors),
        *(f"{size:.1e}" for size in sizes),
        str(row.capped),
        f"{row.fault:.2g}",
        f"{row.gap:.1e} times" if row.gap >= 1e3 else f"{row.gap:.1f} times",
    ]


def markdown(found: AllFloors, command: str) -> str:
    """`docs/floors.md`."""
    lines = [
        "# Floors and limits",
        "",
        f"Made by `{command}`: torch {found.torch}, transformers {found.transformers}. {__doc__}".rstrip(),
        "",
        "At oracle precision every limit is 1e-12; elsewhere eight times the floor of its tensor, cut by the cap of the precision",
        "(1e-2 and 1e-1). Over the limit: how many times the limit of a median tensor the smallest planted state fault is, the state",
        "term of one layer lost, which differs from the whole gradient by what its column says.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
        *(f"| {' | '.join(cells(row))} |" for row in found.rows),
    ]
    return "\n".join(lines) + "\n"
