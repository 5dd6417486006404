"""The referee of one setting: the references a claim is held to, each computed once, at oracle and native precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.cache import Slot
from lsverify.compare import Comparison, Limits, compare, measured_limits
from lsverify.decisions import ChoiceMode
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.models import is_small
from lsverify.objective import Objective
from lsverify.observe import Run, recorded, restore, timed, weighed, weights_of
from lsverify.oracles import check_objective
from lsverify.paths import StepResult, full_autograd, full_logits
from lsverify.policies import Policy, parse_policy
from lsverify.precision import weight_dtype
from lsverify.problems import Problem
from lsverify.references import (
    Filter,
    Gradients,
    Reference,
    Stopped,
    full_reference,
    stopped_reference,
)
from lsverify.setting import Setting
from lsverify.sharing import check_shareable
from lsverify.slices import Slice, fused_slices
from lsverify.spans import require_uncut
from lsverify.trace import Trace

# Native limits: this many times the reference's own distance to the oracle, and never above the cap of the dtype.
FACTOR = 8.0
CAPS = {torch.float32: 1e-2, torch.bfloat16: 1e-1}
# Rounding depends on the order of a computation: the floor is the largest over the reference as it is and evaluated in
# so many parts. One order alone may be lucky: a router's gradient has come out nine times as exact as in most others.
PARTS = (2, 5)
# LongStraw's own limit on relative L2. A comparison that cannot resolve it is called out.
MEANINGFUL = 1e-2

# For a response, the parameters under which its prompt was captured.
Captured = Callable[[int], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a path's gradient is said to equal.

    `label` is the reference in the receipt's words; `policy` None stands for full autograd without any sharing.
    """

    label: str
    policy: Policy | None
    objective: Objective

    def stop(self, prompt_length: int) -> int:
        """Prompt tokens before this position count as constant."""
        return 0 if self.policy is None else self.policy.stop(prompt_length)

    def carried(self, problem: Problem) -> Filter | None:
        """Which part of d loss / d z the claim says is carried through the boundary; None for all of it."""
        if self.policy is None or not self.policy.chooses:
            return None
        policy = self.policy

        def swept(member: int) -> float:
            prompt = problem.prompt_hash(problem.group_of[member])
            return policy.scale(prompt, problem.seed or 0)

        def share(member: int, slot: Slot) -> float:
            return swept(member) if policy.carries(slot.layer, slot.kind) else 0.0

        return Filter(boundary=policy.boundary, share=share, swept=swept)

    def is_full(self, problem: Problem) -> bool:
        """Whether the claim on this problem is the whole gradient."""
        return self.carried(problem) is None and not any(map(self.stop, problem.prompt_lengths))

    @property
    def scored(self) -> int:
        """Scoring rounds that the step cannot do without: one where a load-balancing loss needs its counts."""
        return 1 if self.objective.aux_coef else 0

    @property
    def shares(self) -> bool:
        """Whether the claim says that responses share the prompt's computation."""
        return self.policy is not None


def claim_of(config: CaseConfig, result: StepResult | None, objective: Objective) -> Claim:
    """The claim of a case: what the user names, else what the candidate declares, else full autograd.

    Raises `InputError` when the declared reference is no policy.
    """
    declared = config.policy or (result.reference if result else None) or "full"
    policy = None if declared == "full" else parse_policy(declared)
    label = "full" if policy is None else policy.reference
    used = result.objective if result and result.objective else objective
    return Claim(label=label, policy=policy, objective=used)


