"""Compares two mappings of gradients: structure first, then values, then where the error sits.

`expected` is always the reference, because every limit is relative to it. A tensor passes when its
error is shown to be small: finite, over more than zero elements, and

    ||actual - expected|| <= limit * max(||expected||, relative_floor * ||all expected||)

(in a precision too coarse for that, `expected` may be the reference in the same precision: see `Limits.native`).
The second term is the absolute floor: a tensor whose true gradient is zero holds only rounding noise,
whose size follows the gradient it was cancelled from, not its own norm. Where the allowance reaches
the tensor's own norm a pass proves nothing, and the tensor is counted as `below_floor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsverify.attribution import kind_of, layer_of, message
from lsverify.comparison import Comparison, Finding, TensorResult, Verdict, Worst
from lsverify.errors import InputError
from lsverify.limits import Gradients, Limits, Slices, key_of, measured_limits
from lsverify.norms import UNUSABLE, ZERO, Norms, all_finite, distance, norm, promoted, total

if TYPE_CHECKING:
    from lsverify.slices import Slice

__all__ = ["Comparison", "Finding", "Limits", "compare", "measured_limits", "message", "rolled"]

PAPER_COSINE, PAPER_REL_L2 = 0.999, 0.01


def compare(
    expected: Gradients, actual: Gradients, *, limits: Limits, slices: Slices | None = None
) -> Comparison:
    """Compare a candidate's gradients with the reference's; whatever they hold is a result, not an error.

    expected, actual: parameter name -> gradient of any shape and dtype, or None. None and zero differ.
    limits: see `Limits`.
    slices: parameter name -> parts that partition it (see `fused_slices`).
    Raises InputError when the slices of a tensor do not cover it.
    """
    slices = slices or {}
    findings, apart, pairs = _structure(expected, actual)
    reference_norm = math.hypot(*map(_reference_norm, expected.values()))
    floor = limits.relative_floor * reference_norm
    tensors = [
        _judged(name, e, a, limits, floor, slices.get(name, ())) for name, (e, a) in pairs.items()
    ]
    tensors.sort(key=lambda t: (-_rank(t), t.name))
    norms = {t.name: t.norms for t in tensors} | apart
    compared = any(t.elements for t in tensors) or any(n != ZERO for n in apart.values())
    overall = total(norms.values()) if compared else UNUSABLE
    status = _status(findings, tensors, limits)
    worst_parameter, worst_slice, worst_rel_l2 = _blamed(findings, tensors, norms)
    return Comparison(
        status=status,
        rel_l2=overall.rel_l2,
        cosine=overall.cosine,
        one_minus_cosine=overall.one_minus_cosine,
        norm_ratio=overall.norm_ratio,
        worst_parameter=worst_parameter,
        worst_slice=worst_slice,
        worst_rel_l2=worst_rel_l2,
        paper_gate=_paper_gate(overall),
        reference_norm=reference_norm,
        elements=sum(t.elements for t in tensors),
        counts=_counts(tensors),
        slice_counts=_counts(part for t in tensors for part in t.parts),
        findings=tuple(findings),
        tensors=tuple(tensors),
        unverified=_unverified(expected, actual, tensors),
        per_layer=_per_layer(norms),
        per_kind=_per_kind(norms, tensors),
        rolled_rel_l2=_rolled_rel_l2(pairs) if status == "failed" else None,
        limit=limits.relative,
        limit_source=limits.source,
        relative_floor=limits.relative_floor,
        cap=limits.cap,
        inconsistent=_unresolved(tensors, limits),
    )


def rolled(expected: Gradients) -> dict[str, Tensor | None]:
    """The negative control: every tensor flattened and rolled by one element."""
    return {
        name: None if e is None else torch.roll(e.flatten(), 1).view(e.shape)
        for name, e in expected.items()
    }


def _structure(
    expected: Gradients, actual: Gradients
) -> tuple[list[Finding], dict[str, Norms], dict[str, tuple[Tensor, Tensor]]]:
    """Findings; the norms of what cannot be compared by value; the tensors that can."""
    findings: list[Finding] = []
    apart: dict[str, Norms] = {}
    pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def found(name: str, kind: str, detail: str, norms: Norms) -> None:
        findings.append(Finding(name, kind, detail))
        apart[name] = norms

    for name, e in expected.items():
        if name not in actual:
            found(name, "missing", "missing: the reference has it", _alone(e, is_reference=True))
            continue
        a = actual[name]
        if e is None and a is None:
            continue
        if a is None:
            detail = "no gradient (None) where the reference has one"
            found(name, "no_gradient", detail, _alone(e, is_reference=True))
        elif e is None:
            size = "an exactly zero" if not bool(promoted(a).any()) else "a"
            detail = f"{size} gradient where the reference has none (None)"
            found(name, "unexpected_gradient", detail, _alone(a, is_reference=False))
        elif e.shape != a.shape:
            found(name, "shape", f"shape {tuple(a.shape)}, expected {tuple(e.shape)}", UNUSABLE)
        elif _dtype_class(e) != _dtype_class(a):
            found(name, "dtype", f"dtype {a.dtype}, expected like {e.dtype}", UNUSABLE)
        elif not all_finite(e):
            found(name, "reference_non_finite", f"reference: {_non_finite(e)}", UNUSABLE)
        elif not all_finite(a):
            found(name, "non_finite", _non_finite(a), UNUSABLE)
        else:
            pairs[name] = (e, a)
    for name in actual:
        if name not in expected:
            detail = "extra: the reference does not know it"
            found(name, "extra", detail, _alone(actual[name], is_reference=False))
    return findings, apart, pairs


def _judged(
    name: str,
    expected: Tensor,
    actual: Tensor,
    limits: Limits,
    floor: float,
    slices: Sequence[Slice],
) -> TensorResult:
    e, a = promoted(expected), promoted(actual)
    whole = _result(name, None, e, a, limits, floor)
    parts = [_result(name, part, e, a, limits, floor) for part in slices]
    covered = sum(part.elements for part in parts)
    if parts and covered != whole.elements:
        raise InputError(
            f"the slices of {name} cover {covered} of its {whole.elements} elements: "
            "give slices that partition the tensor"
        )
    verdict = "mismatch" if any(p.verdict == "mismatch" for p in parts) else whole.verdict
    return replace(whole, verdict=verdict, parts=tuple(parts))


def _result(
    name: str, part: Slice | None, e: Tensor, a: Tensor, limits: Limits, floor: float
) -> TensorResult:
    label = part.label if part else None
    limit = limits.of(name, label)
    pe, pa = (e[part.index], a[part.index]) if part else (e, a)
    difference = pa - pe
    norms = Norms(norm(difference), norm(pe), norm(pa))
    allowance = limit.value * max(norms.expected, floor)
    beside = _beside_native(name, part, pa, limits)
    verdict = _verdict(pe.numel(), norms, allowance, beside)
    worst = share = None
    if pe.numel():
        at = int(difference.abs().argmax())
        expected, actual = float(pe.flatten()[at]), float(pa.flatten()[at])
        worst = Worst(_index_in_whole(at, pe, e, part), expected, actual, actual - expected)
    if verdict == "mismatch":
        share = float((difference.abs() > allowance / math.sqrt(pe.numel())).double().mean())
    return TensorResult(
        name=name,
        slice=label,
        layer=layer_of(name),
        kind=kind_of(name, label),
        shape=tuple(pe.shape),
        elements=pe.numel(),
        rel_l2=norms.rel_l2,
        cosine=norms.cosine,
        one_minus_cosine=norms.one_minus_cosine,
        norm_ratio=norms.norm_ratio,
        error_norm=norms.error,
        expected_norm=norms.expected,
        actual_norm=norms.actual,
        allowance=allowance,
        limit=limit.value,
        limit_source=limit.source,
        verdict=verdict,
        worst=worst,
        share_over=share,
        native_error=beside,
    )


def _beside_native(name: str, part: Slice | None, actual: Tensor, limits: Limits) -> float | None:
    """The distance to the reference in the case's own precision, where that may stand in for the oracle."""
    native = limits.native.get(name)
    if native is None or key_of(name, part.label if part else None) not in limits.noise:
        return None
    narrow = promoted(native)
    narrow = narrow[part.index] if part else narrow
    return norm(actual - narrow) if narrow.shape == actual.shape else None


