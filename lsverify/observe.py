"""One run of a path, recorded from outside: gradients, log-probs, decisions, forwarded tokens, side effects."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lsverify.errors import InputError, NotShareable, StalePromptState
from lsverify.memory import LiveBytes
from lsverify.objective import Objective
from lsverify.paths import Path, StepResult, Update
from lsverify.problems import Problem
from lsverify.put_back import PutBack
from lsverify.references import Gradients, take_gradients
from lsverify.trace import Choice, Place, Site, Trace
from lsverify.untouched import Untouched
from lsverify.watch import Tokens, Watch


@dataclass(kw_only=True)
class Run:
    """What one call of a path left behind. `error` is the exception it raised, if any."""

    result: StepResult | None = None
    gradients: Gradients = field(default_factory=dict)
    trace: Trace | None = None
    watch: Watch | None = None
    changes: list[str] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float = 0.0
    live_bytes_peak: int | None = None

    @property
    def tokens(self) -> Tokens:
        return self.watch.tokens() if self.watch else Tokens()


def recorded(
    path: Path,
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    *,
    temperature: float | None = None,
    forced: Mapping[tuple[Site, Place], Choice] | None = None,
    keep_values: bool = False,
) -> Run:
    """Run the path once with every instrument on; `temperature` of the log-probs: the objective's, if None."""
    trace = Trace(
        model,
        problem,
        temperature=objective.temperature if temperature is None else temperature,
        forced=forced,
        keep_values=keep_values,
    )
    run = Run(trace=trace, watch=Watch(model))
    with unchanged(model, run):
        _call(run, path, model, problem, objective, [run.watch, trace])
    return run


def timed(path: Path, model: nn.Module, problem: Problem, objective: Objective) -> Run:
    """Run the path once with no instrument on but a clock (`seconds`)."""
    run = Run()
    with unchanged(model, run):
        _call(run, path, model, problem, objective, [])
    return run


def weighed(path: Path, model: nn.Module, problem: Problem, objective: Objective) -> Run:
    """Run the path once under the memory tracker: `live_bytes_peak` over what was alive before."""
    run, live = Run(), LiveBytes()
    with unchanged(model, run):
        _call(run, path, model, problem, objective, [live])
    run.live_bytes_peak = live.peak
    return run


def _call(
    run: Run,
    path: Path,
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    instruments: list[Any],
) -> None:
    # A copy, so that what the path writes there reaches no reference and no later case.
    given = copy.deepcopy(problem)
    with ExitStack() as stack:
        for instrument in instruments:
            stack.enter_context(instrument)
        start = time.perf_counter()
        try:
            run.result = checked(path(model, given, objective))
        except (StalePromptState, NotShareable) as error:
            run.error = error
        except (InputError, KeyboardInterrupt):  # the user's to mend or to want, whoever noticed it
            raise
        except BaseException as error:  # all else is evidence about the path, sys.exit(0) too
            run.error = error
        run.seconds = time.perf_counter() - start
    if given.content_hash() != problem.content_hash():
        run.changes.append("the problem's own tensors were written to")


def checked(result: Any) -> StepResult | None:
    """A copy of what a path returned, out of its reach. Raises TypeError, naming the field, for what is no `StepResult`."""
    if result is None:
        return None
    if not isinstance(result, StepResult):
        raise TypeError(f"it returned a {type(result).__name__}: return a StepResult or None")
    rows, loss = result.log_probs, cast(Any, result.loss)
    fields = {
        "loss": isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1),
        "log_probs": rows is None
        or (isinstance(rows, tuple | list) and all(isinstance(row, Tensor) for row in rows)),
        "reference": isinstance(result.reference, str | None),
        "objective": isinstance(result.objective, Objective | None),
        "update": result.update is None or is_update(result.update),
        "over_ranks": result.over_ranks in ("sum", "mean"),
    }
    for name, fits in fields.items():
        if not fits:
            value = getattr(result, name)
            raise TypeError(f"StepResult.{name} is a {type(value).__name__}: see its docstring")
    kept = None if rows is None else tuple(row.detach().clone() for row in rows)
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    return replace(result, loss=float(loss), log_probs=kept)


def is_update(update: Any) -> bool:
    """Whether these are numbers that an optimizer takes."""

    def number(value: Any, least: float = 0.0, below: float = math.inf) -> bool:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return plain and least <= value < below

    return (
        isinstance(update, Update)
        and update.kind in ("sgd", "adamw")
        and all(number(value) for value in (update.lr, update.eps, update.weight_decay))
        and len(update.betas) == 2
        and all(number(beta, below=1.0) for beta in update.betas)
        and (update.max_grad_norm is None or number(update.max_grad_norm))
    )


@contextmanager
def no_silent_exit() -> Iterator[None]:
    """Inside, `os._exit` raises SystemExit in this process: a path must not end its judge with a code of its choice."""
    leave, judge = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != judge:  # a child process that the path has forked
            leave(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


@contextmanager
def unchanged(model: nn.Module, run: Run) -> Iterator[None]:
    """Note what a step changed in the model and around it, take its gradients, and put everything else back."""
    take_gradients(model)
    before, around, state = weights_of(model), PutBack(model), Untouched(model)
    try:
        yield
    finally:
        try:
            run.changes += state.changes()
        except (RuntimeError, NotImplementedError) as error:
            run.changes.append(f"the model can no longer be compared with what it was: {error}")
        run.changes += around.noted()
        run.gradients = take_gradients(model)
        # A path may keep the tensors that it left in `.grad` and write to them again in its next run.
        for name, gradient in run.gradients.items():
            run.gradients[name] = None if gradient is None else gradient.detach().clone()
        around.put_back()
        take_gradients(model)
        restore(model, before)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name."""
    both = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in both}


@torch.no_grad()
def restore(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Write the weights back where they differ from what the model holds."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        before = weights.get(name)
        if before is None:
            continue
        if (tensor.shape, tensor.dtype, tensor.device) != (
            before.shape,
            before.dtype,
            before.device,
        ):
            tensor.data = before.clone()
        elif not torch.equal(tensor, before):
            tensor.copy_(before)
