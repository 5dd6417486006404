"""`gradient`: every parameter's gradient = that of the claimed reference, each time the path runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lsverify.compare import Comparison, Limits, compare, message
from lsverify.evidence import Rung, Status
from lsverify.observe import Run
from lsverify.referee import Claim, Referee
from lsverify.references import Gradients
from lsverify.rungs.forward import Flips


def gradient(
    claim: Claim,
    run: Run,
    later: Sequence[Run],
    referee: Referee,
    comparison: Comparison,
    rerun: Callable[..., Run] | None = None,
) -> Rung:
    """The comparison's verdict, unless the path disagrees with itself or the reference with its own parts.

    Where decisions flipped inside their margin, `rerun(forced=...)` is compared under the reference's decisions; None
    for a path that cannot be run again.
    """
    if run.error is not None:
        return Rung(name="gradient", status="not_run", detail="the path raised an error")

    def rung(status: Status, detail: str, measured: Comparison = comparison) -> Rung:
        limit = max((t.limit for t in measured.tensors), default=measured.limit)
        return Rung(
            name="gradient", status=status, measure=measured.rel_l2, limit=limit, detail=detail
        )

    parts = consistent(claim, referee)
    if parts is not None and not parts.passed:
        return rung(
            "reference_inconsistent",
            f"response term and state term do not sum to full autograd: {message(parts)}",
            parts,
        )
    for again in later:
        if again.error is not None:
            kind = type(again.error).__name__
            detail = f"the path raised {kind} when it ran again: {again.error}"
            return Rung(name="gradient", status="error", detail=detail)
        twice = compare(
            run.gradients, again.gradients, limits=referee.limits(claim), slices=referee.slices
        )
        if _disagree(twice):
            to_reference = "" if comparison.passed else f"\nto the reference: {message(comparison)}"
            detail = f"two runs of the path disagree: {message(twice)}{to_reference}"
            return rung("nondeterministic", detail, twice)
    if comparison.passed:
        worst = comparison.worst_parameter
        return rung(comparison.status, f"{len(comparison.tensors)} parameters; worst {worst}")
    if rerun is not None:
        flips = Flips(run, referee)
        behind = rerun(forced=flips.expected) if flips.undecided else None
        if behind is not None and not Flips(behind, referee).real:
            forced = referee.compared(claim, behind.gradients)
            if forced.passed:
                found = f"{flips.text()}; equal under the reference's decisions"
                return rung("undecidable", f"{found}; as they are: {message(comparison)}", forced)
    return rung(comparison.status, message(comparison))


def _disagree(twice: Comparison) -> bool:
    """Whether the second run differs from the first; a first run that is not finite is at fault by itself."""
    unusable = any(finding.kind == "reference_non_finite" for finding in twice.findings)
    return twice.status == "failed" and not unusable


def consistent(claim: Claim, referee: Referee) -> Comparison | None:
    """A stopped reference's two terms against the cache-free full gradient; None where the claim is full autograd."""
    total: Gradients | None = referee.total(claim)
    if total is None:
        return None
    full = Claim(label="full", policy=None, objective=claim.objective)
    return referee.compared(full, total, limits=Limits())
