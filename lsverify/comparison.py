"""What a comparison says: findings of structure, results of tensors and slices, the whole."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lsverify.attribution import hints
from lsverify.limits import key_of
from lsverify.norms import Norms

Verdict = Literal["proven", "proven_zero", "failed", "vacuous", "reference_inconsistent"]


@dataclass(frozen=True)
class Finding:
    """One difference of structure. kind: missing, extra, no_gradient, unexpected_gradient, shape,
    dtype, non_finite, reference_non_finite."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Worst:
    """The largest error of a tensor, at `index` of the whole tensor."""

    index: tuple[int, ...]
    expected: float
    actual: float
    difference: float


@dataclass(frozen=True, kw_only=True)
class TensorResult:
    """One tensor, or one slice of it. verdict: match, mismatch, below_floor, zero, empty.

    `zero`: both sides exactly zero. `share_over`: of a mismatch, the share of elements whose error
    is above allowance / sqrt(elements). `native_error`: the distance to the reference in the case's own precision, where
    that may stand in for the oracle.
    """

    name: str
    slice: str | None
    layer: int | None
    kind: str
    shape: tuple[int, ...]
    elements: int
    rel_l2: float | None
    cosine: float | None
    one_minus_cosine: float | None
    norm_ratio: float | None
    error_norm: float
    expected_norm: float
    actual_norm: float
    allowance: float
    limit: float
    limit_source: str
    verdict: str
    worst: Worst | None
    share_over: float | None
    native_error: float | None = None
    parts: tuple[TensorResult, ...] = ()

    @property
    def key(self) -> str:
        return key_of(self.name, self.slice)

    @property
    def norms(self) -> Norms:
        return Norms(self.error_norm, self.expected_norm, self.actual_norm)

    @property
    def leaves(self) -> tuple[TensorResult, ...]:
        """The slices; the tensor itself where it has none, or where it differs and they do not."""
        blamed = self.verdict != "mismatch" or any(p.verdict == "mismatch" for p in self.parts)
        return self.parts if self.parts and blamed else (self,)

    @property
    def severity(self) -> float:
        """Error over allowance, above 1 of a mismatch."""
        if self.error_norm == 0:
            return 0.0
        return self.error_norm / self.allowance if self.allowance else math.inf


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`.

    status: proven, proven_zero, failed, vacuous, reference_inconsistent.
    rel_l2, cosine, one_minus_cosine, norm_ratio: over all parameters concatenated, an absent
        gradient counted as zero; None where undefined or where a tensor could not be compared.
    worst_parameter, worst_slice, worst_rel_l2: the largest error relative to its own allowance.
    tensors: worst first. counts: tensors by verdict; slice_counts: slices by verdict.
    unverified: names about which nothing was shown (no gradient on either side, or below the floor).
    per_layer, per_kind: the same four numbers over each group; a fused tensor counts slice by slice per kind.
    paper_gate: LongStraw's own gate, cosine >= 0.999 and relative L2 <= 0.01 over all parameters.
    rolled_rel_l2: on a failure, the candidate's distance to the reference rolled by one element.
    """

    status: Verdict
    rel_l2: float | None
    cosine: float | None
    one_minus_cosine: float | None
    norm_ratio: float | None
    worst_parameter: str | None
    worst_slice: str | None
    worst_rel_l2: float | None
    paper_gate: bool
    reference_norm: float
    elements: int
    counts: dict[str, int]
    slice_counts: dict[str, int]
    findings: tuple[Finding, ...]
    tensors: tuple[TensorResult, ...]
    unverified: tuple[str, ...]
    per_layer: dict[int, dict[str, float | None]]
    per_kind: dict[str, dict[str, float | None]]
    rolled_rel_l2: float | None
    limit: float
    limit_source: str
    relative_floor: float
    cap: float | None
    inconsistent: dict[str, float]

    @property
    def passed(self) -> bool:
        return self.status in ("proven", "proven_zero")

    @property
    def hints(self) -> list[str]:
        return hints(self)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, floats at full precision; a number that is not finite becomes None."""
        plain: dict[str, Any] = _json(asdict(self))
        return {**plain, "passed": self.passed, "hints": self.hints}


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
