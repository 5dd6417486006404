"""The distance of two tensors, from three norms: of their difference and of each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Norms(NamedTuple):
    """||a - e||, ||e||, ||a|| of an actual and an expected tensor; every number follows from them.

    A number is None where it is undefined (a norm is zero) or not finite. Two zero tensors agree:
    relative L2 0, cosine 1, norm ratio 1.
    """

    error: float
    expected: float
    actual: float

    @property
    def rel_l2(self) -> float | None:
        """||a - e|| / ||e||."""
        if self.expected == 0:
            return 0.0 if self.error == 0 else None
        return _finite(self.error / self.expected)

    @property
    def norm_ratio(self) -> float | None:
        """||a|| / ||e||."""
        if self.expected == 0:
            return 1.0 if self.actual == 0 else None
        return _finite(self.actual / self.expected)

    @property
    def one_minus_cosine(self) -> float | None:
        """(||a-e||^2 - (||a||-||e||)^2) / (2 ||a|| ||e||): keeps its digits where the cosine is near 1."""
        if self.expected == 0 or self.actual == 0:
            return 0.0 if self.expected == self.actual else None
        gap = self.actual - self.expected
        value = (self.error - gap) / self.expected * ((self.error + gap) / self.actual) / 2
        return min(max(value, 0.0), 2.0) if math.isfinite(value) else None

    @property
    def cosine(self) -> float | None:
        gap = self.one_minus_cosine
        return None if gap is None else 1.0 - gap

    def numbers(self) -> dict[str, float | None]:
        return {
            "rel_l2": self.rel_l2,
            "cosine": self.cosine,
            "one_minus_cosine": self.one_minus_cosine,
            "norm_ratio": self.norm_ratio,
        }


ZERO = Norms(0.0, 0.0, 0.0)
UNUSABLE = Norms(math.nan, math.nan, math.nan)


def distance(actual: Tensor, expected: Tensor) -> Norms:
    """Of two float64 tensors of one shape."""
    return Norms(norm(actual - expected), norm(expected), norm(actual))


def total(members: Iterable[Norms]) -> Norms:
    """The norms of the members concatenated; unusable as soon as one member is, or without any."""
    columns = list(zip(*members, strict=True))
    if not columns or any(math.isnan(value) for column in columns for value in column):
        return UNUSABLE
    return Norms(*(math.hypot(*column) for column in columns))


def norm(t: Tensor) -> float:
    """The L2 norm of a float64 tensor; safe where squares would leave the range of float64."""
    if t.numel() == 0:
        return 0.0
    plain = float(torch.linalg.vector_norm(t))
    if 1e-130 < plain < 1e130:
        return plain
    largest = float(torch.linalg.vector_norm(t, math.inf))
    if largest == 0 or not math.isfinite(largest):
        return largest
    return largest * float(torch.linalg.vector_norm(t / largest))


def promoted(tensor: Tensor) -> Tensor:
    """The values as dense float64 on the CPU; a complex tensor gets a last axis of two."""
    t = tensor.detach()
    if t.layout != torch.strided:
        t = t.to_dense()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return t.cpu().double()


def all_finite(tensor: Tensor) -> bool:
    values = promoted(tensor)
    return math.isfinite(norm(values)) or bool(torch.isfinite(values).all())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
