"""`lsverify ablate`: what each detach policy loses on each architecture, where that lives, and what it saves.

A row is one policy on one problem. Before anything is concluded from it, its path must have the gradient of the
reference that the policy claims; then the bias (its distance to full autograd) is the policy's and not a fault's. The
same problem's state term is taken apart by kind of state and by distance into the prompt (`lsverify.state_term`).
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from lsverify.ablation_records import Group, Row
from lsverify.attribution import kind_of, layer_of
from lsverify.cases import SMOLLM2, Options, is_warm
from lsverify.compare import Comparison
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig, Status
from lsverify.ladder import path_of
from lsverify.ledger import ideal_work, shared
from lsverify.models import TINY
from lsverify.norms import norm, promoted
from lsverify.observe import recorded, timed, weighed
from lsverify.paths import Path as Step
from lsverify.paths import full_autograd
from lsverify.policies import KINDS, Policy, parse_policy, require_chosen
from lsverify.precision import deterministic, threads
from lsverify.prompt import PromptState, capture
from lsverify.referee import Claim, Referee, claim_of
from lsverify.references import Gradients
from lsverify.rungs.gradient import gradient
from lsverify.setting import make_setting
from lsverify.slices import Slice
from lsverify.state_term import StateTerm, minus, size, squared_state_terms, state_term

DTYPES = ("float64", "float32")
# A step of a tiny model takes milliseconds: the fastest of a few is its time. A step of seconds is its own.
MOST_RUNS, ENOUGH_SECONDS = 3, 2.0
FIRST_SEED = 0
WINDOWS, TEXT_WINDOWS = (8, 64), (64, 256)
LENGTH, TEXT_LENGTH = 24, 512

Progress = Callable[[str], None]
PathOf = Callable[[CaseConfig], Step]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to ablate. Empty means the default; see `lsverify ablate --help`."""

    archs: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    seeds: int | None = None
    group_size: int | None = None
    response_length: str | None = None
    objective: str = "grpo"
    dtype: str = "float64"
    chunk: int | None = None

    def names(self) -> tuple[str, ...]:
        return self.archs or tuple(TINY)

    def cases(self, arch: str) -> list[CaseConfig]:
        """One per length and seed. Raises `InputError`, one line, for a value that is not allowed."""
        if self.dtype not in DTYPES:
            raise InputError(f"dtype {self.dtype!r} is not allowed: use one of {', '.join(DTYPES)}")
        seeds = self.seeds if self.seeds is not None else 1 if arch == SMOLLM2 else 2
        if seeds < 1:
            raise InputError(f"seeds {seeds} is not allowed: use 1 or more")
        for spec in self.policies:
            parse_policy(spec)
        lengths = self.lengths or (TEXT_LENGTH if arch == SMOLLM2 else LENGTH,)
        return [
            case.model_copy(update={"policy": None})
            for length, seed in itertools.product(lengths, range(FIRST_SEED, FIRST_SEED + seeds))
            for case in Options(
                archs=(arch,),
                policies=("exact",),
                prompt_length=length,
                group_size=self.group_size,
                response_length=self.response_length,
                objective=self.objective,
                dtype=self.dtype,
                seed=seed,
                chunk=self.chunk,
                require="gradient",
            ).cases()
        ]


def lengths_of(text: str | None) -> tuple[int, ...]:
    """Prompt lengths as the command line gives them. Raises `InputError` for anything but N,N,.. of 1 or more."""
    parts = [] if text is None else text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"lengths {text!r} is not allowed: use N,N,.. with each 1 or more")
    return tuple(dict.fromkeys(int(part) for part in parts))


Measured = tuple[list[Row], list[StateTerm]]


def run(request: Request, *, workers: int = 1, progress: Progress) -> Measured:
    """Every architecture asked for, in that order; `progress` gets one line for each as it is done.

    workers: processes, one architecture each. Raises `InputError` for bad input, before anything runs where it can be
    seen from the request alone.
    """
    archs = list(dict.fromkeys(request.names()))
    for arch in archs:
        request.cases(arch)
    if workers < 1:
        raise InputError(f"workers {workers} is not allowed: use 1 or more")
    rows: list[Row] = []
    terms: list[StateTerm] = []
    with _each(request, archs, workers) as measured:
        for arch, ((found, parts), seconds) in zip(archs, measured, strict=True):
            rows += found
            terms += parts
            progress(f"{arch:20} {_counted(found)} in {seconds:.1f} s")
    return rows, terms


