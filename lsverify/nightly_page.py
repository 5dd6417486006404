"""A night as one self-contained page: verdicts, ladder, curves, distributions, biases, drift, cost, how to reproduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from lsverify import nightly_plots as plots
from lsverify import nightly_tables as tables
from lsverify import pages, report
from lsverify.ablation_records import Ablation, Group
from lsverify.ablation_report import Sheet, Summary, sheets, summaries
from lsverify.arms import REFERENCE, YARDSTICK
from lsverify.curves import Curve, StepRow
from lsverify.errors import InputError
from lsverify.evidence import Receipt, load
from lsverify.nightly_record import RECORD, EntryRecord, Nightly
from lsverify.pages import Plot
from lsverify.whole_files import read_record, write_whole

PAGE = "nightly.html"
Looks = Mapping[str, plots.Look]

# Title, unit and what of a step's row is shown.
TRACED: tuple[tuple[str, str, Callable[[StepRow], float | None]], ...] = (
    ("Reward of rollouts", "reward (percent points)", lambda row: 100 * row.reward),
    ("KL to the start", "KL, mean over tokens (nats)", lambda row: row.kl_to_start),
    ("Entropy of responses", "entropy, mean over tokens (nats)", lambda row: row.entropy),
    ("Norm of the gradient, before clipping", "L2 norm", lambda row: row.gradient_norm),
    ("Length of responses", "tokens", lambda row: row.response_length),
)
COMPARED: tuple[tuple[str, str, Callable[[StepRow], float | None]], ...] = (
    (
        "Cosine of the gradient to full autograd's",
        "cosine",
        lambda row: row.to_full.cosine if row.to_full else None,
    ),
    (
        "Relative L2 of the gradient to full autograd's",
        "relative L2",
        lambda row: row.to_full.rel_l2 if row.to_full else None,
    ),
)


def read_night(folder: Path) -> Nightly:
    """The last night of a folder. Raises `InputError`."""
    if not (folder / RECORD).is_file():
        raise InputError(
            f"folder {str(folder)!r} has no {RECORD}: give one that `lsverify nightly --out` made"
        )
    return read_record(Nightly, folder / RECORD)


def write_page(folder: Path) -> Path:
    """`folder`/nightly.html from what the folder holds: nightly.json, its curves, and receipt.json and ablation.json if there.

    Needs the `report` extra. Raises `InputError` without it, for a folder without a night, and for files that cannot be read.
    """
    if (missing := pages.absent(PAGE)) is not None:
        raise InputError(missing)
    page = render(read_night(folder), folder)
    try:
        write_whole(folder / PAGE, page)
    except OSError as error:
        raise InputError(
            f"{PAGE} cannot be written to {str(folder)!r} ({error.strerror})"
        ) from None
    return folder / PAGE


def render(record: Nightly, folder: Path) -> str:
    """The page as HTML."""
    receipt = load(folder / "receipt.json") if (folder / "receipt.json").exists() else None
    file = folder / "ablation.json"
    ablation = read_record(Ablation, file) if file.exists() else None
    arms = list(dict.fromkeys(arm for each in record.entries for arm in each.entry.arms))
    seen = plots.looks(arms)
    swatches = {arm: pages.swatch(arm, seen[arm].line) for arm in arms}
    compared = [each for each in record.entries if each.comparison]
    claiming = dict.fromkeys(arm for each in compared for arm in each.verdicts)
    return pages.render(
        "nightly_page.html",
        record=record,
        tables=tables,
        claims=[swatches[arm] for arm in claiming],
        entries=[_entry(each, folder, seen, swatches) for each in record.entries],
        overall=plots.all_biases(compared, seen)
        if len(compared) > 1 and any(arm.bias for each in compared for arm in each.arms)
        else None,
        ladder=_ladder(receipt) if receipt else None,
        heat=list(chain.from_iterable(_heat(ablation))) if ablation else [],
        far=[sheet for sheet in sheets(ablation) if sheet.key.startswith("distances")]
        if ablation
        else [],
    )


def _entry(
    each: EntryRecord, folder: Path, seen: Looks, swatches: Mapping[str, Plot]
) -> dict[str, Any]:
    """What the page shows of one entry. Trainings that broke off are in the verdicts and not in the curves."""
    whole: dict[str, list[Curve]] = {arm: [] for arm in each.entry.arms}
    for training, curve in each.curves(folder).items():
        if curve.reaches(training.steps):
            whole[training.arm].append(curve)
    curves = {arm: own for arm, own in whole.items() if own}
    biases = {
        arm.arm: arm.bias for arm in each.arms if arm.bias and arm.arm in each.verdicts
    }  # without control and yardstick
    found = each.comparison
    return {
        "record": each,
        "name": each.entry.name,
        "gaps": plots.gaps(found, seen) if found else None,
        "key": [swatches[arm] for arm in each.entry.arms],
        "claims": [swatches[arm] for arm in each.verdicts],
        "curves": _curves(curves, seen) if curves else [],
        "tested": _tested(curves) if curves else None,
        "distribution": plots.distributions(curves, seen) if curves else None,
        "biases": [plots.bias_and_gap(biases, seen)] if biases else [],
        "spans": [
            (
                plots.spans(of, own, list(each.verdicts), seen),
                tables.spans(each, of),
            )
            for of in plots.WHERE
            if (own := [span for span in each.spans if span.of == of])
        ],
    }


def _curves(curves: plots.Curves, seen: Looks) -> list[Plot]:
    steps, tested = plots.tested(curves)
    label = "test reward (percent points)"
    found = [plots.over_steps("Test reward", label, steps, tested, seen, marks=True)]
    for title, unit, of in TRACED:
        found.append(plots.over_steps(title, unit, *plots.stepped(curves, of), seen))
    trained = {arm: own for arm, own in curves.items() if arm not in (REFERENCE, YARDSTICK)}
    for title, unit, of in COMPARED if trained else ():
        at, values = plots.stepped(trained, of)
        found.append(plots.over_steps(title, unit, at, values, seen, marks=True))
    return [plot for plot in found if plot is not None]


def _tested(curves: plots.Curves) -> Sheet:
    """The numbers of the first plot."""
    steps, tested = plots.tested(curves)
    rows = []
    for arm, values in tested.items():
        mean, half = plots.band(values)
        rows.append((arm, *(f"{m:.1f} ± {h:.1f}" for m, h in zip(mean, half, strict=True))))
    return Sheet(
        key="tested",
        title="Test reward (points) after so many optimizer steps, mean and 95% t interval over seeds",
        headers=("arm", *(f"{step:.0f}" for step in steps)),
        rows=rows,
    )


def _ladder(receipt: Receipt) -> Sheet:
    reached = sum(case.reached for case in receipt.cases)
    return Sheet(
        key="ladder",
        title=f"{reached} of {len(receipt.cases)} cases reached their claim (lsverify {' '.join(receipt.command)})",
        headers=report.HEADERS,
        rows=[report.row(case) for case in receipt.cases],
    )


def _heat(ablation: Ablation) -> list[list[dict[str, Any]]]:
    """For each architecture and prompt length two maps, by layer and by kind: relative L2 of a policy's gradient to full autograd's."""
    groups: dict[tuple[str, int], list[Summary]] = {}
    for summary in summaries(ablation.rows):
        if summary.status != "not_applicable":
            groups.setdefault((summary.first.arch, summary.first.length), []).append(summary)
    return [
        [
            _map(f"{arch}, prompt of {length} tokens: {by}", some, of)
            for by, of in (
                ("by layer", lambda row: row.per_layer),
                ("by kind of parameter", lambda row: row.per_kind),
            )
        ]
        for (arch, length), some in groups.items()
    ]


def _map(
    title: str, some: Sequence[Summary], of: Callable[[Any], dict[str, Group]]
) -> dict[str, Any]:
    names = list(dict.fromkeys(name for s in some for row in s.rows for name in of(row)))
    rows = []
    for s in some:
        cells = []
        for name in names:
            found = [of(row)[name].rel_l2 for row in s.rows if name in of(row)]
            values = [value for value in found if value is not None]
            mean = sum(values) / len(values) if values else None
            cells.append((report.number(mean), round(min(mean or 0.0, 1.0), 3)))
        rows.append((s.first.policy, cells))
    headers = ["outside layers" if name == "-" else name for name in names]
    return {"title": title, "headers": headers, "rows": rows}
