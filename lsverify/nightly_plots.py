"""The plots of a night. Rewards are in percent points (100 is a reward of 1), bands and bars are 95% t intervals over seeds."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lsverify.arms import CONTROL, REFERENCE, YARDSTICK
from lsverify.curves import Curve, StepRow
from lsverify.nightly_record import Bias, EntryRecord, Span
from lsverify.pages import GRID, HUES, INK, PAPER, SIZE, SOFT, Plot, plot
from lsverify.verdicts import Comparison

Array = NDArray[np.float64]
Curves = Mapping[str, Sequence[Curve]]
"""By arm, those of its seeds that came to their end."""

CONFIDENCE = 0.95
BLOCKS = 25  # of steps, over which what is noisy from step to step is averaged
POINTS = 100
NARROWEST = 5.0  # points, of a bar of a histogram


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, everywhere: yardstick and control are dashed."""

    colour: str
    marker: str = "o"
    dashed: bool = False

    @property
    def line(self) -> dict[str, Any]:
        dashes = (0, (4, 2)) if self.dashed else "-"
        return {"color": self.colour, "marker": self.marker, "linestyle": dashes}


FIXED = {
    REFERENCE: Look(INK, "s"),
    YARDSTICK: Look(SOFT, "s", dashed=True),
    CONTROL: Look(HUES[3], "X", dashed=True),
    "exact": Look(HUES[0], "o"),
    "detach": Look(HUES[1], "^"),
}
OTHERS = tuple(zip(("D", "v", "P", "*", "<", ">", "p"), (2, 4, 5, 6, 7, 2, 4), strict=True))


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """Of all arms of a page, in their order: the same one looks the same in every plot."""
    others = [arm for arm in dict.fromkeys(arms) if arm not in FIXED]
    drawn = (OTHERS[place % len(OTHERS)] for place in range(len(others)))
    return FIXED | {
        arm: Look(HUES[hue], marker) for arm, (marker, hue) in zip(others, drawn, strict=True)
    }


def band(values: Array) -> tuple[Array, Array]:
    """Mean over seeds and half of its t interval, each [T], of values [S, T]; NaN counts as not there, one seed has no interval."""
    count = np.isfinite(values).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without numbers is NaN
        mean, sd = np.nanmean(values, axis=0), np.nanstd(values, axis=0, ddof=1)
    half = special.stdtrit(np.maximum(count - 1, 1), (1 + CONFIDENCE) / 2) * sd
    return mean, np.where(count > 1, half / np.sqrt(np.maximum(count, 1)), np.nan)


def tested(curves: Curves) -> tuple[Array, dict[str, Array]]:
    """Optimizer steps [T] of the tests, and by arm the mean test rewards [S, T] in points."""
    steps = [test.step for test in next(iter(curves.values()))[0].tests]
    return np.array(steps, dtype=float), {
        arm: POINTS * np.array([[test.reward for test in curve.tests] for curve in own])
        for arm, own in curves.items()
    }


def stepped(
    curves: Curves, of: Callable[[StepRow], float | None]
) -> tuple[Array, dict[str, Array]]:
    """By block of steps: its middle [T], and by arm the means of a number of the rows, [S, T]; NaN where no row of it has one."""
    last = max(row.step for own in curves.values() for curve in own for row in curve.steps)
    edges = np.unique(np.linspace(0, last, min(last, BLOCKS) + 1).round())
    means = {
        arm: np.array([_means([(row.step, of(row)) for row in c.steps], edges) for c in own])
        for arm, own in curves.items()
    }
    return (edges[1:] + edges[:-1] + 1) / 2, means


def _means(rows: Sequence[tuple[int, float | None]], edges: Array) -> list[float]:
    found: list[list[float]] = [[] for _ in edges[1:]]
    for step, value in rows:
        if value is not None:
            found[int(np.searchsorted(edges, step)) - 1].append(value)
    return [float(np.mean(own)) if own else float("nan") for own in found]


def over_steps(
    title: str,
    label: str,
    steps: Array,
    values: Mapping[str, Array],
    seen: Mapping[str, Look],
    *,
    marks: bool = False,
) -> Plot | None:
    """Means with bands against optimizer steps; None where no arm has a number."""
    drawn = {arm: own for arm, own in values.items() if np.isfinite(own).any()}
    if not drawn:
        return None

    def draw(axes: Any) -> None:
        for arm, own in drawn.items():
            mean, half = band(own)
            there = np.isfinite(mean)
            at, mean, half = steps[there], mean[there], np.nan_to_num(half[there])
            # Exact lies on the reference where it is right, so the reference is wide and lies below.
            wide = arm == REFERENCE
            look = seen[arm].line | ({} if marks else {"marker": ""})
            axes.fill_between(at, mean - half, mean + half, color=look["color"], alpha=0.13, lw=0)
            axes.plot(at, mean, **look, lw=3 if wide else 1.4, ms=3.5, alpha=0.45 if wide else 1)
        axes.set(xlabel="optimizer steps", ylabel=label, ylim=_reach(drawn.values()))
        axes.grid(axis="y")
        axes.margins(x=0.02)

    return plot(title, f"By arm: {_ends(drawn)}", draw)


