"""Faults of the KL term: another estimator, another policy, another sign, no gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lsverify.advantages import kl_estimate
from lsverify.faults.catalogue import LOSS, Fault
from lsverify.faults.honest import planned
from lsverify.objective import MemberLoss, Objective, Plan, token_logp
from lsverify.paths import StepResult
from lsverify.problems import Problem

KL = {"objective": "grpo,beta=0.04"}


@dataclass(frozen=True)
class _Kl:
    """What a response's KL term is made of: [R] log-probs, [R] bool, and the right sum over counted tokens []."""

    logp: Tensor
    ref: Tensor
    old: Tensor
    counted: Tensor
    own: Tensor


class _OtherKl(Plan):
    """A plan whose KL term is another sum."""

    def other(self, at: _Kl) -> Tensor:
        raise NotImplementedError

    def member(self, i: int, logits: Tensor) -> MemberLoss:
        right, counted = super().member(i, logits), self.counted[i]
        assert self.ref_logp is not None
        logp = token_logp(logits, self.tokens[i], self.objective.temperature)
        ref, old = self.ref_logp[i].to(logp), self.old_logp[i].to(logp)
        own = kl_estimate(self.objective.kl, logp, ref)[counted].sum()
        more = self.other(_Kl(logp, ref, old, counted, own)) - own
        scale = self.objective.beta / self.denominators[i]
        return MemberLoss(loss=right.loss + scale * more, logp=right.logp)


def another_estimator_of_the_kl(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The KL term is the squared log-ratio where the objective has another estimator."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return kl_estimate("k2", at.logp, at.ref)[at.counted].sum()

    return planned(Wrong, model, problem, objective)


def kl_to_the_old_policy(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The KL term holds the policy to the one that sampled, not to the reference."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return kl_estimate(objective.kl, at.logp, at.old)[at.counted].sum()

    return planned(Wrong, model, problem, objective)


def kl_the_other_way_round(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Policy and reference change places in the KL term."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return kl_estimate(objective.kl, at.ref, at.logp)[at.counted].sum()

    return planned(Wrong, model, problem, objective)


def kl_subtracted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The KL term is subtracted: the policy is driven away from the reference."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return -at.own

    return planned(Wrong, model, problem, objective)


def kl_without_gradient(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The KL term is in the loss and not in the gradient."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return at.own.detach()

    return planned(Wrong, model, problem, objective)


def kl_over_masked_tokens(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The KL term is averaged over all tokens of a response, masked ones included."""

    class Wrong(_OtherKl):
        def other(self, at: _Kl) -> Tensor:
            return kl_estimate(objective.kl, at.logp, at.ref).nan_to_num().mean() * at.counted.sum()

    return planned(Wrong, model, problem, objective)


FAULTS = (
    Fault(
        path=another_estimator_of_the_kl, report="RO-12", rung="forward", points_at=LOSS, options=KL
    ),
    Fault(path=kl_to_the_old_policy, report="RO-13", rung="forward", points_at=LOSS, options=KL),
    Fault(path=kl_the_other_way_round, report="", rung="forward", points_at=LOSS, options=KL),
    Fault(path=kl_subtracted, report="", rung="forward", points_at=LOSS, options=KL),
    Fault(
        path=kl_without_gradient, report="RO-12", rung="gradient", points_at=r"mismatch", options=KL
    ),
    Fault(path=kl_over_masked_tokens, report="LN-10", rung="forward", points_at=LOSS, options=KL),
)
