"""The GRPO family as pure tensor functions on three axes: advantage, ratio and clip, aggregation.

Shapes: N members (responses, flat over groups), R_i tokens of response i, V vocabulary. With the
counted tokens m_i (the mask of response i; empty for a truncated one under `mask_truncated`) every
objective here is

    loss = sum_i 1/D_i sum_{t in m_i} l_it
    l_it = w_it * policy term + beta * KL_it (kl_in="loss") - entropy_bonus * H_it

and the axes choose the policy term and the denominators D_i; the constants w_it are 1 unless the
sampler's log-probs or the off-policy threshold say otherwise. `prepare` freezes all that couples
responses (advantages, denominators, counted tokens, w_it); then `Plan.member` gives one response's part,
and the parts sum to the loss. `monolithic` is the same loss once more, batched and written apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lsverify.advantages import advantages, kl_estimate
from lsverify.errors import InputError
from lsverify.monolithic import monolithic
from lsverify.objective_options import PRESETS, Objective, preset
from lsverify.weights import sampler_weights, sapo_gate, vespo_weight

if TYPE_CHECKING:
    from lsverify.problems import Problem

__all__ = [
    "PRESETS",
    "MemberLoss",
    "Objective",
    "Plan",
    "Scores",
    "monolithic",
    "prepare",
    "preset",
    "token_entropy",
    "token_logp",
]


def token_logp(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """[R] log-prob of each token: logits [R, V] in nats before the softmax, tokens [R] int64.

    bfloat16 and float16 logits are raised to float32 first; others keep their dtype.
    """
    logits = _tempered(logits, temperature)
    chosen = logits.gather(-1, tokens.to(logits.device)[:, None])[:, 0]
    return chosen - logits.logsumexp(-1)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[R] entropy in nats of each row of logits [R, V]; -inf logits (forbidden tokens) add nothing."""
    logp = _tempered(logits, temperature).log_softmax(-1)
    logp = torch.where(logp == -math.inf, torch.finfo(logp.dtype).min, logp)
    return -(logp.exp() * logp).sum(-1)


