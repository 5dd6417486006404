"""Commands of the gate: `lsverify gate`, and what is made of its receipts, `repeat`, `table` and `schema`."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

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


def table(receipt: Annotated[Path, typer.Argument(help="A receipt.json.")]) -> int:
    """Print a receipt's table in Markdown, for a README or a pull request."""
    from lsverify import report
    from lsverify.evidence import load

    typer.echo(report.markdown(load(receipt).cases), nl=False)
    return 0


def schema() -> int:
    """Print the JSON schema of a receipt."""
    from lsverify.evidence import schema as receipt_schema

    typer.echo(json.dumps(receipt_schema(), indent=1))
    return 0
