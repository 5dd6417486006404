"""The command line: `lsverify gate` and its companions.

Exit codes: 0 every case reached its claim; 1 some did not, or nothing was proven; 2 bad input, said in one line; 3 a
fault of lsverify itself.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer
from typer.exceptions import TyperException

from lsverify import cli_files
from lsverify.cli_candidates import candidates
from lsverify.cli_faults import alarms, faults, floors
from lsverify.cli_gate import gate, repeat, schema, table
from lsverify.cli_measure import ablate, archs, bench, doctor, inventory
from lsverify.cli_nightly import nightly
from lsverify.cli_report import report
from lsverify.errors import InputError

# Exit codes that typer itself gives: after Ctrl-C, and when nobody reads on.
INTERRUPTED = 130
CLOSED_PIPE = 1

app = typer.Typer(
    name="lsverify",
    help="Proves or refuses that a long-context GRPO path trains the policy that ordinary GRPO would have trained.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from lsverify import __version__

        typer.echo(__version__)
        raise typer.Exit(0)


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


# In the order of `lsverify --help`.
for command in (
    *(gate, repeat, table, inventory, archs, bench, doctor, schema, ablate),
    *(candidates, alarms, faults, floors, nightly, report),
):
    app.command()(command)
cli_files.register(app)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    # The model library warns of each missing kernel; the reference code it falls back to is what is wanted here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        result = app(arguments, standalone_mode=False, obj=tuple(arguments))
    except InputError as error:
        return _refuse(str(error))
    except TyperException as error:
        told = getattr(error, "format_message", error.__str__)()
        if not arguments:  # what is told is the help text
            typer.echo(told)
            return 2
        return _refuse(f"{told} (lsverify --help lists what there is)")
    except SystemExit as error:
        if error.code == CLOSED_PIPE:
            return CLOSED_PIPE
        return _fault()
    except BaseException:  # nothing but a verdict may end as a success
        return _fault()
    if result == INTERRUPTED:
        return _refuse("interrupted; nothing half written is left behind")
    return result if isinstance(result, int) else 0


def _fault() -> int:
    traceback.print_exc()
    typer.echo("lsverify: this is a fault of lsverify itself; please report it", err=True)
    return 3


def _refuse(line: str) -> int:
    typer.echo(f"lsverify: {' '.join(line.split())}", err=True)
    return 2


if __name__ == "__main__":
    main()