def _tempered(logits: Tensor, temperature: float) -> Tensor:
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """What was scored without a graph before the step, each N tensors [R_i].

    ref_logp     under the reference policy; None: the problem's own.
    policy_logp  under the current parameters, for selections that need them. None of the present
                 objectives has one, so it is only checked.
    """

    ref_logp: tuple[Tensor, ...] | None = None
    policy_logp: tuple[Tensor, ...] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class MemberLoss:
    """One response's part of the loss: loss [] with graph, logp [R_i] without (masked slots too)."""

    loss: Tensor
    logp: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What `prepare` froze. It holds copies, so later changes to the problem's tensors do not reach it.

    advantages    [N] float64
    denominators  N numbers D_i, at least 1
    counted       N masks [R_i] bool
    tokens        N tensors [R_i] int64
    old_logp      N tensors [R_i] float64
    ref_logp      N tensors [R_i] float64; None unless a KL term is in the loss
    correction    N tensors [counted tokens of i] float64, from the sampler's log-probs; None without
                  `sampler_correction`
    sampler_logp  N tensors [R_i] float64, or the old ones; None without `off_policy_threshold`
    """

    objective: Objective
    advantages: Tensor
    denominators: tuple[float, ...]
    counted: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    old_logp: tuple[Tensor, ...]
    ref_logp: tuple[Tensor, ...] | None
    correction: tuple[Tensor, ...] | None = None
    sampler_logp: tuple[Tensor, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def member(self, i: int, logits: Tensor) -> MemberLoss:
        """Response i's part: 1/D_i times the sum of its counted tokens' losses.

        logits [R_i, V], row t predicting response token t. Masked rows are never read for the loss:
        whatever they hold, their gradient is zero. A response without counted tokens gives zero, with
        a graph.
        """
        objective, counted, tokens = self.objective, self.counted[i], self.tokens[i]
        if logits.ndim != 2 or len(logits) != len(tokens):
            raise InputError(
                f"logits of member {i} have shape {tuple(logits.shape)}; its response has "
                f"{len(tokens)} tokens, so give [{len(tokens)}, vocabulary]"
            )
        kept = logits if bool(counted.all()) else logits[counted.to(logits.device)]
        logp = token_logp(kept, tokens[counted], objective.temperature)
        entropy = token_entropy(kept, objective.temperature) if objective.entropy_bonus else None
        loss = self._part(i, logp, entropy)
        with torch.no_grad():
            every = logp.detach()
            if kept is not logits:
                every = token_logp(logits, tokens, objective.temperature)
        return MemberLoss(loss=loss, logp=every)

    def part(self, i: int, logp: Tensor, entropy: Tensor | None = None) -> Tensor:
        """[] the loss of `member` from log-probs [R_i] and, where there is a bonus, entropies [R_i] in nats."""
        kept = self.counted[i].to(logp.device)
        return self._part(i, logp[kept], None if entropy is None else entropy[kept])

    def _part(self, i: int, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """[] from log-probs and entropies [counted tokens]."""
        losses = self._policy_term(i, logp)
        if self.ref_logp is not None:
            losses = losses + self.objective.beta * self._kl_term(i, logp)
        if entropy is not None:
            losses = losses - self.objective.entropy_bonus * entropy
        return losses.sum() / self.denominators[i]

    def _policy_term(self, i: int, logp: Tensor) -> Tensor:
        """[counted tokens] of response i, from their log-probs, weights included."""
        if self._off_policy(i, logp.detach()):
            return 0.0 * logp
        if self.objective.clip == "vespo":
            correction = None if self.correction is None else self.correction[i].to(logp)
            advantage = float(self.advantages[i])
            log_ratio = logp.detach() - self._counted(self.old_logp, i, logp)
            weight = vespo_weight(self.objective, advantage, log_ratio, correction)
            return -advantage * weight * logp
        term = self._surrogate(i, logp)
        return term if self.correction is None else term * self.correction[i].to(logp)

    def _surrogate(self, i: int, logp: Tensor) -> Tensor:
        """[counted tokens] of response i: what the ratio and the clip make of its advantage."""
        objective, advantage = self.objective, float(self.advantages[i])
        if objective.ratio == "none":
            return -advantage * logp
        log_ratio = self._log_ratio(i, logp)
        if objective.clip == "cispo":
            low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
            return -advantage * log_ratio.detach().exp().clamp(low, high) * logp
        if objective.clip == "sapo":
            return -advantage * sapo_gate(objective, advantage, log_ratio)
        bound = self._cut(i, log_ratio.detach())
        # Cut before exp: an overflowing ratio that the clip removes must not become 0 * inf in backward.
        ratio = torch.where(bound.isnan(), log_ratio, 0.0).exp()
        return -advantage * torch.where(bound.isnan(), ratio, bound)

    def _kl_term(self, i: int, logp: Tensor) -> Tensor:
        """[counted tokens] of response i."""
        objective, ref = self.objective, self._counted(self.ref_logp, i, logp)
        estimate = kl_estimate(objective.kl, logp, ref)
        if objective.kl_straight_through:
            smooth = kl_estimate("k2", logp, ref)
            return estimate.detach() + (smooth - smooth.detach())
        return estimate * self._log_ratio(i, logp).exp() if objective.kl_weighted else estimate

    def _off_policy(self, i: int, logp: Tensor) -> bool:
        """Whether `off_policy_threshold` drops the policy term of response i."""
        threshold = self.objective.off_policy_threshold
        if threshold is None or float(self.advantages[i]) >= 0 or not len(logp):
            return False
        drift = self._counted(self.sampler_logp, i, logp) - logp
        return float(drift.mean()) > threshold

    def _counted(self, values: tuple[Tensor, ...] | None, i: int, like: Tensor) -> Tensor:
        assert values is not None
        return values[i][self.counted[i]].to(like)

    def _log_ratio(self, i: int, logp: Tensor) -> Tensor:
        """[counted tokens], the same value at all of them unless the ratio is per token."""
        log_ratio = logp - self._counted(self.old_logp, i, logp)
        if self.objective.ratio == "token" or not len(logp):
            return log_ratio
        whole = log_ratio.mean() if self.objective.ratio == "sequence" else log_ratio.sum()
        return whole.expand_as(logp)

    def _cut(self, i: int, log_ratio: Tensor) -> Tensor:
        """The bound that replaces the ratio where the clip cuts the gradient, NaN elsewhere."""
        objective, advantage = self.objective, float(self.advantages[i])
        bound = torch.full_like(log_ratio, math.nan)
        if advantage == 0:
            # Nothing to clip, but 0 times an overflowing ratio would be NaN.
            return torch.ones_like(log_ratio)
        if objective.clip != "two_sided":
            return bound
        ratio = log_ratio.exp()
        if advantage > 0:
            return bound.masked_fill(ratio > 1 + objective.epsilon_high, 1 + objective.epsilon_high)
        bound.masked_fill_(ratio < 1 - objective.epsilon_low, 1 - objective.epsilon_low)
        if objective.dual_clip is not None:
            bound.masked_fill_(ratio > objective.dual_clip, objective.dual_clip)
        return bound

    def clip_side(self, i: int, logp: Tensor) -> Tensor:
        """[R_i] int8 from log-probs [R_i]: -1 where the low side of the clip cuts the gradient of a
        counted token, +1 where the high side (or `dual_clip`) does, 0 elsewhere.

        For `cispo`, whose gradient is bounded and not cut: where the weight sits at its low or high
        bound and the advantage is not zero.
        """
        objective, counted = self.objective, self.counted[i].to(logp.device)
        side = torch.zeros(len(logp), dtype=torch.int8, device=logp.device)
        if objective.clip not in ("two_sided", "cispo") or float(self.advantages[i]) == 0:
            return side
        if self._off_policy(i, logp.detach()[counted]):
            return side
        log_ratio = self._log_ratio(i, logp.detach()[counted])
        if objective.clip == "cispo":
            ratio = log_ratio.exp()
            low, high = ratio < 1 - objective.epsilon_low, ratio > 1 + objective.epsilon_high
        else:
            bound = self._cut(i, log_ratio)
            low, high = bound < 1, bound > 1
        side[counted] = high.to(torch.int8) - low.to(torch.int8)
        return side


def prepare(objective: Objective, problem: Problem, scores: Scores | None = None) -> Plan:
    """Freeze what couples the responses. Denominators D_i, with N responses:

    sequence_mean  N * |m_i|: mean over counted tokens, then over responses. A response without
                   counted tokens adds 0 and is still one of the N (GRPO; TRL "grpo").
    global_tokens  sum_j |m_j| over the whole problem (DAPO; TRL "dapo").
    local_tokens   K * sum_{j in micro-batch of i} |m_j|: mean over the micro-batch's counted tokens,
                   then over the K micro-batches, empty or short ones included (TRL "bnpo").
    constant       N * constant_length (Dr. GRPO; TRL "dr_grpo"; with 1 TRL "luspo").

    Raises InputError when beta is above 0 and there are no reference log-probs, when a sampler
    correction is asked for and there are no sampler's, when scores do not fit the problem, or when a
    log-prob that counts is not finite.
    """
    scores = scores or Scores()
    responses = problem.responses
    counted = tuple(
        each.mask.cpu() & (not (objective.mask_truncated and each.truncated)) for each in responses
    )
    own = [each.ref_logp for each in responses]
    ref = list(scores.ref_logp) if scores.ref_logp is not None else own
    _check("old_logp", [each.old_logp for each in responses], counted)
    if scores.policy_logp is not None:
        _check("policy_logp", scores.policy_logp, counted)
    rewards = [float(each.reward) for each in responses]
    if objective.beta > 0:
        _check("ref_logp", ref, counted)
        if objective.kl_in == "reward":
            for i, (each, mask) in enumerate(zip(responses, counted, strict=True)):
                old_i, ref_i = (_copy(x)[mask] for x in (each.old_logp, ref[i]))
                rewards[i] -= objective.beta * float(kl_estimate(objective.kl, old_i, ref_i).sum())
    sampler = [each.sampler_logp for each in responses]
    corrected = objective.sampler_correction != "none"
    if corrected:
        _check("sampler_logp", sampler, counted)
    drifted = objective.off_policy_threshold is not None
    drift_from = [
        each.old_logp if each.sampler_logp is None else each.sampler_logp for each in responses
    ]
    in_loss = objective.beta > 0 and objective.kl_in == "loss"
    values = advantages(objective.advantage, rewards, problem.group_of, objective.advantage_epsilon)
    return Plan(
        objective=objective,
        advantages=torch.tensor(values, dtype=torch.float64),
        denominators=_denominators(objective, [int(mask.sum()) for mask in counted]),
        counted=counted,
        tokens=tuple(each.tokens.detach().cpu().clone() for each in responses),
        old_logp=tuple(_copy(each.old_logp) for each in responses),
        ref_logp=tuple(_copy(each) for each in ref) if in_loss else None,
        correction=_corrections(objective, problem, counted) if corrected else None,
        sampler_logp=tuple(_copy(each) for each in drift_from) if drifted else None,
    )


def _corrections(
    objective: Objective, problem: Problem, counted: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    pairs = zip(problem.responses, counted, strict=True)
    return tuple(
        sampler_weights(objective, _copy(each.old_logp)[mask], _copy(each.sampler_logp)[mask])
        for each, mask in pairs
    )


def _denominators(objective: Objective, counts: Sequence[int]) -> tuple[float, ...]:
    members = len(counts)
    match objective.aggregation:
        case "sequence_mean":
            each = [members * count for count in counts]
        case "global_tokens":
            each = [sum(counts)] * members
        case "constant":
            each = [members * objective.constant_length] * members
        case _:
            size = objective.micro_batch or members
            starts = range(0, members, size)
            local = [sum(counts[start : start + size]) for start in starts]
            each = [len(local) * local[i // size] for i in range(members)]
    return tuple(float(max(number, 1)) for number in each)


def _copy(logp: Tensor | None) -> Tensor:
    assert logp is not None
    return logp.detach().to("cpu", torch.float64, copy=True)


MISSING = {
    "ref_logp": "the objective has beta above 0 and member {} has no ref_logp; score the reference policy, or "
    "set beta=0",
    "sampler_logp": "the objective has a sampler_correction and member {} has no sampler_logp; give what the "
    'sampler reported, or set sampler_correction="none"',
}


def _check(name: str, values: Sequence[Tensor | None], counted: Sequence[Tensor]) -> None:
    if len(values) != len(counted):
        raise InputError(f"{name} has {len(values)} members; the problem has {len(counted)}")
    for i, (value, mask) in enumerate(zip(values, counted, strict=True)):
        if value is None:
            raise InputError(MISSING[name].format(i))
        if value.shape != mask.shape:
            raise InputError(
                f"{name} of member {i} has shape {tuple(value.shape)}; its response has {len(mask)} tokens"
            )
        bad = (~value.isfinite().cpu() & mask).nonzero()
        if len(bad):
            at = int(bad[0])
            raise InputError(
                f"{name} of member {i} is {float(value[at])} at token {at}, which counts; score it "
                "again, or mask the token"
            )
