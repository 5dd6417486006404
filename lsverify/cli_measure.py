"""Commands that measure and list: `lsverify ablate`, `bench`, `archs`, `inventory` and `doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lsverify.errors import InputError


def inventory(
    arch: Annotated[str, typer.Argument(help="Family, smollm2-135m, a folder, or a model type.")],
    prompt_length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 64,
    dtype: Annotated[str, typer.Option(help="Precision of the state.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON.")] = False,
) -> int:
    """Show the state that a prompt leaves behind, by layer and kind."""
    from lsverify.inventory import rows_of, show

    rows = rows_of(arch, prompt_length=prompt_length, dtype=dtype)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0


def archs(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these families and model types.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Judge them now, and write archs.json and archs.md.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for what --prove writes.")] = Path("."),
    seconds: Annotated[int, typer.Option(help="Time limit for each name under --prove.")] = 180,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcomes as JSON.")] = False,
) -> int:
    """List every family and model type, and what is proven of each."""
    from lsverify import archs as architectures
    from lsverify import report

    outcomes = _proved(tuple(names or ()), out, seconds) if prove else architectures.recorded()
    if names:
        known = {o.name: o for o in outcomes.outcomes}
        if missing := [name for name in names if name not in known]:
            raise InputError(f"{missing[0]!r} is neither a family nor a model type with an outcome")
        outcomes = outcomes.model_copy(update={"outcomes": tuple(known[n] for n in names)})
    if as_json:
        typer.echo(outcomes.model_dump_json(indent=1))
    else:
        architectures.show(outcomes, report.wide_console())
    wrong = outcomes.count("failed") + outcomes.count("error")
    return 1 if prove and wrong else 0


def _proved(names: tuple[str, ...], out: Path, seconds: int) -> Any:
    """Outcomes made now; those of other names are kept where the folder has them."""
    from lsverify import archs as architectures
    from lsverify import evidence, report

    known = architectures.names()
    if unknown := [name for name in names if name not in known]:
        raise InputError(
            f"{unknown[0]!r} is neither a family nor a model type: lsverify archs lists both"
        )
    evidence.check_folder(out)
    notes = report.wide_console(stderr=True)

    outcomes = architectures.in_folder(out)
    for found in architectures.prove(names or known, seconds=seconds):
        line = f"{found.name:28} {found.outcome:8} {report.number(found.rel_l2):8} {found.line}"
        notes.print(line, highlight=False, markup=False, soft_wrap=True)
        # One by one, so that what was found is kept if the rest is interrupted.
        outcomes = architectures.merged(outcomes, found)
        architectures.write(outcomes, out)
    return outcomes


def bench(
    path: Annotated[
        list[str] | None,
        typer.Option("--path", help="full_batched, full_serial, or a policy; repeatable."),
    ] = None,
    prompt_length: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    group_size: Annotated[list[int] | None, typer.Option(help="Responses; repeatable.")] = None,
    response_length: Annotated[int, typer.Option(help="Tokens of each response.")] = 64,
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens per capture and sweep pass.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    out: Annotated[Path | None, typer.Option(help="JSON file for the numbers.")] = None,
) -> int:
    """Measure time and memory of full batched, full serial, exact and detach, each in fresh processes."""
    from lsverify import benchmark, report

    sizes = {
        "paths": tuple(path or ()) or None,
        "prompt_length": prompt_length,
        "group_sizes": tuple(group_size or ()) or None,
        "response_length": response_length,
        "chunk": chunk,
        "layers": layers,
        "width": width,
    }
    workload = benchmark.workload(
        **{name: value for name, value in sizes.items() if value is not None}
    )
    notes, console = report.wide_console(stderr=True), report.wide_console()
    result = benchmark.run(workload, lambda line: notes.print(line, highlight=False))
    console.print(benchmark.table(result))
    for line in benchmark.summary(result):
        console.print(line, highlight=False)
    if out is not None:
        benchmark.write(result, out)
    return 0


def doctor() -> int:
    """Say what is installed, which devices there are, and what will be skipped and why."""
    from lsverify import doctor as doctors

    doctors.render(doctors.report())
    return 0


def ablate(
    context: typer.Context,
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help="As for gate; all tiny architectures if none is named."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            help="As for gate; exact, detach, windows, each kind, halves of the layers and roulette if none is named.",
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Prompt tokens: N,N,..; 24, of text 512.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many, from 0; 2, of smollm2-135m 1.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Responses of the largest group; 4.")
    ] = None,
    response_length: Annotated[
        str | None, typer.Option(help="Tokens: N, or N,N,.. taken in turn; 5,1,7,3.")
    ] = None,
    objective: Annotated[str, typer.Option(help="As for gate.")] = "grpo",
    dtype: Annotated[str, typer.Option(help="float64 (oracle) or float32.")] = "float64",
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens per capture and sweep pass; 8, of text 512.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for ablation.json, ablation.md, ablation.html.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print ablation.json instead of the tables.")
    ] = False,
    wandb: Annotated[str, typer.Option(help="offline, online or disabled.")] = "disabled",
    workers: Annotated[int, typer.Option(help="Processes, one architecture each.")] = 1,
) -> int:
    """Measure what each detach policy loses on each architecture, where it lives, and what it saves."""
    from lsverify import ablation, ablation_report, evidence, report, tracking
    from lsverify.ablation_records import Ablation
    from lsverify.precision import deterministic

    tracking.check_mode(wandb)
    request = ablation.Request(
        archs=tuple(arch or ()),
        policies=tuple(policy or ()),
        lengths=ablation.lengths_of(lengths),
        seeds=seeds,
        group_size=group_size,
        response_length=response_length,
        objective=objective,
        dtype=dtype,
        chunk=chunk,
    )
    if out is not None:
        evidence.check_folder(out)
    notes = report.wide_console(stderr=True)
    rows, terms = ablation.run(
        request,
        workers=workers,
        progress=lambda line: notes.print(line, highlight=False, markup=False),
    )
    with deterministic():  # as the rows were measured
        here = evidence.environment()
    result = Ablation(
        environment=here,
        command=tuple(context.obj),
        dtype=dtype,
        objective=objective,
        rows=tuple(rows),
        state_terms=tuple(terms),
    )
    if out is not None and (absent := ablation_report.write(result, out)):
        notes.print(absent, highlight=False, markup=False, soft_wrap=True)
    if as_json:
        typer.echo(result.model_dump_json(indent=1))
    else:
        ablation_report.show(result, report.wide_console())
    tracking.log_ablation(result, mode=wandb, folder=out)
    return result.exit_code
