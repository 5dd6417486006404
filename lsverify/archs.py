"""`lsverify archs`: every family and model type, and what was proven of each with which version of the library.

The outcomes on record are in `fixtures/archs.json`, one line each; `prove` makes them anew.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import warnings
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console
from rich.table import Table

from lsverify.errors import InputError
from lsverify.whole_files import appearing

FILE, PAGE = "archs.json", "archs.md"
SECONDS = 180


class Outcome(BaseModel):
    """What one name came to: `exact` judged on the smallest problem at oracle precision, through the whole ladder.

    `family` says that the name is a config of this project's own; else it is a model type, shrunk by rule. `rel_l2` is
    the gradient's distance to full autograd; `line` says why something is not proven.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    family: bool
    outcome: Literal["proven", "failed", "refused", "error"]
    rel_l2: float | None = None
    line: str = ""


class Outcomes(BaseModel):
    """All outcomes, with the version of transformers that they hold for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    transformers: str
    outcomes: tuple[Outcome, ...]

    def count(self, outcome: str) -> int:
        return sum(found.outcome == outcome for found in self.outcomes)


def names() -> list[str]:
    """Every family and every model type, each once."""
    from lsverify.families import TINY
    from lsverify.shrink import model_types

    return sorted({*TINY, *model_types()})


def recorded() -> Outcomes:
    """The outcomes that came with this version. Raises `InputError` where they are not there or cannot be read."""
    package = Path(__file__).parent
    for folder in (package / "fixtures", package.parent / "fixtures"):
        if (found := in_folder(folder)) is not None:
            return found
    raise InputError(f"no {FILE} beside {str(package)!r}: make one with `lsverify archs --prove`")


def in_folder(folder: Path) -> Outcomes | None:
    """The outcomes in a folder, None where it has none. Raises `InputError` where they cannot be read."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        return Outcomes.model_validate_json(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise InputError(
            f"{file} is no table of outcomes: {error.errors()[0]['msg']}; delete it, and make it anew with --prove"
        ) from None


def prove(asked: Iterable[str], *, seconds: int = SECONDS) -> Iterator[Outcome]:
    """Judge every name in a process of its own, `seconds` at most for each.

    Processes are forked from a server that has imported this package and done nothing else.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lsverify.ladder", "lsverify.models"])
    for name in asked:
        yield _in_process(context, name, seconds)


def installed() -> str:
    """The version of transformers that runs here."""
    return importlib.metadata.version("transformers")


def merged(before: Outcomes | None, found: Outcome) -> Outcomes:
    """`found`, and what `before` has of other names, if it is of the version of the library that is installed."""
    kept = before.outcomes if before and before.transformers == installed() else ()
    by_name = {outcome.name: outcome for outcome in (*kept, found)}
    return Outcomes(
        transformers=installed(), outcomes=tuple(by_name[name] for name in sorted(by_name))
    )


def _in_process(context: Any, name: str, seconds: int) -> Outcome:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_outcome, args=(there, name), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(seconds):
            return _outcome(name, "error", line=f"no outcome within {seconds} seconds")
        return Outcome.model_validate(here.recv())
    except EOFError:
        process.join()
        return _outcome(name, "error", line=f"its process ended with exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _send_outcome(there: Connection, name: str) -> None:
    there.send(outcome_of(name).model_dump())


def outcome_of(name: str) -> Outcome:
    """Judge one name in this process; whatever is raised is an outcome."""
    from lsverify.cases import Options
    from lsverify.ladder import judge

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (case,) = Options(archs=(name,), policies=("exact",), quick=True).cases()
            receipt = judge(case)
    except InputError as error:
        return _outcome(name, "refused", line=_one_line(error))
    except Exception as error:  # a fault of ours, or of a model's code that nothing here foresaw
        return _outcome(name, "error", line=f"{type(error).__name__}: {_one_line(error)}")
    measures = {rung.name: rung.measure for rung in receipt.rungs}
    rel_l2 = measures.get("gradient")
    if receipt.reached:
        return _outcome(name, "proven", rel_l2=rel_l2)
    first = next(rung for rung in receipt.rungs if not rung.holds)
    return _outcome(name, "failed", rel_l2=rel_l2, line=f"{first.name}: {_one_line(first.detail)}")


def _outcome(name: str, outcome: Any, *, rel_l2: float | None = None, line: str = "") -> Outcome:
    from lsverify.families import TINY

    return Outcome(name=name, family=name in TINY, outcome=outcome, rel_l2=rel_l2, line=line)


def write(outcomes: Outcomes, folder: Path) -> None:
    """`archs.json`, one outcome a line, and `archs.md`, the same to read."""
    lines = ",\n".join(json.dumps(o.model_dump(), ensure_ascii=False) for o in outcomes.outcomes)
    with appearing(folder / FILE) as temporary:
        temporary.write_text(
            f'{{"transformers": "{outcomes.transformers}", "outcomes": [\n{lines}\n]}}\n',
            encoding="utf-8",
        )
    with appearing(folder / PAGE) as temporary:
        temporary.write_text(page(outcomes), encoding="utf-8")


def page(outcomes: Outcomes) -> str:
    """The outcomes in Markdown."""
    rows = [
        f"| `{o.name}` | {'family' if o.family else 'type'} | {o.outcome} | {_number(o.rel_l2)} | "
        f"{o.line.replace('|', '/')} |"
        for o in outcomes.outcomes
    ]
    return "\n".join(
        [
            "# What is proven, name by name",
            "",
            f"`lsverify archs --prove` with transformers {outcomes.transformers}: {summary(outcomes)}. Each name was "
            "judged by `lsverify gate --arch NAME --policy exact --quick`, in a process of its own: the gradient of "
            "`exact` held to full autograd in float64, where 1e-12 is the limit. A family is a small config of this "
            "project's own; a type is the library's default config of that name, shrunk by rule to one layer of each "
            "kind. `exact` is claimed for nothing that is refused.",
            "",
            "| name | config | outcome | relative L2 | why not |",
            "| --- | --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def summary(outcomes: Outcomes) -> str:
    """How many came to what, in a line."""
    kinds = ("proven", "refused", "failed", "error")
    counted = [f"{n} {kind}" for kind in kinds if (n := outcomes.count(kind))]
    return f"of {len(outcomes.outcomes)} names {', '.join(counted)}"


def show(outcomes: Outcomes, console: Console) -> None:
    """The table, the counts, and whether they hold for the library that is installed."""
    table = Table("name", "config", "outcome", "rel L2", "why not", pad_edge=False)
    for o in outcomes.outcomes:
        table.add_row(
            o.name, "family" if o.family else "type", o.outcome, _number(o.rel_l2), o.line
        )
    console.print(table)
    console.print(f"transformers {outcomes.transformers}: {summary(outcomes)}", highlight=False)
    if outcomes.transformers != installed():
        console.print(
            f"transformers {installed()} is installed, another version: these outcomes need not hold for it; "
            "run lsverify archs --prove",
            highlight=False,
        )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:400]
