"""One GRPO step by structure and seed: made concrete, run, and held to what it claims.

A `Step` holds lengths, sizes and options; every number in it (weights, tokens, rewards, log-probs) follows from its
seed. So a step that fails is named by one line and shrinks in structure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lsverify.compare import Comparison, Limits, compare, message
from lsverify.evidence import CaseConfig
from lsverify.limits import ORACLE_LIMIT
from lsverify.models import build
from lsverify.objective import Objective, preset
from lsverify.paths import Path, full_score, longstraw
from lsverify.precision import threads
from lsverify.problems import ProblemSpec, draw, off_policy
from lsverify.referee import Referee, claim_of
from lsverify.references import Gradients, take_gradients
from lsverify.rungs.gradient import consistent
from lsverify.setting import Setting
from lsverify.slices import Slice

GRPO = preset("grpo")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The structure of one step. `spec.seed` is the seed of the model too; `chunk` is in tokens, `branches` in responses."""

    spec: ProblemSpec
    objective: Objective = GRPO
    policy: str = "exact"
    chunk: int = 8
    branches: int = 1
    training: bool = True

    def __str__(self) -> str:
        spec, mode = self.spec, "train()" if self.training else "eval()"
        options = [name for name in ("holes", "truncated") if getattr(spec, name)]
        options += [f"spans {spec.spans}"] if spec.spans != "none" else []
        return " ".join(
            [
                f"{self.objective.name} {self.policy} seed {spec.seed} prompts {spec.prompt_lengths}",
                f"groups {spec.sizes()} responses {spec.response_lengths} chunk {self.chunk} "
                f"branches {self.branches}",
                f"{spec.rewards} rewards {mode}",
                *options,
            ]
        )

    @contextmanager
    def running(self, arch: str) -> Iterator[Setting]:
        """Model, problem and objective, computing at oracle precision on one thread while the context lasts."""
        setting = self.referee(arch).setting
        setting.model.train(self.training)
        with setting.computing(), threads(1):
            take_gradients(setting.model)
            yield setting

    def referee(self, arch: str) -> Referee:
        """The step's references. Steps that differ only in how they run share them; steps of one seed, a model."""
        return _referee(arch, replace(self, policy="exact", chunk=1, branches=1))

    def path(self) -> Path:
        """The LongStraw path as the step says."""
        return functools.partial(
            longstraw, policy=self.policy, chunk=self.chunk, branches=self.branches
        )


@functools.lru_cache(maxsize=2)
def _referee(arch: str, step: Step) -> Referee:
    spec = step.spec
    model = _model(arch, spec.seed).train(step.training)
    setting = Setting(
        config=CaseConfig(
            arch=arch,
            prompt_length=max(spec.prompt_lengths),
            group_size=max(spec.sizes()),
            response_lengths=spec.response_lengths,
            objective=step.objective.name,
            seed=spec.seed,
            training=step.training,
        ),
        model=model,
        objective=step.objective,
        problem=(problem := draw(spec, model.config.get_text_config().vocab_size)),
        second=problem,
    )
    with setting.computing(), threads(1):
        current = full_score(model, problem, temperature=step.objective.temperature)
    problem = off_policy(problem, current, step.objective, spec.seed)
    return Referee(replace(setting, problem=problem, second=problem))


@functools.lru_cache(maxsize=24)
def _model(arch: str, seed: int) -> Any:
    return build(arch, seed=seed)


class StepFailed(AssertionError):
    """A step whose path does not give what it claims: which, and how its gradients compare, if they were compared."""

    def __init__(self, text: str, arch: str, step: Step, comparison: Comparison | None) -> None:
        super().__init__(text)
        self.arch, self.step, self.comparison = arch, step, comparison


def hold(arch: str, step: Step, path: Path | None = None) -> Comparison:
    """Run the step through `path` (None: its own) and hold gradient and log-probs to the reference it declares.

    A stopped reference counts only where its two terms sum to the cache-free full gradient. Raises `StepFailed`,
    naming the step and what differs, unless everything is within 1e-12.
    """
    case, comparison = f"{arch} {step}", None
    try:
        with step.running(arch) as setting:
            result = (path or step.path())(setting.model, setting.problem, setting.objective)
            gradients = take_gradients(setting.model)
            referee = step.referee(arch)
            claim = claim_of(setting.config, result, setting.objective)
            comparison = referee.compared(claim, gradients)
            accept(comparison, case)
            parts = consistent(claim, referee)
            if parts is not None:
                accept(parts, f"{case}, the reference's two terms against full autograd")
            if result is not None and result.log_probs is not None:
                expected = referee.oracle(claim).log_probs
                hold_log_probs(expected, result.log_probs, case)
    except AssertionError as error:
        raise StepFailed(str(error), arch, step, comparison) from None
    return comparison


def hold_equal(
    expected: Gradients,
    actual: Gradients,
    case: str,
    slices: Mapping[str, Sequence[Slice]] | None = None,
) -> Comparison:
    """Two gradients that must be equal to 1e-12, per tensor and slice and over all. Raises AssertionError."""
    return accept(compare(expected, actual, limits=Limits(), slices=dict(slices or {})), case)


def accept(comparison: Comparison, case: str) -> Comparison:
    """The comparison, if it proves equality to 1e-12 over all parameters too. Raises AssertionError otherwise."""
    if not comparison.passed:
        raise AssertionError(f"{case}: {message(comparison)}")
    overall = comparison.rel_l2
    if comparison.status == "proven" and not (overall is not None and overall <= ORACLE_LIMIT):
        raise AssertionError(f"{case}: relative L2 over all parameters is {overall}")
    return comparison


def hold_log_probs(expected: Sequence[Tensor], actual: Sequence[Tensor], case: str) -> None:
    """Log-probs [R_i] of every response that must be equal to 1e-12 of their norm. Raises AssertionError."""
    e, a = torch.cat(list(expected)), torch.cat(list(actual))
    if e.shape != a.shape:
        raise AssertionError(f"{case}: {len(a)} log-probs, expected {len(e)}")
    error = (a - e).norm() / e.norm()
    if not error <= ORACLE_LIMIT:
        at = int((a - e).abs().argmax())
        raise AssertionError(
            f"{case}: log-probs differ by relative L2 {error:.3g}, most at token {at} of all responses: "
            f"{a[at]:.17g}, expected {e[at]:.17g}"
        )