def _verdict(elements: int, norms: Norms, allowance: float, beside: float | None) -> str:
    if elements == 0:
        return "empty"
    if norms.expected == 0 and norms.actual == 0:
        return "zero"
    error = norms.error if beside is None else min(norms.error, beside)
    if not (math.isfinite(error) and error <= allowance):
        return "mismatch"
    return "match" if allowance < norms.expected else "below_floor"


def _status(findings: list[Finding], tensors: list[TensorResult], limits: Limits) -> Verdict:
    differing = [leaf for t in tensors for leaf in t.leaves if leaf.verdict == "mismatch"]
    if any(f.kind != "reference_non_finite" for f in findings):
        return "failed"
    if any(not _noise(leaf, limits) for leaf in differing):
        return "failed"
    if findings or differing or _unresolved(tensors, limits):
        return "reference_inconsistent"
    verdicts = {t.verdict for t in tensors} - {"empty"}
    if verdicts == {"zero"}:
        return "proven_zero"
    return "proven" if "match" in verdicts else "vacuous"


def _noise(leaf: TensorResult, limits: Limits) -> bool:
    """Whether an error above the cap is one that the precision makes by itself."""
    return leaf.severity * leaf.limit <= limits.noise.get(leaf.key, 0.0)


def _unresolved(tensors: Iterable[TensorResult], limits: Limits) -> dict[str, float]:
    """What the oracle cannot judge, as its floor is above the cap, and the reference in the same precision did not settle."""
    settled = {
        each.key
        for tensor in tensors
        for each in (tensor, *tensor.parts)
        if each.native_error is not None and each.native_error <= each.allowance
    }
    return {key: floor for key, floor in limits.inconsistent.items() if key not in settled}


