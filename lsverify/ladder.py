"""The ladder: one case judged rung by rung, each an equality, each with evidence taken from outside the path."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lsverify.accounting import account
from lsverify.auxiliary import library_loss, routers_of
from lsverify.balance_oracle import check_balance
from lsverify.cases import is_warm, load_candidate, source_of
from lsverify.compare import Comparison, Limits
from lsverify.errors import InputError
from lsverify.evidence import (
    RUNGS,
    CaseConfig,
    CaseReceipt,
    Distance,
    Parameter,
    Rung,
    RungName,
    Status,
)
from lsverify.models import is_small
from lsverify.objective import Objective
from lsverify.observe import Run, no_silent_exit, recorded, timed, weighed
from lsverify.paths import Path, StepResult, longstraw
from lsverify.policies import parse_policy
from lsverify.precision import deterministic, threads
from lsverify.problems import Problem
from lsverify.referee import MEANINGFUL, Claim, Referee, claim_of
from lsverify.rollouts import warn_unshared
from lsverify.rungs.execution import execution
from lsverify.rungs.forward import forward
from lsverify.rungs.gradient import gradient
from lsverify.rungs.optimizer_delta import optimizer_delta
from lsverify.setting import make_setting
from lsverify.stale import StaleStates
from lsverify.unreadable import unreadable


def judge(config: CaseConfig, *, brief: bool = False) -> CaseReceipt:
    """Run one case through every rung up to the required one and write down what was shown.

    brief: for counts over many cases. No rung beyond the first that does not hold is judged. The path is not weighed, and it
    runs a second time only where `forward` holds; the rungs that are judged, are judged alike.

    Raises `InputError` for what the user must mend; whatever a path raises is evidence against it.
    """
    fresh = functools.partial(path_of, config)
    fresh()  # what cannot be imported is told before anything is built
    referee = _referee(config.model_copy(update=_NOT_OF_THE_SETTING))
    one_thread = threads(1 if is_small(config.arch) or is_warm(config.arch) else None)
    device = torch.get_default_device()
    try:
        with referee.setting.computing(), one_thread, no_silent_exit(), deterministic():
            return _judged(config, fresh, referee, brief)
    except InputError:
        raise
    except Exception as error:
        if config.candidate is None:
            raise
        # No later case may meet what it left behind.
        _referee.cache_clear()
        torch.set_default_device(device)
        setting = make_setting(config.model_copy(update=_NOT_OF_THE_SETTING))
        return unreadable(config, setting, error)


_NOT_OF_THE_SETTING: dict[str, Any] = {
    "policy": None,
    "candidate": None,
    "reference": "declared",
    "require": RUNGS[-1],
    "chunk": 1,
    "branches": 1,
}


@functools.lru_cache(maxsize=2)
def _referee(config: CaseConfig) -> Referee:
    """Cases that differ only in what is judged share a model, problems and references."""
    return Referee(make_setting(config))


def path_of(config: CaseConfig) -> Path:
    """The path that a case names: somebody's candidate, or ours with the case's policy and nothing kept yet."""
    if config.candidate is not None:
        candidate = load_candidate(config.candidate)
        # A class makes a path without a memory; what keeps an optimizer's state, say, starts anew with it.
        path: Path = candidate() if isinstance(candidate, type) else candidate
        return path
    policy = parse_policy(config.policy or "exact")
    states = StaleStates(policy.refresh) if policy.refresh else None
    return functools.partial(
        longstraw, policy=policy, chunk=config.chunk, branches=config.branches, states=states
    )


def _judged(
    config: CaseConfig, fresh: Callable[[], Path], referee: Referee, brief: bool
) -> CaseReceipt:
    setting = referee.setting
    step = (setting.model, setting.problem, setting.objective)
    wanted = RUNGS[: RUNGS.index(config.require) + 1]

    def record(**options: Any) -> Run:
        return recorded(fresh(), *step, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Most runs of a count over faults fail: their values are kept at once, for a word on where they part.
        record = functools.partial(record, keep_values=True) if brief else record
        run = record()
        claim = claim_of(config, run.result, setting.objective)
        if claim.objective.temperature != setting.objective.temperature:
            # Its log-probs are those of an objective that was not known before the path told it.
            record = functools.partial(record, temperature=claim.objective.temperature)
            run = record()
        if claim.shares:
            referee.require_shareable()
            warn_unshared(setting.problem)
    later: tuple[Run, ...] = () if brief else (timed(fresh(), *step), weighed(fresh(), *step))
    held_to = claim
    if config.reference == "full":
        policy = claim.policy and parse_policy("exact")
        held_to = Claim(label="full", policy=policy, objective=claim.objective)
    full = Claim(label="full", policy=None, objective=claim.objective)
    against_claim = referee.compared(held_to, run.gradients)
    same = held_to.is_full(setting.problem)
    against_full = against_claim if same else referee.compared(full, run.gradients)
    judged: dict[RungName, Callable[[], Rung]] = {
        "objective": lambda: objective_rung(config, referee, claim),
        "execution": lambda: execution(config, claim, setting.problem, run, later),
        "forward": lambda: forward(claim, run, referee, record),
        "gradient": lambda: gradient(held_to, run, later, referee, against_claim, record),
        "optimizer_delta": lambda: _optimizer(fresh, held_to, referee, run),
    }
    rungs: list[Rung] = []
    for name in RUNGS:
        if brief and name == "gradient" and all(rung.holds for rung in rungs):
            later = (timed(fresh(), *step),)
            rungs[RUNGS.index("execution")] = judged["execution"]()
        if name not in wanted:
            reason = f"not asked for: --require {config.require}"
        elif brief and (wrong := [rung.name for rung in rungs if not rung.holds]):
            reason = f"{wrong[0]} does not hold"
        else:
            rungs.append(judged[name]())
            continue
        rungs.append(Rung(name=name, status="not_run", detail=reason))
    return CaseReceipt(
        arch=config.arch,
        policy=config.policy or (claim.policy.spec if claim.policy else None),
        candidate=config.candidate,
        candidate_source=source_of(fresh()) if config.candidate else None,
        reference=held_to.label,
        dtype=config.dtype,
        prompt_length=config.prompt_length,
        group_size=config.group_size,
        response_lengths=setting.problem.response_lengths,
        objective=claim.objective.name,
        seed=config.seed,
        rungs=tuple(rungs),
        gradient=distance(against_claim, run),
        bias=distance(against_full, run),
        paper_gate=None if run.error else against_full.paper_gate,
        parameters=parameters(against_claim, against_full),
        accounting={}
        if brief
        else account(claim, referee, chunk=config.chunk, run=run, again=later[0], weight=later[-1]),
        config=config,
        problem=setting.problem.content_hash(),
        warnings=(
            *zero_gradient(against_claim, claim.objective, config),
            *too_coarse(referee.limits(held_to), config),
            *_texts(caught),
            *clamped(claim, referee),
            *_declared(claim, setting.objective),
        ),
    )


def objective_rung(config: CaseConfig, referee: Referee, claim: Claim) -> Rung:
    """`objective`: the claim's objective against outside oracles, on the setting's problem."""
    setting, objective = referee.setting, claim.objective
    measure, limit, detail = referee.objective_check(objective)
    if objective.aux_coef:
        routers, library = routers_of(setting.model), library_loss(setting.model)
        other, its_limit, found = check_balance(
            library, routers, objective, setting.problem, config.seed
        )
        if measure <= limit and not other <= its_limit:
            measure, limit = other, its_limit
        detail = f"{detail}; {found}"
    status: Status = "proven" if measure <= limit else "failed"
    return Rung(name="objective", status=status, measure=measure, limit=limit, detail=detail)


def _optimizer(fresh: Callable[[], Path], claim: Claim, referee: Referee, run: Run) -> Rung:
    if run.error is not None:
        return Rung(name="optimizer_delta", status="not_run", detail="the path raised an error")
    own = run.result.update if run.result else None

    def guarded() -> Path:
        path = fresh()

        def step(model: nn.Module, problem: Problem, objective: Objective) -> StepResult | None:
            try:
                return path(model, problem, objective)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                raise _PathRaisedError from error

        return step

    try:
        return optimizer_delta(guarded, claim, referee, own)
    except _PathRaisedError as raised:
        error = raised.__cause__
        detail = f"the path raised {type(error).__name__} in two steps of training: {error}"
        return Rung(name="optimizer_delta", status="error", detail=detail)


class _PathRaisedError(Exception):
    """Tells an error of the path under test, which is evidence, from one of ours, which is not."""


def distance(comparison: Comparison, run: Run) -> Distance | None:
    """The comparison's numbers over all parameters; None after an error."""
    if run.error is not None:
        return None
    return Distance(
        rel_l2=comparison.rel_l2,
        cosine=comparison.cosine,
        norm_ratio=comparison.norm_ratio,
        worst_parameter=comparison.worst_parameter,
        worst_rel_l2=comparison.worst_rel_l2,
    )


