"""An ablation as one self-contained page: the tables, and for each architecture what is lost against what is saved."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from lsverify import pages
from lsverify.ablation_records import Ablation
from lsverify.ablation_report import NOTES, Summary, remarks, sheets, summaries
from lsverify.pages import HUES, SOFT, Plot
from lsverify.policies import parse_policy
from lsverify.state_term import StateTerm

PAGE = "ablation.html"
MARK = HUES[0]


def render(ablation: Ablation) -> str:
    """The page as HTML with its plots inside. Needs the `report` extra (see `pages.absent`)."""
    terms: dict[tuple[str, int], list[StateTerm]] = {}
    for term in ablation.state_terms:
        terms.setdefault((term.arch, term.length), []).append(term)
    policies: dict[tuple[str, int], list[Summary]] = {}
    for summary in summaries(ablation.rows):
        policies.setdefault((summary.first.arch, summary.first.length), []).append(summary)
    figures = [
        {
            "title": f"{arch}, prompt of {length} tokens",
            "plots": list(_plots(policies[arch, length], some)),
        }
        for (arch, length), some in terms.items()
    ]
    return pages.render(
        "ablation_page.html",
        ablation=ablation,
        sheets=sheets(ablation),
        figures=figures,
        notes=NOTES,
        remarks=list(remarks(ablation)),
    )


def _plots(policies: Sequence[Summary], terms: Sequence[StateTerm]) -> Iterator[Plot]:
    """Of one architecture and prompt length."""
    yield _front(policies, "live_bytes", "live bytes")
    yield _front(policies, "seconds", "seconds")
    yield _distance(terms)
    yield _bars("Share of the state term by kind of state", "kind of state", _by_kind(terms))
    for summary in [s for s in policies if s.first.policy == "detach"]:
        lost = summary.lost(lambda row: row.per_layer)
        yield _bars("detach: share of the squared bias by layer", "layer", lost)
        lost = summary.lost(lambda row: row.per_kind)
        yield _bars("detach: the same by kind of parameter", "kind of parameter", lost)


def _front(policies: Sequence[Summary], field: str, cost: str) -> Plot:
    """Bias against a cost, both of full autograd; the line joins what no other policy beats in both.

    A policy with a coin is hollow and off the line: its root mean square error, at what one draw costs.
    """
    points: list[tuple[float, float, str]] = []
    for s in policies:
        own, full, bias = s.mean(field), s.mean(f"{field}_full"), s.mean("rel_l2")
        if own is not None and full and bias is not None:
            variance = s.mean("variance")
            points.append((own / full, bias if variance is None else math.sqrt(variance), s.first.policy))  # fmt: skip
    sure = [point for point in points if parse_policy(point[2]).probability is None]

    def draw(axes: Any) -> None:
        best = pareto(sure)
        axes.step([x for x, *_ in best], [y for _, y, _ in best], where="post", color=SOFT, lw=0.8)
        for point in points:
            at, error, policy = point
            axes.plot([at], [error], "o", color=MARK, ms=4, mfc=None if point in sure else "none")
            where = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(policy, (at, error), **where)
        axes.set(xlabel=f"{cost}, of full autograd", ylabel="relative L2")
        axes.margins(0.15)

    says = "; ".join(f"{policy} {error:.2g} at {at:.2g}" for at, error, policy in points)
    return pages.plot(f"Bias against {cost}", says, draw)


def pareto(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Those that no other point is at or below in cost and bias, cheapest first."""
    best: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _distance(terms: Sequence[StateTerm]) -> Plot:
    """Cumulative share against distance, one thin line per seed and their mean."""
    lines = [[part.within or 0.0 for part in term.distances] for term in terms if term.distances]
    tokens = [part.upto for part in terms[0].distances] if lines else []
    mean = [statistics.fmean(column) for column in zip(*lines, strict=True)]

    def draw(axes: Any) -> None:
        axes.set(xlabel="tokens back from B", ylabel="share of the state term")
        if not lines:
            return
        for line in lines:
            axes.plot(tokens, line, color=MARK, lw=0.8, alpha=0.4)
        axes.plot(tokens, mean, "o-", color=MARK, ms=3)
        axes.set_xscale("log", base=2)
        for level in (0.5, 0.9):
            axes.axhline(level, color=SOFT, lw=0.5, linestyle=":")

    says = "; ".join(f"{share:.0%} within {upto}" for share, upto in zip(mean, tokens, strict=True))
    return pages.plot("Share of the state term within a distance of B", says, draw)


def _by_kind(terms: Sequence[StateTerm]) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for term in terms:
        for part in term.kinds:
            shares.setdefault(part.kind, []).append(part.projection or 0.0)
    return {kind: statistics.fmean(found) for kind, found in shares.items()}


def _bars(title: str, label: str, shares: dict[str, float]) -> Plot:
    names = ["outside" if name == "-" else name for name in shares]

    def draw(axes: Any) -> None:
        axes.bar(range(len(names)), list(shares.values()), color=MARK)
        axes.set_xticks(range(len(names)), names, rotation=60 if len(names) > 6 else 0)
        axes.axhline(0.0, color=SOFT, lw=0.5)
        axes.set(xlabel=label, ylabel="share")

    says = "; ".join(
        f"{name} {share:.0%}" for name, share in zip(names, shares.values(), strict=True)
    )
    return pages.plot(title, says, draw)