def _reach(values: Iterable[Array]) -> tuple[float, float]:
    """What of the axis is shown: the means, and bands as far as the means span once more. Few seeds have bands that dwarf all."""
    found = [(mean, np.nan_to_num(half)) for mean, half in map(band, values)]
    low, high = (float(end([end(mean) for mean, _ in found])) for end in (np.nanmin, np.nanmax))
    span = high - low or max(abs(high), 1.0) / 10
    bottom = min(float(np.nanmin(mean - half)) for mean, half in found)
    top = max(float(np.nanmax(mean + half)) for mean, half in found)
    return max(bottom, low - span) - span / 20, min(top, high + span) + span / 20


def _wide_enough(axes: Any) -> None:
    """Rounding is not to fill the plot: at least a relative L2 of 0 to 0.1, and at least 1 point to either side of 0."""
    _at_least_a_point(axes)
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, -0.01), max(high, 0.1))


def _at_least_a_point(axes: Any) -> None:
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -1), max(high, 1))


def _ends(values: Mapping[str, Array]) -> str:
    parts = []
    for arm, own in values.items():
        mean = band(own)[0]
        mean = mean[np.isfinite(mean)]
        parts.append(f"{arm} from {mean[0]:.3g} to {mean[-1]:.3g}")
    return "; ".join(parts)


def gaps(found: Comparison, seen: Mapping[str, Look]) -> Plot:
    """Each arm's gap with its interval, and the margin."""
    rows = (*found.arms, found.yardstick)  # the control is too far off to be shown beside them
    margin = POINTS * found.yardstick.margin

    def draw(axes: Any) -> None:
        axes.axvspan(-margin, margin, color=GRID, alpha=0.6, lw=0)
        axes.axvline(0, color=SOFT, lw=0.8)
        for place, row in enumerate(rows):
            low, high = (POINTS * end for end in row.interval)
            look = seen[row.arm]
            axes.plot([low, high], [place, place], **look.line | {"marker": ""}, lw=2)
            axes.plot([POINTS * row.gap], [place], look.marker, color=look.colour, ms=6)
        axes.set_yticks(range(len(rows)), [row.arm for row in rows])
        axes.set(
            xlabel="test reward, arm minus full (percent points)", ylim=(len(rows) - 0.5, -0.5)
        )
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)

    says = "; ".join(
        f"{row.arm} {POINTS * row.gap:+.1f} ({POINTS * row.interval[0]:+.1f} to {POINTS * row.interval[1]:+.1f})"
        for row in rows
    )
    return plot(
        "Gap to full autograd; the grey band is the margin",
        f"Margin {margin:.1f} points. {says}",
        draw,
        size=(SIZE[0], 0.9 + 0.32 * len(rows)),
    )


def distributions(curves: Curves, seen: Mapping[str, Look]) -> Plot:
    """By arm the share of (seed, prompt) at each test reward after training; the first row is before it."""
    start = np.ravel([curve.start.rewards for curve in next(iter(curves.values()))])
    rows = {"before training": start} | {
        arm: np.ravel([curve.end.rewards for curve in own]) for arm, own in curves.items()
    }
    values = np.unique(POINTS * np.concatenate(list(rows.values())).round(9))
    width = max(
        NARROWEST, np.diff(values).min(initial=POINTS)
    )  # a bar for each value, if they are few
    edges = np.arange(-width / 2, POINTS + width, width)
    shares = {name: np.histogram(POINTS * own, edges)[0] / len(own) for name, own in rows.items()}
    most = max(share.max() for share in shares.values())

    def draw(axes: Any) -> None:
        for place, (name, own) in enumerate(rows.items()):
            look = seen.get(name, Look(SOFT))
            axes.bar(
                edges[:-1],
                -0.85 * shares[name] / most,
                width=width,
                bottom=place + 0.9,
                align="edge",
                color=look.colour,
                alpha=0.45,
                hatch="////" if look.dashed else None,
                edgecolor=PAPER,
                linewidth=0,
            )
            axes.plot(
                [POINTS * own.mean()] * 2, [place + 0.05, place + 0.9], color=look.colour, lw=2
            )
            axes.axhline(place + 0.9, color=GRID, lw=0.6)
        axes.set_yticks([place + 0.6 for place in range(len(rows))], list(rows))
        axes.set(xlabel="mean reward of a test prompt (percent points)", xlim=(edges[0], edges[-1]))
        axes.set_ylim(len(rows), -0.05)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)

    says = "; ".join(f"{name} mean {POINTS * own.mean():.1f}" for name, own in rows.items())
    return plot(
        f"Rewards of test prompts over seeds; the line is the mean, the highest bar {100 * most:.0f}%",
        says,
        draw,
        size=(SIZE[0], 0.9 + 0.42 * len(rows)),
    )


