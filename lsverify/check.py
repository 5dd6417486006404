"""`lsverify check`: a gradient that another stack dumped, held to references that are made here from the case alone.

A file shows less than a run that is watched. A rung without evidence is `not_run`, which is no pass; who can live
without it says so by name, and the receipt keeps that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt, FileEvidence, Rung, RungName
from lsverify.export import read_case, require_same, sha256
from lsverify.foreign import Answer, Names, answer_of, gradients_of, names_of
from lsverify.ladder import (
    clamped,
    distance,
    objective_rung,
    parameters,
    too_coarse,
    zero_gradient,
)
from lsverify.models import is_small
from lsverify.name_maps import read_map
from lsverify.observe import Run
from lsverify.paths import StepResult
from lsverify.precision import deterministic, threads
from lsverify.referee import Claim, Referee, claim_of
from lsverify.rungs.forward import compared
from lsverify.rungs.gradient import gradient
from lsverify.rungs.one_step import one_step
from lsverify.setting import make_setting
from lsverify.tensor_files import open_tensors, shown
from lsverify.trace import Choice, Place, Site, Trace

# Rungs that a file may lack; its gradient is what it is checked for, and the objective is ours.
MAY_LACK: tuple[RungName, ...] = ("execution", "forward", "optimizer_delta")


def check(
    folder: Path,
    gradients: Path,
    *,
    map_spec: str | None = None,
    allow_missing: Sequence[str] = (),
    require: str | None = None,
) -> CaseReceipt:
    """Judge a file of gradients against the case of an exported folder. Raises `InputError` for unusable files."""
    allowed = _rungs("allow-missing", allow_missing, MAY_LACK)
    owner = read_map(map_spec) if map_spec else None
    config = read_case(folder)
    files = open_tensors(gradients)
    if require is not None:
        (needed,) = _rungs("require", [require], RUNGS)
        config = config.model_copy(update={"require": needed})
    setting = make_setting(config)
    require_same(setting, folder)
    names = names_of(setting.model, owner)
    answer = answer_of(files, names, setting.problem)
    evidence = FileEvidence(
        folder=str(folder),
        gradients=str(gradients),
        map=map_spec,
        # After shapes were held against the model's: what does not belong here may be of any size.
        sha256=sha256(sorted({entry.file for entry in files.entries.values()})),
        allow_missing=allowed,
    )
    one_thread = threads(1 if is_small(config.arch) else None)
    with setting.computing(), one_thread, deterministic():
        return _judged(config, Referee(setting), answer, names, evidence)


def _rungs(name: str, given: Sequence[str], allowed: Sequence[RungName]) -> tuple[RungName, ...]:
    if wrong := [rung for rung in given if rung not in allowed]:
        raise InputError(f"{name} {wrong[0]!r} is not allowed: use {', '.join(allowed)}")
    return tuple(rung for rung in allowed if rung in given)


def _judged(
    config: CaseConfig, referee: Referee, answer: Answer, names: Names, evidence: FileEvidence
) -> CaseReceipt:
    setting = referee.setting
    claim = claim_of(config, None, setting.objective)
    full = Claim(label="full", policy=None, objective=claim.objective)
    expected = referee.oracle(claim).gradients
    unreached = [name for name, value in expected.items() if value is None]
    names.require(answer.values, Path(evidence.gradients), unreached)
    run = Run(gradients=gradients_of(answer.values, expected))
    against_claim = referee.compared(claim, run.gradients)
    against_full = referee.compared(full, run.gradients)
    shown = {
        "objective": lambda: objective_rung(config, referee, claim),
        "execution": lambda: _nothing("execution", "a file does not show how its step was run"),
        "forward": lambda: _forward(claim, referee, answer),
        "gradient": lambda: gradient(claim, run, (), referee, against_claim),
        "optimizer_delta": lambda: _optimizer(claim, referee, answer),
    }
    needed = RUNGS[: RUNGS.index(config.require) + 1]
    return CaseReceipt(
        arch=config.arch,
        policy=config.policy,
        candidate=Path(evidence.gradients).name,
        candidate_source=evidence.sha256[:12],
        reference=claim.label,
        dtype=config.dtype,
        prompt_length=config.prompt_length,
        group_size=config.group_size,
        response_lengths=setting.problem.response_lengths,
        objective=claim.objective.name,
        seed=config.seed,
        rungs=tuple(
            shown[name]() if name in needed else _nothing(name, f"not asked for: {config.require}")
            for name in RUNGS
        ),
        gradient=distance(against_claim, run),
        bias=distance(against_full, run),
        paper_gate=against_full.paper_gate,
        parameters=parameters(against_claim, against_full),
        accounting={},
        config=config,
        problem=setting.problem.content_hash(),
        warnings=(
            *zero_gradient(against_claim, claim.objective, config),
            *too_coarse(referee.limits(claim), config),
            *clamped(claim, referee),
            *_choices_unshown(referee, answer),
            *_zeros(answer.values, unreached),
        ),
        files=evidence,
    )


def _nothing(name: RungName, detail: str) -> Rung:
    return Rung(name=name, status="not_run", detail=detail)


@dataclass
class _Reported:
    """What the forward rung reads of a run, as far as a file can say it."""

    choices: dict[tuple[Site, Place], Choice]
    unplaced: int = 0

    def complete(self) -> bool:
        return False


def _forward(claim: Claim, referee: Referee, answer: Answer) -> Rung:
    problem, rows, loss = referee.setting.problem, answer.log_probs, answer.loss
    choices = _choices(referee, answer)
    if rows is None:
        return _nothing("forward", f"no log_probs.0 to log_probs.{len(problem) - 1} in the file")
    if loss is None:
        loss = referee.oracle(claim).loss  # what the file does not say is not compared
    run = Run(result=StepResult(loss=loss, log_probs=rows), trace=cast(Trace, _Reported(choices)))
    return compared(claim, run, referee, lambda **_: run)


def _choices(referee: Referee, answer: Answer) -> dict[tuple[Site, Place], Choice]:
    """Choices by site and place, where the file has them. Raises `InputError` for a module that chooses nothing."""
    problem = referee.setting.problem
    if not answer.decisions:
        return {}
    trace = referee.full_run.trace
    assert trace is not None
    modules = sorted({site.module for site, _ in trace.choices})
    found: dict[tuple[Site, Place], Choice] = {}
    for (module, i), table in answer.decisions.items():
        if module not in modules:
            known = f"{modules[0]} and {len(modules) - 1} others do" if modules else "none does"
            raise InputError(
                f"decisions are given of {shown(module)}, which chooses nothing; {known}"
            )
        for position, line in enumerate(table.tolist()):
            inside = position < len(problem.prompt(i))
            prompt = problem.prompt_hash(problem.group_of[i])
            key = Site(module, 0), Place(prompt, -1 if inside else i, position)
            chosen = tuple(sorted(index for index in line if index >= 0))
            expected = trace.choices.get(key)
            # Siblings share a prompt's places: one that differs is kept, whichever comes first.
            if key not in found or (expected is not None and chosen != expected.chosen):
                found[key] = Choice(chosen, 0.0, 0.0)
    return found


def _optimizer(claim: Claim, referee: Referee, answer: Answer) -> Rung:
    if answer.update is None:
        return _nothing("optimizer_delta", "no parameters after a step (after.NAME) in the file")
    return one_step(claim, referee, answer.update, answer.after)


def _choices_unshown(referee: Referee, answer: Answer) -> Iterator[str]:
    """Says so where choices were made that the file does not tell."""
    if not referee.chooses:
        return
    trace = referee.full_run.trace
    assert trace is not None
    modules = sorted({site.module for site, _ in trace.choices})
    asked = [(m, i) for m in modules for i in range(len(referee.setting.problem))]
    absent = [f"decisions.{m}.{i}" for m, i in asked if (m, i) not in answer.decisions]
    if absent:
        yield (
            f"{len(absent)} of {len(asked)} tables of decisions are not in the file ({absent[0]}): what was chosen there "
            "shows only in its values"
        )


def _zeros(read: dict[str, Any], unreached: Sequence[str]) -> list[str]:
    zeros = [name for name in unreached if name in read and not bool(read[name].any())]
    if not zeros:
        return []
    return [
        f"{len(zeros)} parameters have zeros where the reference has no gradient ({zeros[0]}): an optimizer with weight "
        "decay would move them"
    ]


def verdict(case: CaseReceipt) -> str:
    """One line: what is equal, what is not, and what was not shown."""
    words = []
    for rung in case.rungs:
        if rung.name not in case.needed or (rung.name == "objective" and rung.holds):
            continue  # the objective is ours: that it holds says nothing of the file
        name = "one optimizer step" if rung.name == "optimizer_delta" else rung.name
        proven = rung.status in ("proven", "proven_zero")
        state = {"not_run": "not shown"}.get(rung.status, rung.status.replace("_", " "))
        state = "equal" if proven else state
        words.append((state, name))
    order = {"equal": 0, "not shown": 2}
    states = sorted(dict.fromkeys(state for state, _ in words), key=lambda s: order.get(s, 1))
    return "; ".join(f"{', '.join(n for s, n in words if s == state)} {state}" for state in states)