@contextmanager
def _each(
    request: Request, archs: Sequence[str], workers: int
) -> Iterator[Iterator[tuple[Measured, float]]]:
    calls = itertools.repeat(request), archs
    if workers == 1 or len(archs) == 1:
        yield map(_clocked, *calls)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(archs)), mp_context=context)
    try:
        yield pool.map(_clocked, *calls)
    finally:
        pool.shutdown(cancel_futures=True)


def _clocked(request: Request, arch: str) -> tuple[Measured, float]:
    start = time.perf_counter()
    return ablate(request, arch), time.perf_counter() - start


def _counted(rows: Sequence[Row]) -> str:
    statuses = [row.status for row in rows]
    return ", ".join(f"{statuses.count(s)} {s}" for s in dict.fromkeys(statuses))


def ablate(request: Request, arch: str, paths: PathOf = path_of) -> Measured:
    """The rows and state terms of one architecture. `paths` makes the path of a case: ours with its policy."""
    rows: list[Row] = []
    terms: list[StateTerm] = []
    for config in request.cases(arch):
        referee = Referee(make_setting(config))
        with ExitStack() as stack:
            stack.enter_context(referee.setting.computing())
            stack.enter_context(threads(1 if arch in TINY or is_warm(arch) else None))
            stack.enter_context(deterministic())
            try:
                state = _captured(referee)
            except (
                InputError
            ) as error:  # nothing of this model can be shared, and no policy is about it
                specs = request.policies or ("exact", "detach")
                rows += [_unfit(config, spec, error) for spec in specs]
                continue
            specs = request.policies or default_policies(config, state)
            rows += _rows(config, referee, state, specs, paths)
            kinds = dict.fromkeys(row.kind for row in state.inventory() if row.kind in KINDS)
            terms.append(state_term(referee, kinds))
    return rows, terms


def _captured(referee: Referee) -> PromptState:
    """The state of the longest prompt. Raises `InputError` for a model whose prompt cannot be shared."""
    referee.require_shareable()
    setting = referee.setting
    prompt = max((group.prompt for group in setting.problem.groups), key=len)
    boundary = len(prompt) - 1
    return capture(
        setting.model, prompt, boundary=boundary, chunk=setting.config.chunk, keep_from=boundary
    )


def default_policies(config: CaseConfig, state: PromptState) -> tuple[str, ...]:
    """What can differ on this model and prompt: a window as long as the prompt, or its only kind, is `exact`."""
    inventory = [row for row in state.inventory() if row.kind in KINDS]
    kinds = list(dict.fromkeys(row.kind for row in inventory))
    layers = sorted({row.layer for row in inventory if row.layer is not None})
    half = len(layers) // 2
    text = config.arch == SMOLLM2
    windows = TEXT_WINDOWS if text else WINDOWS
    return (
        "exact",
        "detach",
        *(f"window:{m}" for m in windows if m < config.prompt_length - 1),
        *(f"kinds:{kind}" for kind in kinds if len(kinds) > 1),
        *(f"layers:{_ranges(part)}" for part in (layers[:half], layers[half:]) if half),
        *(() if text else ("roulette:0.5",)),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2,5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][-1] + 1:
            found[-1].append(number)
        else:
            found.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in found)


def _rows(
    config: CaseConfig,
    referee: Referee,
    state: PromptState,
    specs: Sequence[str],
    paths: PathOf,
) -> Iterator[Row]:
    full = _full_cost(referee) if config.seed == FIRST_SEED else {}
    for spec in specs:
        policy = parse_policy(spec)
        try:
            if policy.refresh is not None:
                raise InputError(
                    "at its first step a stale capture is detach; later ones are for lsverify gate"
                )
            require_chosen(policy, state)
            case = config.model_copy(update={"policy": spec})
            row, seconds = _row(case, policy, referee, paths)
        except InputError as error:
            yield _unfit(config, spec, error)
            continue
        if full and row.status != "error":
            row = row.model_copy(update=full | _cost(paths(case), referee, seconds))
        yield row


def _full_cost(referee: Referee) -> dict[str, float | int | None]:
    return {
        "tokens_full": ideal_work("full_serial", shared(referee.setting.problem)).tokens,
        "live_bytes_full": referee.full_live_bytes,
        "seconds_full": _fastest(full_autograd, referee, [referee.full_timed.seconds]),
    }


def _cost(path: Step, referee: Referee, seconds: float) -> dict[str, float | int | None]:
    setting = referee.setting
    run = weighed(path, setting.model, setting.problem, setting.objective)
    return {"live_bytes": run.live_bytes_peak, "seconds": _fastest(path, referee, [seconds])}


