"""An ablation as people read it: tables for the terminal, the same in Markdown, and the files of `--out`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsverify.ablation_records import Ablation, Group, Row
from lsverify.errors import InputError
from lsverify.report import STYLES, number
from lsverify.state_term import StateTerm
from lsverify.whole_files import write_whole

MIB = 2**20
ROW_HEADERS = (
    "architecture",
    "policy",
    "prompt",
    "claim",
    "rel L2",
    "cosine",
    "norm ratio",
    "lost most in layer",
    "in parameters",
    "live MiB (of full)",
    "seconds (of full)",
    "rms of the coin",
)
TERM_HEADERS = (
    "architecture",
    "prompt",
    "state term / full",
    "cosine",
    "by kind of state",
    "50% within",
    "90% within",
)
NOTES = (
    "Claim: relative L2 to the reference that the policy claims. Rel L2, cosine, norm ratio: to full autograd. Lost "
    "most: the largest share of the squared bias. Means over seeds, with the least and the greatest where they differ.",
    "Shares of the state term, which detach loses, are projections onto it: they sum to 100% and one can be negative. "
    "Tokens are counted back from the boundary of each prompt; a second prompt is 5 tokens shorter.",
    "Live bytes are over the loaded weights. Seconds of milliseconds-long steps, with other work on the machine, rank "
    "nothing: lsverify bench measures speed.",
)


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """One table, `key` its short name: every row has a cell for every header."""

    key: str
    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows of one architecture, policy and prompt length, one per seed."""

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def status(self) -> str:
        """The first that is not a pass, else what they all are."""
        return next((row.status for row in self.rows if not row.holds), self.first.status)

    def values(self, field: str) -> list[float]:
        found = (getattr(row, field) for row in self.rows)
        return [value for value in found if value is not None]

    def mean(self, field: str) -> float | None:
        values = self.values(field)
        return statistics.fmean(values) if values else None

    @property
    def biased(self) -> bool:
        """Whether what separates it from full autograd is more than rounding."""
        pairs = ((row.rel_l2, row.limit) for row in self.rows)
        return any(bias is not None and bias > (limit or 0.0) for bias, limit in pairs)

    def lost(self, groups: Callable[[Row], dict[str, Group]]) -> dict[str, float]:
        """Each group's share of the squared bias, the mean over seeds."""
        shares: dict[str, list[float]] = {}
        for row in self.rows:
            for name, group in groups(row).items():
                shares.setdefault(name, []).append(group.lost or 0.0)
        return {name: statistics.fmean(found) for name, found in shares.items()}


def summaries(rows: Iterable[Row]) -> list[Summary]:
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.arch, row.length, row.policy), []).append(row)
    return [Summary(rows=tuple(found)) for found in groups.values()]


def sheets(ablation: Ablation) -> list[Sheet]:
    """The policies; the state term by kind; how much of it lies within each distance, a sheet per prompt length."""
    terms = {
        key: list(found)
        for key, found in itertools.groupby(
            ablation.state_terms, key=lambda term: (term.arch, term.length)
        )
    }
    kept = [s for s in summaries(ablation.rows) if s.status != "not_applicable"]
    found = [
        Sheet(
            key="policies",
            title="Policies",
            headers=ROW_HEADERS,
            rows=[_row(s) for s in kept],
        ),
        Sheet(
            key="kinds",
            title="What detach loses, by kind of state",
            headers=TERM_HEADERS,
            rows=[_term(some) for some in terms.values()],
        ),
    ]
    for length in dict.fromkeys(length for _, length in terms):
        measured = [some for (_, of), some in terms.items() if of == length]
        found.append(_distances(length, measured))
    return [sheet for sheet in found if sheet.rows]


def _row(s: Summary) -> list[str]:
    worst_claim = max(s.values("to_claim"), default=None)
    variance = s.mean("variance")
    return [
        s.first.arch,
        s.first.policy,
        str(s.first.length),
        f"{s.status} {number(worst_claim)}",
        spread(s.values("rel_l2")) if s.biased else number(max(s.values("rel_l2"), default=None)),
        spread(s.values("cosine")),
        spread(s.values("norm_ratio")),
        _most(s, lambda row: row.per_layer),
        _most(s, lambda row: row.per_kind),
        _against(s.mean("live_bytes"), s.mean("live_bytes_full"), MIB),
        _against(s.mean("seconds"), s.mean("seconds_full"), 1),
        "-" if variance is None else number(math.sqrt(variance)),
    ]


def _term(terms: Sequence[StateTerm]) -> list[str]:
    kinds: dict[str, list[float]] = {}
    for term in terms:
        for part in term.kinds:
            kinds.setdefault(part.kind, []).append(part.projection or 0.0)
    shares = (f"{kind} {_percent(found)}" for kind, found in kinds.items())
    return [
        terms[0].arch,
        str(terms[0].length),
        spread([term.size for term in terms if term.size is not None]),
        spread([term.cosine for term in terms if term.cosine is not None]),
        ", ".join(shares) or "-",
        *(_held(terms, share) for share in terms[0].held),
    ]


