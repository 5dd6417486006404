"""A night as tables for the terminal: verdicts, what each arm's gradient lacks, and how far kept states drift."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from lsverify.nightly_record import EntryRecord, Nightly
from lsverify.report import number
from lsverify.verdicts import Verdict

VERDICTS = (
    "entry",
    "arm",
    "seeds",
    "look",
    "tonight",
    "stands",
    "reward",
    "gap",
    "interval",
    "margin",
    "decided by",
)
BIASES = ("entry", "arm", "rel L2", "cosine", "gap", "tokens/s", "s per step")
DRIFTS = ("entry", "steps a capture serves", "age", "|dlogp| in nats", "loss difference", "captures")  # fmt: skip


def show(record: Nightly, console: Console) -> None:
    for title, headers, rows in (
        ("Test reward against full autograd", VERDICTS, _verdicts(record.entries)),
        ("Bias of the gradient along training", BIASES, _biases(record.entries)),
        ("Kept states against fresh ones", DRIFTS, _drifts(record.entries)),
    ):
        if found := list(rows):
            console.print(_table(title, headers, found))
    for line in _lines(record):
        console.print(line, highlight=False, markup=False)


def _lines(record: Nightly) -> Iterator[str]:
    for entry in record.entries:
        name = entry.entry.name
        if entry.comparison and entry.gain:
            low, high = entry.gain.interval
            yield (
                f"{name}: full went from {entry.comparison.start_reward:.3f} to {entry.comparison.reference_reward:.3f}, "
                f"gain {entry.gain.value:+.3f} ({low:+.3f} to {high:+.3f})"
            )
        if entry.exact:
            yield (
                f"{name}: exact and full differ by at most {number(entry.exact.test_reward)} of a test reward, "
                f"{number(entry.exact.reward)} of a rollout's, {number(entry.exact.loss)} of the loss and "
                f"{number(entry.exact.gradient_norm)} of the gradient's norm, at any step of {entry.exact.seeds} seeds"
            )
    if record.correlation:
        rho, p, points = record.correlation.rho, record.correlation.p, record.correlation.points
        yield f"rank correlation of bias and loss over {points} arms: {number(rho)} (p {number(p)})"


def _verdicts(entries: Iterable[EntryRecord]) -> Iterator[Sequence[str]]:
    for entry in entries:
        found = entry.comparison
        for verdict in (*found.arms, found.yardstick, found.control) if found else ():
            yield _verdict(entry, verdict)


def _verdict(entry: EntryRecord, verdict: Verdict) -> Sequence[str]:
    low, high = verdict.interval
    needed = "" if verdict.seeds_to_decide is None else f"{verdict.seeds_to_decide} seeds"
    return (
        entry.entry.name,
        verdict.arm,
        str(verdict.seeds),
        str(entry.look),
        verdict.decision,
        entry.standing.get(verdict.arm, ""),
        f"{verdict.reward:.3f}",
        f"{verdict.gap:+.4f}",
        f"{low:+.4f} to {high:+.4f}",
        f"{verdict.margin:.4f}",
        needed,
    )


def _biases(entries: Iterable[EntryRecord]) -> Iterator[Sequence[str]]:
    for entry in entries:
        for arm in entry.arms:
            bias, gap = arm.bias, arm.difference
            yield (
                entry.entry.name,
                arm.arm,
                number(bias.rel_l2 if bias else None),
                "-" if bias is None else f"{bias.cosine:.4f}",
                "" if gap is None else f"{gap.value:+.4f}",
                f"{arm.cost.tokens_per_second:.0f}",
                f"{arm.cost.seconds_per_step:.2f}",
            )


def _drifts(entries: Iterable[EntryRecord]) -> Iterator[Sequence[str]]:
    for entry in entries:
        for row in entry.drift:
            yield (
                entry.entry.name,
                str(row.refresh),
                str(row.age),
                number(row.log_prob),
                number(row.loss_difference),
                str(row.captures),
            )


def _table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(*headers, title=title)
    for row in rows:
        table.add_row(*row)
    return table
