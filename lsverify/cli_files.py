"""Commands for gradients that live in files: `export`, `check` and `diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lsverify.errors import InputError

Option = typer.Option


def export(
    case: Annotated[
        str,
        typer.Argument(
            help="ARCH or ARCH:POLICY, as for gate: llama, llama:detach; exact if none."
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    dtype: Annotated[
        str, Option(help="float32, float64 (oracle), bfloat16, bfloat16-autocast.")
    ] = "float32",
    prompt_length: Annotated[int | None, Option(help="As for gate.")] = None,
    group_size: Annotated[int | None, Option(help="As for gate.")] = None,
    response_length: Annotated[str | None, Option(help="As for gate.")] = None,
    objective: Annotated[str, Option(help="As for gate.")] = "grpo",
    seed: Annotated[int, Option(help="Seed of weights and data.")] = 0,
    tied: Annotated[bool, Option("--tied", help="As for gate.")] = False,
    spans: Annotated[str, Option(help="As for gate.")] = "none",
    quick: Annotated[bool, Option("--quick", help="As for gate.")] = False,
) -> int:
    """Write a case's config, weights, problem and instructions for a stack that has no lsverify."""
    from lsverify.cases import Options
    from lsverify.export import export as write

    arch, policy = _arch_and_policy(case)
    (config,) = Options(
        archs=(arch,),
        policies=(policy,),
        dtype=dtype,
        prompt_length=prompt_length,
        group_size=group_size,
        response_length=response_length,
        objective=objective,
        seed=seed,
        tied=tied,
        spans=spans,
        quick=quick,
    ).cases()
    for path in write(config, folder):
        typer.echo(str(path))
    return 0


def _arch_and_policy(case: str) -> tuple[str, str]:
    """A folder's name may have a colon of its own, and a policy has several."""
    if Path(case).is_dir():
        return case, "exact"
    arch, _, policy = case.partition(":")
    if arch == "all":
        raise InputError("export writes one case: name one architecture")
    return arch, policy or "exact"


def check(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folder that export wrote.")],
    gradients: Annotated[
        Path,
        typer.Argument(help="Safetensors file, index of shards, or folder of files, one a rank."),
    ],
    names: Annotated[
        str | None,
        Option("--map", help="Name map: a TOML file, or megatron_core, megatron_core:tp=2,ep=2."),
    ] = None,
    allow_missing: Annotated[
        str, Option(help="Rungs that may lack evidence: execution,forward,optimizer_delta.")
    ] = "",
    require: Annotated[str | None, Option(help="Highest rung that must hold, as for gate.")] = None,
    out: Annotated[Path | None, Option(help="Folder for receipt.json.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the receipt.")] = False,
) -> int:
    """Judge a gradient that another stack dumped; 0 only if nothing is missing that is not allowed to be."""
    from lsverify import evidence, report
    from lsverify.check import check as judge
    from lsverify.check import verdict
    from lsverify.precision import deterministic

    if out is not None:
        evidence.check_folder(out)
    missing = [name for name in allow_missing.split(",") if name]
    case = judge(folder, gradients, map_spec=names, allow_missing=missing, require=require)
    with deterministic():  # as the case was judged
        here = evidence.environment()
    receipt = evidence.Receipt(environment=here, command=tuple(context.obj), cases=(case,))
    if out is not None:
        evidence.save(receipt, out / "receipt.json")
    if as_json:
        typer.echo(evidence.as_json(receipt))
    else:
        console = report.wide_console()
        report.show([case], console)
        console.print(verdict(case), highlight=False, markup=False, soft_wrap=True)
    return evidence.exit_code([case])


def diff(
    a: Annotated[Path, typer.Argument(help="Safetensors file, index of shards, or folder.")],
    b: Annotated[Path, typer.Argument(help="The same, held to the first.")],
    limit: Annotated[
        float | None,
        Option(help="Largest relative L2 of a tensor; 1e-12 in float64, else 4 eps of the dtype."),
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print every tensor as JSON.")] = False,
) -> int:
    """Compare two files of gradients of any size; 0 equal, 1 not."""
    import json

    from lsverify import report
    from lsverify.diff import diff as compare

    found = compare(a, b, limit)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
        return 1 if found.unequal else 0
    console = report.wide_console()
    console.print(found.table())
    line = f"{found.unequal} of {len(found.differences)} tensors differ by more than their limit"
    console.print(line, highlight=False)
    return 1 if found.unequal else 0


def register(app: Any) -> None:
    """Add the commands to the command line."""
    for command in (export, check, diff):
        app.command()(command)