def parameters(claimed: Comparison, full: Comparison) -> tuple[Parameter, ...]:
    """Every parameter of the comparison with the claim, and its distance from full autograd."""
    bias = {tensor.name: tensor.rel_l2 for tensor in full.tensors}
    found = [
        Parameter(
            name=tensor.name,
            status=tensor.verdict,
            rel_l2=tensor.rel_l2,
            cosine=tensor.cosine,
            norm_ratio=tensor.norm_ratio,
            limit=tensor.limit,
            bias_rel_l2=bias.get(tensor.name),
            slices={part.slice or "": part.rel_l2 for part in tensor.parts},
        )
        for tensor in claimed.tensors
    ]
    found += [
        Parameter(
            name=finding.name,
            status=finding.kind,
            rel_l2=None,
            cosine=None,
            norm_ratio=None,
            limit=None,
            bias_rel_l2=None,
        )
        for finding in claimed.findings
    ]
    return tuple(found)


def zero_gradient(
    comparison: Comparison, objective: Objective, config: CaseConfig
) -> Iterable[str]:
    """Says so when there was no gradient to get wrong."""
    if comparison.status == "proven_zero":
        yield (
            f"EVERY GRADIENT IS ZERO on both sides: no advantage in a group of one or of equal rewards under "
            f"{objective.name}, so a path that is wrong elsewhere passes here; raise --group-size (it is "
            f"{config.group_size}) or name another --objective, such as reinforce"
        )