def _blamed(
    findings: list[Finding], tensors: list[TensorResult], norms: Mapping[str, Norms]
) -> tuple[str | None, str | None, float | None]:
    if findings:
        return findings[0].name, None, norms[findings[0].name].rel_l2
    judged = [r for t in tensors for r in (t, *t.parts) if r.verdict in ("match", "mismatch")]
    if not judged:
        return None, None, None
    worst = max(judged, key=lambda r: (r.severity, r.slice is not None))
    return worst.name, worst.slice, worst.rel_l2


def _rank(tensor: TensorResult) -> float:
    judged = [r for r in (tensor, *tensor.parts) if r.verdict in ("match", "mismatch")]
    return max((r.severity for r in judged), default=-1.0)


def _unverified(
    expected: Gradients, actual: Gradients, tensors: list[TensorResult]
) -> tuple[str, ...]:
    silent = [n for n, e in expected.items() if e is None and actual.get(n, e) is None]
    return (*silent, *(t.name for t in tensors if t.verdict in ("below_floor", "empty")))


def _per_layer(norms: Mapping[str, Norms]) -> dict[int, dict[str, float | None]]:
    groups: dict[int, list[Norms]] = {}
    for name, value in norms.items():
        if (layer := layer_of(name)) is not None:
            groups.setdefault(layer, []).append(value)
    return {layer: total(groups[layer]).numbers() for layer in sorted(groups)}


def _per_kind(
    norms: Mapping[str, Norms], tensors: list[TensorResult]
) -> dict[str, dict[str, float | None]]:
    groups: dict[str, list[Norms]] = {}
    fused = {t.name: t.parts for t in tensors if t.parts}
    for name, value in norms.items():
        for part in fused.get(name, ()):
            groups.setdefault(part.kind, []).append(part.norms)
        if name not in fused:
            groups.setdefault(kind_of(name), []).append(value)
    return {kind: total(groups[kind]).numbers() for kind in sorted(groups)}


def _rolled_rel_l2(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> float | None:
    members = []
    for e, a in pairs.values():
        (turned,) = rolled({"": promoted(e)}).values()
        assert turned is not None
        members.append(distance(promoted(a), turned))
    return total(members).rel_l2


def _reference_norm(tensor: Tensor | None) -> float:
    value = 0.0 if tensor is None else norm(promoted(tensor))
    return value if math.isfinite(value) else 0.0


def _alone(tensor: Tensor | None, *, is_reference: bool) -> Norms:
    """An absent gradient is a zero one in the sum over all parameters: no step would be taken."""
    if tensor is None:
        return ZERO
    if not all_finite(tensor):
        return UNUSABLE
    size = norm(promoted(tensor))
    return Norms(size, size, 0.0) if is_reference else Norms(size, 0.0, size)


def _index_in_whole(at: int, piece: Tensor, whole: Tensor, part: Slice | None) -> tuple[int, ...]:
    inside = [int(i) for i in torch.unravel_index(torch.tensor(at), piece.shape)]
    if part is None:
        return tuple(inside)
    index = (*part.index, *[slice(None)] * (whole.dim() - len(part.index)))
    return tuple(
        range(size)[chosen][i] if isinstance(chosen, slice) else int(chosen[i])
        for i, chosen, size in zip(inside, index, whole.shape, strict=True)
    )


def _non_finite(t: Tensor) -> str:
    bad = ~torch.isfinite(promoted(t))
    first = tuple(int(i) for i in bad.nonzero()[0])
    value = float(promoted(t)[first])
    return f"{int(bad.sum())} of {t.numel()} values are not finite, first at {first}: {value}"


def _dtype_class(t: Tensor) -> str:
    return "floating" if t.is_floating_point() else "complex" if t.is_complex() else "integer"


def _counts(results: Iterable[TensorResult]) -> dict[str, int]:
    counts = dict.fromkeys(("match", "mismatch", "below_floor", "zero", "empty"), 0)
    for result in results:
        counts[result.verdict] += 1
    return counts


def _paper_gate(overall: Norms) -> bool:
    cosine, rel_l2 = overall.cosine, overall.rel_l2
    if cosine is None or rel_l2 is None:
        return False
    return cosine >= PAPER_COSINE and rel_l2 <= PAPER_REL_L2
