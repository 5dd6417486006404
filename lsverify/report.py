"""Cases as people read them: a table for the terminal, the same in Markdown, and what failed in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lsverify.evidence import RUNGS, CaseReceipt, Distance, Rung

STYLES = {"proven": "green", "proven_zero": "green", "failed": "bold red", "error": "bold red"}
HEADERS = (
    "architecture",
    "policy",
    "reference",
    *(name.replace("_", " ") for name in RUNGS),
    "rel L2",
    "worst parameter",
    "bias rel L2",
    "cosine",
    "norm ratio",
    "ours / paper",
)


def row(case: CaseReceipt) -> list[str]:
    """One case in the order of `HEADERS`; rel L2 is to the claimed reference, bias to full autograd."""
    statuses = {rung.name: rung.status for rung in case.rungs}
    gradient = case.gradient
    return [
        case.arch,
        " ".join(filter(None, (case.candidate, case.policy))) or "full",
        case.reference,
        *(statuses.get(name, "not_run") for name in RUNGS),
        number(gradient.rel_l2 if gradient else None),
        short(gradient.worst_parameter if gradient else None),
        *_bias(case.bias),
        f"{'pass' if case.reached else 'FAIL'} / {_paper(case.paper_gate)}",
    ]


def _bias(bias: Distance | None) -> list[str]:
    if bias is None:
        return ["-", "-", "-"]
    cosine = "-" if bias.cosine is None else f"{bias.cosine:.5f}"
    ratio = "-" if bias.norm_ratio is None else f"{bias.norm_ratio:.4f}"
    return [number(bias.rel_l2), cosine, ratio]


def _paper(gate: bool | None) -> str:
    return "-" if gate is None else "pass" if gate else "fail"


def number(value: float | None) -> str:
    """Two significant digits; a dash where there is no number."""
    return "-" if value is None else f"{value:.1e}" if 0 < abs(value) < 1e-3 else f"{value:.3g}"


def short(name: str | None) -> str:
    """A parameter's name without what all names share."""
    return (
        "-" if name is None else name.replace("base_model.model.", "").replace("model.layers.", "")
    )


def table(cases: Sequence[CaseReceipt]) -> Table:
    """The gate's table."""
    drawn = Table(show_lines=False, pad_edge=False)
    for header in HEADERS:
        drawn.add_column(header, overflow="fold")
    for case in cases:
        drawn.add_row(*(Text(cell, style=_style(cell)) for cell in row(case)))
    return drawn


def _style(cell: str) -> str:
    return STYLES.get(cell, "red" if cell.startswith("FAIL") else "")


def markdown(cases: Iterable[CaseReceipt]) -> str:
    """The gate's table for a README or a pull request."""
    lines = [HEADERS, ["---"] * len(HEADERS), *(row(case) for case in cases)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def failures(cases: Iterable[CaseReceipt]) -> list[tuple[str, Rung]]:
    """Every rung asked for that does not hold, with its case's name."""
    found = []
    for case in cases:
        name = " ".join(filter(None, (case.arch, case.candidate, case.policy)))
        found += [(name, rung) for rung in case.unmet]
    return found


def show(cases: Sequence[CaseReceipt], console: Console) -> None:
    """Table, then warnings, then failures in words, then one line that sums up."""
    console.print(table(cases))
    for warning in dict.fromkeys(text for case in cases for text in case.warnings):
        console.print(Text.assemble(("warning ", "yellow"), warning), soft_wrap=True)
    for name, rung in failures(cases):
        console.print(Text(f"{name}: {rung.name} {rung.status}", style="bold red"))
        console.print(Text(rung.detail), soft_wrap=True)
    reached = sum(case.reached for case in cases)
    console.print(f"{reached} of {len(cases)} cases reached their claim")


def wide_console(*, stderr: bool = False) -> Console:
    """A console that does not fold the table where nobody is looking at a screen."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=200)
