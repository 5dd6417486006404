"""`gradient`: every parameter's gradient = that of the claimed reference, twice over."""

from __future__ import annotations

from lsverify.compare import Comparison, Limits, compare, message
from lsverify.evidence import Rung, Status
from lsverify.observe import Run
from lsverify.referee import Claim, Referee
from lsverify.references import Gradients


def gradient(claim: Claim, run: Run, again: Run, referee: Referee, comparison: Comparison) -> Rung:
    """The comparison's verdict, unless the path disagrees with itself or the reference with its own parts."""
    if run.error is not None:
        return Rung(name="gradient", status="not_run", detail="the path raised an error")
    limit = max((t.limit for t in comparison.tensors), default=comparison.limit)

    def rung(status: Status, detail: str) -> Rung:
        return Rung(
            name="gradient", status=status, measure=comparison.rel_l2, limit=limit, detail=detail
        )

    parts = consistent(claim, referee)
    if parts is not None and not parts.passed:
        return rung(
            "reference_inconsistent",
            f"response term and state term do not sum to full autograd: {message(parts)}",
        )
    twice = compare(
        run.gradients, again.gradients, limits=referee.limits(claim), slices=referee.slices
    )
    if comparison.passed and not (twice.passed or twice.status == "vacuous"):
        return rung("nondeterministic", f"two runs of the path disagree: {message(twice)}")
    if comparison.passed:
        worst = comparison.worst_parameter
        return rung(comparison.status, f"{len(comparison.tensors)} parameters; worst {worst}")
    return rung(comparison.status, message(comparison))


def consistent(claim: Claim, referee: Referee) -> Comparison | None:
    """A stopped reference's two terms against the cache-free full gradient; None where the claim is full autograd."""
    total: Gradients | None = referee.total(claim)
    if total is None:
        return None
    full = Claim(label="full", policy=None, objective=claim.objective)
    return referee.compared(full, total, limits=Limits())
