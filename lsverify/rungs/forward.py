"""`forward`: log-probs of every response token, the loss and every discrete decision = full autograd's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lsverify.compare import Limits, compare
from lsverify.evidence import Rung
from lsverify.objective import prepare
from lsverify.observe import Run
from lsverify.referee import CAPS, FACTOR, Claim, Referee, floor_dtype
from lsverify.rungs.parting import parting

ORACLE_LIMIT = 1e-12


def forward(claim: Claim, run: Run, referee: Referee, rerun: Callable[..., Run]) -> Rung:
    """Compare what the path computed with full autograd, and where they differ say in which layer it begins.

    `rerun(forced=...)` runs the path again with given decisions; it is asked only when decisions differ by less than
    their margin, and then values are compared under the reference's decisions. `rerun(keep_values=True)` keeps every
    layer's values, after a failure of a run that did not.
    """
    if run.error is not None:
        return Rung(name="forward", status="not_run", detail="the path raised an error")
    rung = compared(claim, run, referee, rerun)
    if rung.status != "failed":
        return rung
    kept = run.trace is not None and run.trace.values
    where = parting(run if kept else rerun(keep_values=True), referee)
    return rung.model_copy(update={"detail": f"{rung.detail}; {where}"})


def compared(claim: Claim, run: Run, referee: Referee, rerun: Callable[..., Run]) -> Rung:
    """The rung without a word on where values part."""
    flips = real = Flips(run, referee)
    if flips.undecided:
        # A flip inside its margin moves what later layers choose from: they are judged behind the reference's choice.
        run = rerun(forced=flips.expected)
        real = Flips(run, referee)
    if real.real:
        return Rung(
            name="forward",
            status="failed",
            measure=float(len(real.real)),
            limit=0.0,
            detail=real.text(),
        )
    rung = _values(claim, run, referee)
    if flips.undecided and rung.holds:
        return rung.model_copy(
            update={
                "status": "undecidable",
                "detail": f"{flips.text()}; equal under the reference's decisions: {rung.detail}",
            }
        )
    return rung


class Flips:
    """Decisions that differ from full autograd's: `real` ones, and those whose margin is inside the floor."""

    def __init__(self, run: Run, referee: Referee) -> None:
        assert run.trace is not None
        eps = torch.finfo(floor_dtype(referee.setting.config.dtype)).eps
        self.real: list[str] = []
        self.undecided: list[str] = []
        # A model that makes no discrete decision is not run once more to record none.
        full = referee.full_run.trace if run.trace.choices else None
        self.expected = full.choices if full is not None else {}
        self.compared = len(run.trace.choices.keys() & self.expected.keys())
        for (site, place), expected in self.expected.items():
            actual = run.trace.choices.get((site, place))
            if actual is None or actual.chosen == expected.chosen:
                continue
            text = (
                f"{site.module} chose {list(actual.chosen)} instead of {list(expected.chosen)} at position "
                f"{place.position} (margin {expected.margin:.3g})"
            )
            (self.real if expected.decided(eps) else self.undecided).append(text)

    def text(self) -> str:
        found = self.real or self.undecided
        kind = "decisions differ" if self.real else "decisions differ inside their margin"
        return f"{len(found)} of {self.compared} {kind}, first {found[0]}"


def _values(claim: Claim, run: Run, referee: Referee) -> Rung:
    problem, dtype = referee.setting.problem, floor_dtype(referee.setting.config.dtype)
    expected = referee.oracle(claim).log_probs
    seen = _log_probs(run)
    if seen is None:
        return Rung(
            name="forward",
            status="not_run",
            detail=_unseen(run),
        )
    where, actual = seen
    limits = Limits(relative=ORACLE_LIMIT)
    if dtype != torch.float64:
        orders = [_named(order.log_probs) for order in referee.orders(claim)]
        limits = referee.measured(_named(expected), *orders)
    faults = [*_wrong_shapes(expected, actual, where)]
    if faults:
        return Rung(name="forward", status="failed", detail="; ".join(faults))
    comparison = compare(_named(expected), _named(actual), limits=limits)
    worst = comparison.worst_parameter or ""
    detail = f"log-probs {where} of {len(problem)} responses; furthest off {worst} by {_number(comparison.worst_rel_l2)}"
    if not comparison.passed:
        return Rung(
            name="forward",
            status=comparison.status,
            measure=comparison.rel_l2,
            limit=limits.relative,
            detail=f"{detail}; {_first_wrong(expected, actual)}",
        )
    faults = [*_loss(claim, run, referee), *_clip_sides(claim, actual, referee)]
    if run.result is not None and run.result.log_probs is not None and where == "seen at the head":
        reported = compare(_named(expected), _named(run.result.log_probs), limits=limits)
        if not reported.passed:
            faults.append(
                f"the log-probs it reports are not the ones it computed ({reported.worst_rel_l2})"
            )
    if faults:
        return Rung(
            name="forward",
            status="failed",
            measure=float(len(faults)),
            limit=0.0,
            detail="; ".join([*faults, detail]),
        )
    return Rung(
        name="forward",
        status="proven",
        measure=comparison.rel_l2,
        limit=max((t.limit for t in comparison.tensors), default=limits.relative),
        detail=detail,
    )