@dataclass(eq=False)
class Referee:
    """Answers what the references are at the setting's weights; see `Claim` for what they are references of."""

    setting: Setting
    _memo: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start = weights_of(self.setting.model)

    def require_shareable(self) -> None:
        """Raises `NotShareable` for a model whose prompt state is not a function of the prompt alone; tested once."""
        if "shareable" not in self._memo:
            check_shareable(self.setting.oracle, self.setting.problem)
            self._memo["shareable"] = True

    @cached_property
    def full_run(self) -> Run:
        """Full autograd in the case's own precision, recorded: its decisions and values are what a path must match."""
        return recorded(
            full_autograd, self.setting.model, self.setting.problem, self.setting.objective
        )

    @cached_property
    def full_values(self) -> Run:
        """Full autograd once more, with every layer's values kept."""
        setting = self.setting
        step = setting.model, setting.problem, setting.objective
        return recorded(full_autograd, *step, keep_values=True)

    def objective_check(self, objective: Objective) -> tuple[float, float, str]:
        """What `check_objective` says of an objective on the setting's problem; asked once for each."""
        key = ("objective", objective)
        if key not in self._memo:
            seed = self.setting.config.seed
            self._memo[key] = check_objective(objective, self.setting.problem, seed)
        found: tuple[float, float, str] = self._memo[key]
        return found

    @cached_property
    def full_timed(self) -> Run:
        """Full autograd in the case's own precision with no instrument but a clock."""
        setting = self.setting
        run = timed(full_autograd, setting.model, setting.problem, setting.objective)
        if run.error is not None:
            raise run.error
        return run

    @cached_property
    def full_live_bytes(self) -> int | None:
        """Full autograd's `live_bytes_peak`."""
        setting = self.setting
        run = weighed(full_autograd, setting.model, setting.problem, setting.objective)
        return run.live_bytes_peak

    def oracle(self, claim: Claim) -> Reference:
        """The claimed reference in float64."""
        return self._reference(self.setting.oracle, claim, self.setting.problem, "oracle")

    def native(self, claim: Claim) -> Reference:
        """The claimed reference in the case's own precision."""
        if self.setting.oracle is self.setting.model:
            return self.oracle(claim)
        return self._reference(self.setting.model, claim, self.setting.problem, "native")

    def orders(self, claim: Claim) -> list[Reference]:
        """The claimed reference in the case's own precision, computed in several orders that differ in rounding alone.

        Only as it is where the model's prompt cannot be evaluated in parts.
        """
        key = ("orders", *self._key(claim, self.setting.problem, "native"))
        if key not in self._memo:
            self._memo[key] = [self.native(claim), *self._in_parts(claim)]
        found: list[Reference] = self._memo[key]
        return found

    def _in_parts(self, claim: Claim) -> Iterator[Reference]:
        setting = self.setting
        try:
            self.require_shareable()
        except InputError:
            return
        # Of a pretrained model each order takes many seconds.
        for parts in PARTS if is_small(setting.config.arch) else PARTS[:1]:
            with self._native_choices("parts"):
                yield _stopped(setting.model, claim, setting.problem, parts=parts).response

    def _reference(self, model: nn.Module, claim: Claim, problem: Problem, side: str) -> Reference:
        key = self._key(claim, problem, side)
        if key not in self._memo:
            own = claim.is_full(problem) and claim.objective == self.setting.objective
            ran = model is self.setting.model and own
            with self._native_choices(side):
                self._memo[key] = (self._timed(), None) if ran else _computed(model, claim, problem)
        found: Reference = self._memo[key][0]
        return found

    @contextmanager
    def _native_choices(self, side: str) -> Iterator[None]:
        """Elsewhere a router chooses as in the case's precision: experts are compared as such, values under them."""
        setting = self.setting
        if side == "native" or setting.oracle is setting.model or not self.chooses:
            yield
            return
        trace = self.full_run.trace
        assert trace is not None
        model = setting.oracle if side == "oracle" else setting.model
        with Trace(model, setting.problem, forced=trace.choices):
            yield

    @cached_property
    def chooses(self) -> bool:
        """Whether the model makes discrete choices at all; one that makes none is not run once more to record none."""
        seen: list[bool] = []
        mode = ChoiceMode(lambda scores, chosen: seen.append(True))
        with torch.no_grad(), mode:
            full_logits(self.setting.model, self.setting.problem, 0)
        return bool(seen)

    @staticmethod
    def _key(claim: Claim, problem: Problem, side: str) -> tuple[Any, ...]:
        stops = tuple(claim.stop(length) for length in problem.prompt_lengths)
        chosen = claim.policy if claim.carried(problem) is not None else None
        return side, stops, chosen, claim.objective

    def _timed(self) -> Reference:
        """The run that was timed, as a reference: it need not be made a second time."""
        result = self.full_timed.result
        assert result is not None
        assert result.log_probs is not None
        return Reference(
            gradients=self.full_timed.gradients, loss=result.loss, log_probs=result.log_probs
        )

    def total(self, claim: Claim) -> Gradients | None:
        """Response term plus state term of a stopped reference; None where the claim is `full` itself."""
        self.oracle(claim)
        found: Gradients | None = self._memo[self._key(claim, self.setting.problem, "oracle")][1]
        return found

    def forget(self, claim: Claim) -> None:
        """Drop the claim's references, which for a real model take gigabytes; asked for again, they are made again.

        Full autograd is kept: everything is compared with it.
        """
        if claim.is_full(self.setting.problem):
            return
        for side in ("oracle", "native"):
            key = self._key(claim, self.setting.problem, side)
            self._memo.pop(key, None)
            self._memo.pop(("orders", *key), None)

    def gradient_at(
        self,
        weights: Mapping[str, Tensor],
        claim: Claim,
        problem: Problem,
        captured: Captured | None = None,
    ) -> Gradients:
        """The claimed reference's gradient in float64 at other weights, on another problem."""
        oracle = self.setting.oracle
        before = weights_of(oracle)
        try:
            restore(oracle, weights)
            return computed(oracle, claim, problem, captured).gradients
        finally:
            restore(oracle, before)

    def delta(self, claim: Claim, update: str, make: Callable[[], Gradients]) -> Gradients:
        """The claimed reference's change of the weights, made once for all paths; a pretrained model's is not kept."""
        if not is_small(self.setting.config.arch):
            return make()
        key = ("delta", claim, update)
        if key not in self._memo:
            self._memo[key] = make()
        found: Gradients = self._memo[key]
        return found

    def compared(self, claim: Claim, actual: Gradients, limits: Limits | None = None) -> Comparison:
        """A gradient against the claimed reference, each tensor and slice within its limit."""
        expected = self.oracle(claim).gradients
        return compare(expected, actual, limits=limits or self.limits(claim), slices=self.slices)

    def limits(self, claim: Claim) -> Limits:
        """1e-12 at oracle precision; elsewhere measured from what the precision does to the reference itself."""
        dtype = weight_dtype(self.setting.config.dtype)
        if dtype == torch.float64:
            return Limits()
        orders = [order.gradients for order in self.orders(claim)]
        return self.measured(self.oracle(claim).gradients, *orders)

    def measured(self, oracle: Gradients, *native: Gradients) -> Limits:
        """Limits for the case's precision from one quantity computed in float64 and, in one order or several, in it."""
        floor = floor_dtype(self.setting.config.dtype)
        return measured_limits(
            oracle,
            *native,
            factor=FACTOR,
            cap=CAPS[floor],
            dtype=floor,
            slices=self.slices,
        )

    @cached_property
    def slices(self) -> dict[str, list[Slice]]:
        model = self.setting.model
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        tokens = [self.setting.problem.tokens(i)[:-1] for i in range(len(self.setting.problem))]
        seen = torch.cat(tokens).unique().tolist()
        return fused_slices(shapes, model.config, seen_tokens=seen)