def too_coarse(limits: Limits, config: CaseConfig) -> Iterable[str]:
    """Says so when the precision is too coarse for the comparison to mean anything."""
    above = {
        name: limit.value for name, limit in limits.per_tensor.items() if limit.value > MEANINGFUL
    }
    if above:
        worst = max(above, key=lambda name: above[name])
        yield (
            f"{config.dtype} IS TOO COARSE: {len(above)} of {len(limits.per_tensor)} limits are above "
            f"{MEANINGFUL} (worst {above[worst]:.2g}, {worst}); a pass shows little, use float64"
        )


def _texts(caught: list[warnings.WarningMessage]) -> list[str]:
    return sorted({f"{w.category.__name__}: {w.message}" for w in caught})


def clamped(claim: Claim, referee: Referee) -> Iterable[str]:
    """Says so when a policy reaches beyond a prompt."""
    lengths = referee.setting.problem.prompt_lengths
    if claim.policy is not None and any(claim.policy.clamped(length) for length in lengths):
        yield f"policy {claim.policy.spec} reaches beyond a prompt of {min(lengths)} tokens and was clamped to it"


def _declared(claim: Claim, asked: Objective) -> Iterable[str]:
    """The whole of an objective that the path declares: its name alone would not tell it from the one asked for."""
    if claim.objective != asked:
        fields = claim.objective.model_dump_json()
        yield f"judged on an objective that the path declares, not on {asked.name}: {fields}"
