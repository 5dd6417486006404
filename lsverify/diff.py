"""`lsverify diff`: two files of gradients, tensor by tensor and block by block, whatever their size.

Memory stays at a few blocks: of each tensor only running sums are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from lsverify.errors import InputError
from lsverify.norms import UNUSABLE, Norms, norm, total
from lsverify.report import number
from lsverify.tensor_files import DTYPES, FLOATING, Entry, TensorFiles, open_tensors, shown

# Equal by default: 1e-12 where both are float64, else this many eps of the coarser precision, relative to a tensor's norm.
ORACLE_LIMIT = 1e-12
EPS = 4
ROWS = 10


@dataclass(frozen=True)
class Difference:
    """One tensor of both files: norms of B - A, A and B, the limit, and where the largest error is."""

    name: str
    norms: Norms
    limit: float
    largest: float
    at: int

    @property
    def equal(self) -> bool:
        return self.norms.error <= self.limit * self.norms.expected


@dataclass(frozen=True)
class Diff:
    """Every tensor's difference, the worst first, and that of all together."""

    differences: tuple[Difference, ...]

    @property
    def overall(self) -> Norms:
        return total(each.norms for each in self.differences) if self.differences else UNUSABLE

    @property
    def unequal(self) -> int:
        return sum(not each.equal for each in self.differences)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, at full precision."""
        rows = [
            {
                "name": each.name,
                **each.norms.numbers(),
                "limit": each.limit,
                "largest": each.largest,
                "at": each.at,
                "equal": each.equal,
            }
            for each in self.differences
        ]
        return {"overall": self.overall.numbers(), "tensors": rows}

    def table(self) -> Table:
        """The worst tensors, and below them all together."""
        drawn = Table(show_lines=False, pad_edge=False)
        for header in ("tensor", "rel L2", "cosine", "norm ratio", "limit", "largest error", "at"):
            drawn.add_column(header, overflow="fold")
        for each in self.differences[:ROWS]:
            cells = (each.name, *_numbers(each.norms), number(each.limit))
            last = (number(each.largest), str(each.at))
            drawn.add_row(*(Text(cell) for cell in (*cells, *last)))
        drawn.add_row("all together", *_numbers(self.overall), "", "", "")
        return drawn


def _numbers(norms: Norms) -> tuple[str, str, str]:
    cosine = norms.cosine
    return (
        number(norms.rel_l2),
        "-" if cosine is None else f"{cosine:.9f}",
        number(norms.norm_ratio),
    )


def diff(a: Path, b: Path, limit: float | None = None) -> Diff:
    """Compare two files, indices of shards or folders. Raises `InputError` unless both have the same tensors."""
    if limit is not None and not 0 <= limit < 1:
        raise InputError(f"limit {limit} is not allowed: use 0 or more and less than 1")
    first, second = open_tensors(a), open_tensors(b)
    _require_alike(first, second)
    found = [
        _difference(name, first.entries[name], second.entries[name], limit)
        for name in first.entries
    ]
    found.sort(key=lambda each: (-_severity(each), each.name))
    return Diff(tuple(found))


def _severity(each: Difference) -> float:
    norms = each.norms
    return 0.0 if norms.error == 0 else norms.error / norms.expected if norms.expected else math.inf


def _require_alike(a: TensorFiles, b: TensorFiles) -> None:
    if not a.entries:
        raise InputError(f"{a.path}: has no tensor; give a file of gradients")
    for one, other in ((a, b), (b, a)):
        if missing := sorted(one.entries.keys() - other.entries.keys()):
            raise InputError(
                f"{other.path}: lacks tensor {shown(missing[0])}, one of {len(missing)} that {one.path} has; "
                "write the same names"
            )
    for name, entry in a.entries.items():
        twin = b.entries[name]
        if entry.shape != twin.shape:
            raise InputError(
                f"{b.path}: has {shown(name)} of shape {list(twin.shape)}, {a.path} of {list(entry.shape)}"
            )
        if (entry.dtype in FLOATING) != (twin.dtype in FLOATING):
            raise InputError(
                f"{b.path}: has {shown(name)} in {twin.dtype}, {a.path} in {entry.dtype}; whole numbers and floating ones "
                "are not compared"
            )
        for each in (entry, twin):
            if each.dtype.startswith("F8"):
                raise InputError(
                    f"{each.file}: has {shown(name)} in {each.dtype}, which is not compared"
                )


def _difference(name: str, a: Entry, b: Entry, limit: float | None) -> Difference:
    """Over blocks; a value that is not finite is refused on either side."""
    errors, expected, actual = [], [], []
    largest, at, start = 0.0, 0, 0
    for e, g in _blocks(a, b):
        difference = g - e
        errors.append(norm(difference))
        expected.append(norm(e))
        actual.append(norm(g))
        worst = int(difference.abs().argmax())
        if abs(float(difference[worst])) > largest:
            largest, at = abs(float(difference[worst])), start + worst
        start += len(e)
    norms = Norms(math.hypot(*errors), math.hypot(*expected), math.hypot(*actual))
    return Difference(name, norms, _limit(a, b) if limit is None else limit, largest, at)


def _blocks(a: Entry, b: Entry) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    at = 0
    for blocks in zip(a.blocks(), b.blocks(), strict=True):
        for entry, block in zip((a, b), blocks, strict=True):
            entry.require_finite(block, at)
        at += len(blocks[0])
        yield blocks[0].double(), blocks[1].double()


def _limit(a: Entry, b: Entry) -> float:
    """What rounding alone may make of equal values: nothing where both are whole numbers."""
    dtypes = [DTYPES[each.dtype] for each in (a, b) if each.dtype in FLOATING]
    if not dtypes:
        return 0.0
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return ORACLE_LIMIT if eps == torch.finfo(torch.float64).eps else EPS * eps
