"""Faults of the loss of a token: ratio, clip, entropy, log-prob; each a Plan with one formula wrong."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import LOSS, STEPS, Fault
from lsverify.faults.honest import Dense, planned
from lsverify.objective import MemberLoss, Objective, Plan, prepare, token_entropy
from lsverify.paths import StepResult, full_logits
from lsverify.problems import Problem


def larger_of_the_two_surrogates(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The clipped and the plain term are joined by a maximum where the objective has the minimum."""

    class Wrong(Plan):
        def _policy_term(self, i: int, logp: Tensor) -> Tensor:
            ratio, low, high = (
                self._log_ratio(i, logp).exp(),
                1 - objective.epsilon_low,
                1 + objective.epsilon_high,
            )
            advantage = float(self.advantages[i])
            return -torch.maximum(advantage * ratio, advantage * ratio.clamp(low, high))

    return planned(Wrong, model, problem, objective)


def ratio_clamped_whatever_the_advantage(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The ratio is clamped on both sides for every token: the half of the clip that must not act does."""

    class Wrong(Plan):
        def _policy_term(self, i: int, logp: Tensor) -> Tensor:
            ratio, low, high = (
                self._log_ratio(i, logp).exp(),
                1 - objective.epsilon_low,
                1 + objective.epsilon_high,
            )
            return -float(self.advantages[i]) * ratio.clamp(low, high)

    return planned(Wrong, model, problem, objective)


def clipped_high_only(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Only ratios above the range are cut: falling ones of bad responses go on being pushed."""

    class Wrong(Plan):
        def _cut(self, i: int, log_ratio: Tensor) -> Tensor:
            bound = super()._cut(i, log_ratio)
            return torch.where(bound < 1, torch.nan, bound)

    return planned(Wrong, model, problem, objective)


def one_epsilon_for_both_sides(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The low side's epsilon is used on the high side too, though the objective has another there."""

    class Wrong(Plan):
        def _cut(self, i: int, log_ratio: Tensor) -> Tensor:
            high = 1 + objective.epsilon_low
            bound = super()._cut(i, log_ratio)
            return bound.masked_fill((log_ratio.exp() > high) & (self.advantages[i] > 0), high)

    return planned(Wrong, model, problem, objective)


def ratio_without_gradient(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The ratio is a constant by mistake: its value is right, nothing comes back through it."""

    class Wrong(Plan):
        def _policy_term(self, i: int, logp: Tensor) -> Tensor:
            return super()._policy_term(i, logp.detach()) + 0 * logp

    return planned(Wrong, model, problem, objective)


def sequence_ratio_not_divided_by_length(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The ratio of a whole response is the sum over its tokens where the objective has the mean."""

    class Wrong(Plan):
        def _log_ratio(self, i: int, logp: Tensor) -> Tensor:
            return super()._log_ratio(i, logp) * len(logp)

    return planned(Wrong, model, problem, objective)


def sequence_ratio_over_masked_tokens(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The mean of the response's ratio counts its masked tokens as zeros."""

    class Wrong(Plan):
        def _log_ratio(self, i: int, logp: Tensor) -> Tensor:
            return super()._log_ratio(i, logp) * len(logp) / len(self.tokens[i])

    return planned(Wrong, model, problem, objective)


def importance_weight_is_differentiated(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The clamped weight of the policy gradient is no constant: the gradient goes through it as well."""

    class Wrong(Plan):
        def _policy_term(self, i: int, logp: Tensor) -> Tensor:
            weight = self._log_ratio(i, logp).exp()
            low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
            return -float(self.advantages[i]) * weight.clamp(low, high) * logp

    return planned(Wrong, model, problem, objective)


def entropy_with_the_other_sign(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The bonus is a penalty: entropy joins the loss instead of leaving it."""

    class Wrong(Plan):
        def member(self, i: int, logits: Tensor) -> MemberLoss:
            right = super().member(i, logits)
            entropy = token_entropy(logits[self.counted[i]], objective.temperature).sum()
            more = 2 * objective.entropy_bonus * entropy / self.denominators[i]
            return MemberLoss(loss=right.loss + more, logp=right.logp)

    return planned(Wrong, model, problem, objective)


def entropy_of_masked_tokens(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The entropy bonus is paid for masked tokens too."""

    class Wrong(Plan):
        def member(self, i: int, logits: Tensor) -> MemberLoss:
            right = super().member(i, logits)
            entropy = token_entropy(logits[~self.counted[i]], objective.temperature).sum()
            more = -objective.entropy_bonus * entropy / self.denominators[i]
            return MemberLoss(loss=right.loss + more, logp=right.logp)

    return planned(Wrong, model, problem, objective)


def surrogate_of_likely_tokens_only(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Tokens that the policy holds unlikely are dropped as if they were outliers."""

    class Wrong(Plan):
        def _policy_term(self, i: int, logp: Tensor) -> Tensor:
            likely = (
                logp.detach() >= logp.detach().min()
                if len(logp) < 2
                else logp.detach() > logp.detach().min()
            )
            return super()._policy_term(i, logp) * likely

    return planned(Wrong, model, problem, objective)


def temperature_forgotten(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The objective's temperature is not applied where the step trains."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        return prepare(objective.model_copy(update={"temperature": 1.0}), problem)

    return Dense(prepare=plan)(model, problem, objective)


def log_probs_over_a_part_of_the_vocabulary(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Log-probs are normalised over the most likely half of the vocabulary, as the sampler's filter left it."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        found = full_logits(model, problem, i)
        chosen = problem.responses[i].tokens[:, None]
        kept = found >= found.median(-1, keepdim=True).values
        return found.masked_fill(~kept.scatter(-1, chosen, True), -1e4)

    return Dense(logits=logits)(model, problem, objective)


def log_probs_of_the_sampler_as_old(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The ratio is to what the sampling engine reported, though the objective has no correction for it."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        sampled = [
            r.old_logp if r.sampler_logp is None else r.sampler_logp for r in problem.responses
        ]
        old = [
            torch.where(r.mask, s, r.old_logp)
            for r, s in zip(problem.responses, sampled, strict=True)
        ]
        return prepare(objective, problem.replace_logps(old=old))

    return Dense(prepare=plan)(model, problem, objective)


def old_log_probs_in_half_precision(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Old log-probs come from bfloat16 logits, the current ones do not."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        old = [r.old_logp.bfloat16().double() for r in problem.responses]
        return prepare(objective, problem.replace_logps(old=old))

    return Dense(prepare=plan)(model, problem, objective)


def old_log_probs_one_token_late(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Old log-probs are those of the next token, by another convention for where a row begins."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        old = [r.old_logp.nan_to_num(-1.0).roll(-1) for r in problem.responses]
        return prepare(objective, problem.replace_logps(old=old))

    return Dense(prepare=plan)(model, problem, objective)


FAULTS = (
    Fault(path=larger_of_the_two_surrogates, report="", rung="forward", points_at=LOSS),
    Fault(
        path=ratio_clamped_whatever_the_advantage,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"response_lengths": (7, 5, 6)},
    ),
    Fault(path=clipped_high_only, report="", rung="forward", points_at=LOSS),
    Fault(
        path=one_epsilon_for_both_sides,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "dapo", "response_lengths": (7, 5, 6)},
    ),
    Fault(path=ratio_without_gradient, report="", rung="gradient", points_at=r"mismatch|zero"),
    Fault(
        path=sequence_ratio_not_divided_by_length,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "gspo"},
    ),
    Fault(
        path=sequence_ratio_over_masked_tokens,
        report="MP-12",
        rung="forward",
        points_at=LOSS,
        options={"objective": "gspo"},
    ),
    Fault(
        path=importance_weight_is_differentiated,
        report="",
        rung="gradient",
        points_at=r"mismatch",
        options={"objective": "cispo"},
    ),
    Fault(
        path=entropy_with_the_other_sign,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "grpo,entropy_bonus=0.01"},
    ),
    Fault(
        path=entropy_of_masked_tokens,
        report="",
        rung="forward",
        points_at=LOSS,
        options={"objective": "grpo,entropy_bonus=0.01"},
    ),
    Fault(path=surrogate_of_likely_tokens_only, report="", rung="forward", points_at=LOSS),
    Fault(
        path=temperature_forgotten,
        report="RO-03",
        rung="forward",
        points_at=r"loss is|not the ones it computed|response \d+ token",
        options={"objective": "grpo,temperature=0.7"},
    ),
    Fault(
        path=log_probs_over_a_part_of_the_vocabulary,
        report="RO-04",
        rung="forward",
        points_at=r"not the ones it computed",
    ),
    Fault(
        path=log_probs_of_the_sampler_as_old,
        report="RO-04",
        rung="optimizer_delta",
        points_at=STEPS,
    ),
    Fault(path=old_log_probs_in_half_precision, report="PR-01", rung="forward", points_at=LOSS),
    Fault(path=old_log_probs_one_token_late, report="BP-04", rung="forward", points_at=LOSS),
)