def _distances(length: int, measured: Sequence[Sequence[StateTerm]]) -> Sheet:
    """The last column is B itself: all of it; the one before lacks the longest prompt's first token."""
    far = measured[0][0].distances
    return Sheet(
        key=f"distances_{length}",
        title=f"How much of what detach loses lies within so many tokens of the boundary, prompt {length}",
        headers=("architecture", *(str(part.upto) for part in far)),
        rows=[
            [
                terms[0].arch,
                *(
                    _percent([term.distances[i].within or 0.0 for term in terms])
                    for i in range(len(far))
                ),
            ]
            for terms in measured
            if far
        ],
    )


def spread(values: Sequence[float]) -> str:
    """The mean, and the least and the greatest where they differ as shown."""
    if not values:
        return "-"
    mean, least, greatest = number(statistics.fmean(values)), *map(number, _ends(values))
    return mean if least == greatest else f"{mean} ({least}..{greatest})"


def _percent(values: Sequence[float]) -> str:
    mean, (least, greatest) = statistics.fmean(values), _ends(values)
    if f"{least:.0%}" == f"{greatest:.0%}":
        return _whole(mean)
    return f"{_whole(mean)} ({_whole(least)}..{_whole(greatest)})"


def _whole(share: float) -> str:
    return f"{round(100 * share)}%"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _held(terms: Sequence[StateTerm], share: str) -> str:
    found = sorted({term.held[share] or 0 for term in terms})
    if found == [0]:
        return "-"
    return "..".join(str(tokens) for tokens in (found[0], found[-1])[: len(found)])


def _most(s: Summary, groups: Callable[[Row], dict[str, Group]]) -> str:
    lost = s.lost(groups)
    if not s.biased or not lost:
        return "-"
    name = max(lost, key=lambda group: lost[group])
    return f"{'outside' if name == '-' else name}: {_whole(lost[name])}"


def _against(value: float | None, full: float | None, unit: float) -> str:
    if value is None or not full:
        return "-"
    return f"{number(value / unit)} ({value / full:.2f})"


def remarks(ablation: Ablation) -> Iterator[str]:
    """What does not hold, what did not fit, and where the references disagree, one line each."""
    for s in summaries(ablation.rows):
        for row in s.rows:
            if not row.holds:
                yield f"{row.arch} {row.policy} seed {row.seed}: {row.status}: {row.detail}"
        if s.status == "not_applicable":
            yield f"{s.first.arch} {s.first.policy} not applicable: {s.first.detail}"
    for term in ablation.inconsistent:
        yield (
            f"{term.arch} seed {term.seed}: the parts of the state term miss it by {term.left:.2g} of the full gradient"
        )


def show(ablation: Ablation, console: Console) -> None:
    for sheet in sheets(ablation):
        drawn = Table(title=sheet.title, title_justify="left", pad_edge=False)
        for header in sheet.headers:
            drawn.add_column(header, overflow="fold")
        for row in sheet.rows:
            drawn.add_row(*(Text(cell, style=STYLES.get(cell.split(" ")[0], "")) for cell in row))
        console.print(drawn)
    for remark in remarks(ablation):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)


def markdown(ablation: Ablation) -> str:
    """The tables, what they mean, and the command that made them."""
    here = ablation.environment
    lines = [
        f"Made by `lsverify {' '.join(ablation.command)}`: {ablation.dtype}, objective {ablation.objective}, torch "
        f"{here.packages.get('torch')}, transformers {here.packages.get('transformers')}.",
        "",
    ]
    for sheet in sheets(ablation):
        table = [sheet.headers, ["---"] * len(sheet.headers), *sheet.rows]
        lines += [f"## {sheet.title}", "", *(f"| {' | '.join(row)} |" for row in table), ""]
    lines += [line for note in NOTES for line in (note, "")]
    lines += [f"- {' '.join(remark.split())}" for remark in remarks(ablation)]
    return "\n".join(lines).rstrip() + "\n"


def write(ablation: Ablation, folder: Path) -> str | None:
    """Write ablation.json, ablation.md and ablation.html; returns why the page is left out, if it is.

    Raises `InputError` when the folder cannot be written to.
    """
    from lsverify import ablation_page, pages

    absent = pages.absent(ablation_page.PAGE)
    try:
        write_whole(folder / "ablation.json", ablation.model_dump_json(indent=1) + "\n")
        write_whole(
            folder / "ablation.md", f"# Ablation of detach policies\n\n{markdown(ablation)}"
        )
        if absent is None:
            write_whole(folder / ablation_page.PAGE, ablation_page.render(ablation))
    except OSError as error:
        raise InputError(f"out {str(folder)!r} cannot be written to ({error.strerror})") from None
    return absent