def _fastest(path: Step, referee: Referee, seconds: list[float]) -> float:
    setting = referee.setting
    while len(seconds) < MOST_RUNS and sum(seconds) < ENOUGH_SECONDS:
        seconds.append(timed(path, setting.model, setting.problem, setting.objective).seconds)
    return min(seconds)


def _unfit(config: CaseConfig, spec: str, error: InputError) -> Row:
    return _empty(config, spec, "not_applicable", str(error))


def _empty(config: CaseConfig, spec: str, status: Status, detail: str) -> Row:
    return Row(
        arch=config.arch,
        policy=spec,
        length=config.prompt_length,
        seed=config.seed,
        status=status,
        detail=detail,
    )


def _row(config: CaseConfig, policy: Policy, referee: Referee, paths: PathOf) -> tuple[Row, float]:
    """With the seconds that the path took, once."""
    setting = referee.setting
    step = (setting.model, setting.problem, setting.objective)
    path = paths(config)
    record = functools.partial(recorded, path, *step)
    run, again = record(), timed(path, *step)
    claim = claim_of(config, run.result, setting.objective)
    against_claim = referee.compared(claim, run.gradients)
    rung = gradient(claim, run, (again,), referee, against_claim, record)
    if run.error is not None:
        raised = f"the path raised {type(run.error).__name__}: {run.error}"
        return _empty(config, policy.spec, "error", raised), 0.0
    full = Claim(label="full", policy=None, objective=setting.objective)
    bias = referee.compared(full, run.gradients)
    expected = referee.oracle(full).gradients
    layers, kinds = _groups(bias, expected, run.gradients, referee.slices)
    row = Row(
        arch=config.arch,
        policy=policy.spec,
        length=config.prompt_length,
        seed=config.seed,
        reference=claim.label,
        status=rung.status,
        detail=rung.detail,
        to_claim=against_claim.rel_l2,
        limit=rung.limit,
        rel_l2=bias.rel_l2,
        cosine=bias.cosine,
        norm_ratio=bias.norm_ratio,
        per_layer=layers,
        per_kind=kinds,
        tokens=run.tokens.total,
        variance=_variance(policy, referee),
    )
    if setting.oracle is not setting.model and policy.spec != "detach":
        referee.forget(claim)
    return row, again.seconds


def _variance(policy: Policy, referee: Referee) -> float | None:
    """E |gradient - full|^2 / |full|^2 of a coin with the whole state term on its side up; None of another policy."""
    p = policy.probability
    parts = (policy.window, policy.layers, policy.kinds)
    if p is None or policy.tail > 1 or any(part is not None for part in parts):
        return None
    full = Claim(label="full", policy=None, objective=referee.setting.objective)
    squared = size(minus(referee.native(full).gradients, {})) ** 2
    return (1 - p) / p * squared_state_terms(referee) / squared if squared else None


def _groups(
    bias: Comparison,
    expected: Gradients,
    actual: Gradients,
    slices: Mapping[str, Sequence[Slice]],
) -> tuple[dict[str, Group], dict[str, Group]]:
    """Per layer and per kind: the comparison's numbers, and each group's share of the squared bias."""
    layers: dict[str, float] = {}
    kinds: dict[str, float] = {}
    for name, difference in minus(actual, expected).items():
        error = promoted(difference)
        number = layer_of(name)
        layer = "-" if number is None else str(number)
        layers[layer] = layers.get(layer, 0.0) + norm(error) ** 2
        parts = [(kind_of(name, p.label), error[p.index]) for p in slices.get(name, ())]
        for kind, part in parts or [(kind_of(name), error)]:
            kinds[kind] = kinds.get(kind, 0.0) + norm(part) ** 2
    per_layer = {str(layer): numbers for layer, numbers in bias.per_layer.items()}
    return _shares(layers, per_layer), _shares(kinds, bias.per_kind)


def _shares(
    squared: Mapping[str, float], numbers: Mapping[str, Mapping[str, float | None]]
) -> dict[str, Group]:
    whole = sum(squared.values())
    return {
        name: Group(
            **{
                field: numbers.get(name, {}).get(field)
                for field in ("rel_l2", "cosine", "norm_ratio")
            },
            lost=value / whole if whole else None,
        )
        for name, value in sorted(squared.items(), key=lambda item: _natural(item[0]))
    }


def _natural(name: str) -> tuple[int, str]:
    """Layers by number, what is outside them last, kinds by name."""
    return (int(name), "") if name.isdecimal() else (10**9, name)
