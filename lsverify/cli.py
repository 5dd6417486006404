"""The command line: `lsverify gate` and its companions.

Exit codes: 0 every case reached its claim; 1 some did not, or nothing was proven; 2 bad input, said in one line; 3 a
fault of lsverify itself.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from lsverify import cli_files, cli_report
from lsverify.cli_candidates import candidates
from lsverify.cli_faults import alarms, faults, floors
from lsverify.cli_nightly import nightly
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

Arch = Annotated[
    list[str] | None,
    typer.Option(
        "--arch",
        help="llama, mistral, qwen3_5, glm_moe_dsa (all four if none is named), another family or any causal model type "
        "(see `lsverify archs`), all for every family, smollm2-135m, warm:llama and other "
        "warm starts, or a folder; repeatable.",
    ),
]
PolicySpec = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        help="exact, detach, window:M, tail:K, layers:0,2-3, kinds:recurrent,conv, roulette:P, stale:N, joined by + where "
        "it means something; repeatable; exact and detach if none is named. With --candidate it replaces what the "
        "candidate claims.",
    ),
]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from lsverify import __version__

        typer.echo(__version__)
        raise typer.Exit(0)


@app.command()
def gate(
    context: typer.Context,
    arch: Arch = None,
    policy: PolicySpec = None,
    candidate: Annotated[
        str | None,
        typer.Option(
            help="A path to judge: MODULE:NAME, or a name that `lsverify candidates` lists."
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option(help="declared: hold to what the path claims; full: to full autograd.")
    ] = "declared",
    require: Annotated[
        str | None,
        typer.Option(
            help="Highest rung that must hold: objective, execution, forward, gradient, optimizer_delta (the default)."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float64 (oracle), float32, bfloat16, bfloat16-autocast.")
    ] = "float64",
    prompt_length: Annotated[
        int | None, typer.Option(help="Tokens of the longest prompt; 24.")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Responses of the largest group; 4.")
    ] = None,
    response_length: Annotated[
        str | None, typer.Option(help="Tokens: N, or N,N,.. taken in turn; 5,1,7,3.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option(
            help="grpo, dr_grpo, dapo, bnpo, rloo, cispo, gspo, sapo, luspo, vespo or reinforce, options after commas: "
            "grpo,beta=0.04."
        ),
    ] = "grpo",
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    chunk: Annotated[
        int | None, typer.Option(help="Prompt tokens per capture and sweep pass; 8, of text 512.")
    ] = None,
    branches: Annotated[
        int | None, typer.Option(help="Responses per replay pass; 4 on smollm2-135m, else 1.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train peft adapters only.")] = False,
    quantised: Annotated[
        bool, typer.Option("--quantised", help="With --lora: over a base rounded to NF4.")
    ] = False,
    tied: Annotated[
        bool, typer.Option("--tied", help="Tie the head of a small model to its embedding.")
    ] = False,
    spans: Annotated[
        str,
        typer.Option(
            help="Prompt tokens that see each other both ways: none, image (two stretches), prefix (all but the last)."
        ),
    ] = "none",
    out: Annotated[
        Path | None, typer.Option(help="Folder for receipt.json; without it none is kept.")
    ] = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML file.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the receipt instead of the table.")
    ] = False,
    wandb: Annotated[str, typer.Option(help="offline, online or disabled.")] = "disabled",
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest problem that shows anything.")
    ] = False,
) -> int:
    """Judge a path on every architecture and policy, rung by rung."""
    from lsverify.cases import Options

    options = Options(
        archs=tuple(arch or ()),
        policies=tuple(policy or ()),
        candidate=candidate,
        reference=reference,
        require=require,
        dtype=dtype,
        prompt_length=prompt_length,
        group_size=group_size,
        response_length=response_length,
        objective=objective,
        seed=seed,
        chunk=chunk,
        branches=branches,
        lora=lora,
        quantised=quantised,
        tied=tied,
        spans=spans,
        quick=quick,
    )
    command = tuple(context.obj)
    return _gate(options, command, out=out, junit=junit, as_json=as_json, wandb=wandb)


def _gate(
    options: Any,
    command: tuple[str, ...],
    *,
    out: Path | None,
    junit: Path | None,
    as_json: bool,
    wandb: str,
) -> int:
    from lsverify import evidence, report, tracking
    from lsverify.gate import run_gate
    from lsverify.precision import deterministic

    tracking.check_mode(wandb)
    notes = report.wide_console(stderr=True)

    def progress(case: str, rung: evidence.Rung) -> None:
        line = f"{case:32} {rung.name:16} {rung.status:12} {report.number(rung.measure)}"
        notes.print(line, highlight=False, markup=False)

    # What a candidate prints when it is imported is not part of what this command prints.
    with redirect_stdout(sys.stderr):
        options.checked()
        if out is not None:
            evidence.check_folder(out)
        cases = run_gate(options, junit=junit, progress=progress)
    with deterministic():  # as the cases were judged
        here = evidence.environment()
    receipt = evidence.Receipt(environment=here, command=command, cases=tuple(cases))
    if out is not None:
        evidence.save(receipt, out / "receipt.json")
    if as_json:
        typer.echo(evidence.as_json(receipt))
    else:
        report.show(cases, report.wide_console())
    tracking.log(receipt, mode=wandb, folder=out)
    return evidence.exit_code(cases)


@app.command()
def repeat(receipt: Annotated[Path, typer.Argument(help="A receipt.json.")]) -> int:
    """Run every case of a receipt again and compare the numbers to the last bit; 1 if one differs or a claim is not reached."""
    from lsverify import report
    from lsverify.evidence import environment, exit_code, load
    from lsverify.precision import deterministic
    from lsverify.repeat import differences, elsewhere, run_again

    before = load(receipt)
    cases = run_again(before)
    console = report.wide_console()
    report.show(cases, console)
    found = differences(before.cases, cases)
    with deterministic():
        here = environment()
    for line in (*elsewhere(before.environment, here), *found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("every number is the same" if not found else f"{len(found)} numbers differ")
    return exit_code(cases) or (1 if found else 0)


@app.command()
def table(receipt: Annotated[Path, typer.Argument(help="A receipt.json.")]) -> int:
    """Print a receipt's table in Markdown, for a README or a pull request."""
    from lsverify import report
    from lsverify.evidence import load

    typer.echo(report.markdown(load(receipt).cases), nl=False)
    return 0


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def doctor() -> int:
    """Say what is installed, which devices there are, and what will be skipped and why."""
    from lsverify import doctor as doctors

    doctors.render(doctors.report())
    return 0


@app.command()
def schema() -> int:
    """Print the JSON schema of a receipt."""
    from lsverify.evidence import schema as receipt_schema

    typer.echo(json.dumps(receipt_schema(), indent=1))
    return 0


@app.command()
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


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


app.command()(candidates)
app.command()(alarms)
app.command()(faults)
app.command()(floors)
app.command()(nightly)
app.command()(cli_report.report)
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