def _unseen(run: Run) -> str:
    """Why no log-probs were found."""
    assert run.trace is not None
    found = "log-probs were neither seen at the model's head nor reported"
    if run.trace.unplaced:
        return (
            f"{run.trace.unplaced} forwarded tokens match no prompt or response at their positions: other tokens went in, or "
            f"others are at these positions (pass input_ids, and position_ids that count from each row's first token). {found}; "
            "if the tokens are right, return them in StepResult.log_probs"
        )
    return f"{found}: return them in StepResult.log_probs"


def _number(value: float | None) -> str:
    return "has no number" if value is None else f"{value:.3g}"


def _log_probs(run: Run) -> tuple[str, Sequence[Tensor]] | None:
    """Seen at the model's head where all were, else reported by the path."""
    assert run.trace is not None
    if run.trace.complete():
        return "seen at the head", run.trace.log_probs
    if run.result is not None and run.result.log_probs is not None:
        return "reported by the path", [row.detach() for row in run.result.log_probs]
    return None


def _wrong_shapes(
    expected: Sequence[Tensor], actual: Sequence[Tensor], where: str
) -> Iterator[str]:
    if len(actual) != len(expected):
        yield f"log-probs {where} for {len(actual)} responses, the problem has {len(expected)}"
        return
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        if e.shape != a.shape:
            yield f"log-probs of response {i} have shape {tuple(a.shape)}, expected {tuple(e.shape)}"


def _first_wrong(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> str:
    """The token whose log-prob is furthest off, with both values."""
    errors = [
        (e.double() - a.double()).abs().nan_to_num(math.inf)
        for e, a in zip(expected, actual, strict=True)
    ]
    i = max(range(len(errors)), key=lambda n: errors[n].max().item())
    t = int(errors[i].argmax())
    return f"response {i} token {t}: {actual[i][t].item():.12g} instead of {expected[i][t].item():.12g}"


def _loss(claim: Claim, run: Run, referee: Referee) -> Iterator[str]:
    if run.result is None:
        return
    expected, actual = referee.oracle(claim).loss, float(run.result.loss)
    scale = max(abs(expected), 1.0)
    floor = abs(referee.native(claim).loss - expected)
    dtype = floor_dtype(referee.setting.config.dtype)
    limit = ORACLE_LIMIT if dtype == torch.float64 else FACTOR * floor + 64 * torch.finfo(dtype).eps
    if not abs(actual - expected) <= limit * scale:
        yield f"loss is {actual:.12g} instead of {expected:.12g}"


def _clip_sides(claim: Claim, actual: Sequence[Tensor], referee: Referee) -> Iterator[str]:
    """Sides other than the oracle's, unless rounding alone carries a log-prob that far: nothing does at oracle precision."""
    plan = prepare(claim.objective, referee.setting.problem)
    native = referee.setting.oracle is not referee.setting.model
    orders = referee.orders(claim) if native else []
    for i, (e, a) in enumerate(zip(referee.oracle(claim).log_probs, actual, strict=True)):
        floors = [float((each.log_probs[i] - e).abs().max()) for each in orders]
        differs = plan.clip_side(i, e.double()) != plan.clip_side(i, a.double())
        if bool((differs & ((a - e).abs() > FACTOR * max(floors, default=0.0))).any()):
            yield f"clip side differs at response {i} token {int(differs.nonzero()[0])}"


def _named(rows: Sequence[Tensor]) -> dict[str, Tensor | None]:
    return {f"response {i}": row.detach() for i, row in enumerate(rows)}


__all__ = ["CAPS", "Flips", "compared", "forward"]
