"""An ablation as one self-contained page: the tables, and for each architecture what is lost against what is saved."""

from __future__ import annotations

import importlib.util
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsverify.ablation_records import Ablation
from lsverify.ablation_report import NOTES, Summary, remarks, sheets, summaries
from lsverify.policies import parse_policy
from lsverify.state_term import StateTerm

PACKAGES = ("jinja2", "matplotlib")
TEMPLATE = Path(__file__).with_name("ablation_page.html")
# Text stays text, which is smaller and can be searched; the salt makes the same data the same page.
SVG = {"svg.fonttype": "none", "svg.hashsalt": "lsverify", "font.size": 8, "axes.titlesize": 9}
INK, PALE = "#1f5a96", "#9db8d6"


def absent() -> str | None:
    """Why there can be no page, in one line; None where there can."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"ablation.html is left out, since {' and '.join(missing)} is missing: pip install 'lsverify[report]'"


def render(ablation: Ablation) -> str:
    """The page as HTML with its plots inside. Needs the `report` extra (see `absent`)."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    terms: dict[tuple[str, int], list[StateTerm]] = {}
    for term in ablation.state_terms:
        terms.setdefault((term.arch, term.length), []).append(term)
    policies: dict[tuple[str, int], list[Summary]] = {}
    for summary in summaries(ablation.rows):
        policies.setdefault((summary.first.arch, summary.first.length), []).append(summary)
    figures = [
        {
            "title": f"{arch}, prompt of {length} tokens",
            "svg": Markup(_figure(policies[arch, length], some)),
        }
        for (arch, length), some in terms.items()
    ]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        TEMPLATE.read_text(encoding="utf-8")
    )
    return template.render(
        ablation=ablation,
        sheets=sheets(ablation),
        figures=figures,
        notes=NOTES,
        remarks=list(remarks(ablation)),
    )


def _figure(policies: Sequence[Summary], terms: Sequence[StateTerm]) -> str:
    """Six plots of one architecture and prompt length, as an SVG element."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SVG):
        figure = Figure(figsize=(11, 5.6), layout="constrained")
        FigureCanvasSVG(figure)
        (bytes_, seconds, far), (state, layers, kinds) = figure.subplots(2, 3)
        _front(bytes_, policies, "live_bytes", "live bytes, of full autograd")
        _front(seconds, policies, "seconds", "seconds, of full autograd")
        _distance(far, terms)
        _bars(state, "share of the state term by kind of state", _by_kind(terms))
        detached = [s for s in policies if s.first.policy == "detach"]
        if detached:
            lost = detached[0].lost(lambda row: row.per_layer)
            _bars(layers, "detach: share of the squared bias by layer", lost)
            lost = detached[0].lost(lambda row: row.per_kind)
            _bars(kinds, "detach: the same by kind of parameter", lost)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = drawn.getvalue()
    return text[text.index("<svg") :]


def _front(axes: Any, policies: Sequence[Summary], field: str, label: str) -> None:
    """Bias against a cost, both of full autograd; the line joins what no other policy beats in both.

    A policy with a coin is hollow and off the line: its root mean square error, at what one draw costs.
    """
    points: list[tuple[float, float, str]] = []
    for s in policies:
        cost, full, bias = s.mean(field), s.mean(f"{field}_full"), s.mean("rel_l2")
        if cost is None or not full or bias is None:
            continue
        variance, at = s.mean("variance"), cost / full
        tossed = parse_policy(s.first.policy).probability is not None
        error = bias if variance is None else math.sqrt(variance)
        axes.plot(
            [at], [error], "o", color=INK, markersize=4, mfc=None if variance is None else "w"
        )
        where = {"xytext": (3, 3), "textcoords": "offset points", "fontsize": 6}
        axes.annotate(s.first.policy, (at, error), **where)
        if not tossed:
            points.append((at, bias, s.first.policy))
    best = pareto(points)
    axes.step([x for x, *_ in best], [y for _, y, _ in best], where="post", color=PALE, zorder=0)
    axes.set(title=f"bias against {label.split(',')[0]}", xlabel=label, ylabel="relative L2")
    axes.margins(0.15)


def pareto(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Those that no other point is at or below in cost and bias, cheapest first."""
    best: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def _distance(axes: Any, terms: Sequence[StateTerm]) -> None:
    """Cumulative share against distance, one pale line per seed and their mean."""
    lines = [[part.within or 0.0 for part in term.distances] for term in terms if term.distances]
    axes.set(title="share of the state term within a distance of B", xlabel="tokens back from B")
    if not lines:
        return
    tokens = [part.upto for part in terms[0].distances]
    for line in lines:
        axes.plot(tokens, line, color=PALE, linewidth=0.8)
    mean = [statistics.fmean(column) for column in zip(*lines, strict=True)]
    axes.plot(tokens, mean, "o-", color=INK, markersize=3)
    axes.set_xscale("log", base=2)
    for level in (0.5, 0.9):
        axes.axhline(level, color="grey", linewidth=0.5, linestyle=":")


def _by_kind(terms: Sequence[StateTerm]) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for term in terms:
        for part in term.kinds:
            shares.setdefault(part.kind, []).append(part.projection or 0.0)
    return {kind: statistics.fmean(found) for kind, found in shares.items()}


def _bars(axes: Any, title: str, shares: dict[str, float]) -> None:
    names = ["outside" if name == "-" else name for name in shares]
    axes.bar(range(len(names)), list(shares.values()), color=INK)
    axes.set_xticks(range(len(names)), names, rotation=60 if len(names) > 6 else 0)
    axes.axhline(0.0, color="grey", linewidth=0.5)
    axes.set(title=title)