def computed(
    model: nn.Module, claim: Claim, problem: Problem, captured: Captured | None = None
) -> Reference:
    """The claimed reference at the model's weights, on any problem; `captured` as in `stopped_reference`."""
    return _computed(model, claim, problem, captured)[0]


def _computed(
    model: nn.Module, claim: Claim, problem: Problem, captured: Captured | None = None
) -> tuple[Reference, Gradients | None]:
    """With the sum of a stopped reference's two terms. Raises `InputError` for a claim that cuts a span."""
    if claim.policy is not None:
        for group in problem.groups:
            require_uncut(claim.policy, len(group.prompt), group.spans)
    if claim.is_full(problem):
        return full_reference(model, problem, claim.objective), None
    stopped = _stopped(model, claim, problem, captured)
    return stopped.response, stopped.total()


def _stopped(
    model: nn.Module,
    claim: Claim,
    problem: Problem,
    captured: Captured | None = None,
    parts: int = 1,
) -> Stopped:
    return stopped_reference(
        model,
        problem,
        claim.objective,
        claim.stop,
        carried=claim.carried(problem),
        captured=captured,
        parts=parts,
    )


def floor_dtype(name: str) -> torch.dtype:
    """The dtype whose rounding sets the floor of a precision (autocast rounds to bfloat16)."""
    return torch.bfloat16 if name.startswith("bfloat16") else weight_dtype(name)