def bias_and_gap(biases: Mapping[str, Bias], seen: Mapping[str, Look]) -> Plot:
    """Loss of test reward against the bias of the gradient: arms with their intervals, seeds as small dots."""

    def draw(axes: Any) -> None:
        axes.axhline(0, color=SOFT, lw=0.8)
        for arm, bias in biases.items():
            look, lost = seen[arm], -POINTS * np.array(bias.gap_by_seed)
            axes.plot(bias.by_seed, lost, "o", color=look.colour, alpha=0.4, ms=3.5, mew=0)
            mean, half = band(lost[:, None])
            axes.errorbar(
                [bias.rel_l2], mean, np.nan_to_num(half), fmt=look.marker, color=look.colour, ms=6
            )
        axes.set(xlabel="relative L2 of the gradient to full autograd's", ylabel="reward lost (percent points)")  # fmt: skip
        axes.grid(axis="y")
        axes.margins(0.12)
        _wide_enough(axes)

    says = "; ".join(
        f"{arm} bias {bias.rel_l2:.2g}, lost {-POINTS * float(np.mean(bias.gap_by_seed)):+.1f}"
        for arm, bias in biases.items()
    )
    return plot("Reward lost against bias of the gradient; dots are seeds", says, draw)


def all_biases(entries: Sequence[EntryRecord], seen: Mapping[str, Look]) -> Plot:
    """The same over entries: one point for each entry and arm."""
    points = [
        (entry.entry.name, arm.arm, arm.bias.rel_l2, -POINTS * float(np.mean(arm.bias.gap_by_seed)))
        for entry in entries
        for arm in entry.arms
        if arm.bias and arm.arm in entry.verdicts
    ]
    names = list(dict.fromkeys(name for name, *_ in points))

    def draw(axes: Any) -> None:
        axes.axhline(0, color=SOFT, lw=0.8)
        for name, arm, bias, lost in points:
            look = seen[arm]
            axes.plot([bias], [lost], look.marker, color=look.colour, ms=6)
            where = {"xytext": (5, 3), "textcoords": "offset points", "fontsize": 7}
            axes.annotate(str(1 + names.index(name)), (bias, lost), **where)
        axes.set(xlabel="relative L2 of the gradient to full autograd's", ylabel="reward lost (percent points)")  # fmt: skip
        axes.grid(axis="y")
        axes.margins(0.12)
        _wide_enough(axes)

    listed = ", ".join(f"{place} {name}" for place, name in enumerate(names, 1))
    says = "; ".join(
        f"{name} {arm} bias {b:.2g}, lost {lost:+.1f}" for name, arm, b, lost in points
    )
    return plot(f"Reward lost against bias, all entries ({listed})", says, draw)


WHERE = {
    "distance": "distance of the evidence from the prompt's end (tokens)",
    "length": "length of the prompt (tokens)",
}


def spans(of: str, found: Sequence[Span], arms: Sequence[str], seen: Mapping[str, Look]) -> Plot:
    """Gaps with bootstrap intervals by where the evidence lies, or by length."""
    drawn = [arm for arm in arms if arm in found[0].gaps]
    width = 0.7 / max(len(drawn), 1)

    def draw(axes: Any) -> None:
        axes.axhline(0, color=SOFT, lw=0.8)
        for turn, arm in enumerate(drawn):
            at = np.arange(len(found)) + (turn - (len(drawn) - 1) / 2) * width
            gap = POINTS * np.array([span.gaps[arm].value for span in found])
            ends = POINTS * np.array([span.gaps[arm].interval for span in found])
            error = np.abs(ends.T - gap)
            look = seen[arm]
            axes.errorbar(at, gap, error, fmt=look.marker, color=look.colour, ms=4, lw=1.2)
        axes.set_xticks(range(len(found)), [between(span.low, span.high) for span in found])
        axes.set(xlabel=WHERE[of], ylabel="arm minus full (percent points)")
        _at_least_a_point(axes)
        axes.grid(axis="y")

    says = "; ".join(
        f"{between(span.low, span.high)} tokens: "
        + ", ".join(f"{arm} {POINTS * span.gaps[arm].value:+.1f}" for arm in drawn)
        for span in found
    )
    return plot(f"Gap by {WHERE[of].split(' (')[0]}", says, draw)


def between(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}\N{EN DASH}{high}"
