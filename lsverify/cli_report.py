"""The command `lsverify report`: what a night found, as a page, as Markdown, as JUnit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    folder: Annotated[Path, typer.Argument(help="What `lsverify nightly --out` made.")],
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print Markdown for a pull request, and write no page."),
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML file.")] = None,
) -> int:
    """Write one self-contained page, DIR/nightly.html, about the last night of a folder.

    DIR/receipt.json (`lsverify gate --out DIR`) and DIR/ablation.json (`lsverify ablate --out DIR`) are shown too where they
    are. The exit code says whether the report was written; the night's own is that of `lsverify nightly`.
    """
    from lsverify import nightly_summary
    from lsverify.nightly_page import read_night, write_page

    record = read_night(folder)
    if junit is not None:
        nightly_summary.write_junit(record, junit)
    typer.echo(
        nightly_summary.markdown(record) if markdown else write_page(folder), nl=not markdown
    )
    return 0
