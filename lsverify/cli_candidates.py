"""The command `candidates`: which names `gate --candidate` knows."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from sys import stderr
from typing import Annotated

import typer

from lsverify.errors import InputError


def candidates(
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
) -> int:
    """List the candidates that are installed under a name, and whether what they need is installed too."""
    from rich.table import Table

    from lsverify import report

    found = rows()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return 0
    table = Table("name", "candidate", "registered by", "state")
    for row in found:
        table.add_row(*row.values())
    report.wide_console().print(table)
    return 0


def rows() -> list[dict[str, str]]:
    """Name, MODULE:NAME, the distribution that registers it, and `ready` or why it cannot be imported."""
    from lsverify.candidate_names import registered

    return [
        {
            "name": point.name,
            "candidate": point.value,
            "registered by": f"{point.dist.name} {point.dist.version}" if point.dist else "",
            "state": _state(point.name),
        }
        for point in registered()
    ]


def _state(name: str) -> str:
    from lsverify.cases import load_candidate

    try:
        with redirect_stdout(stderr):  # what a module prints on import is no part of the list
            load_candidate(name)
    except InputError as error:
        return str(error).removeprefix(f"candidate {name!r}: ")
    return "ready"
