"""The objective in one piece: all responses in padded [N, R] tensors, as a batched trainer computes it.

It shares nothing with `objective.Plan` on purpose, advantages included, so that the sum of members and this
form witness for each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lsverify.errors import InputError

if TYPE_CHECKING:
    from lsverify.objective import Objective, Scores
    from lsverify.problems import Problem


def monolithic(
    objective: Objective,
    problem: Problem,
    logits: Sequence[Tensor],
    scores: Scores | None = None,
) -> Tensor:
    """The loss [] of the whole problem, with graph, from N logits [R_i, V].

    Denominators and formulas as at `objective.prepare`, computed here over the padded batch. Raises InputError
    when logits do not fit the problem or reference log-probs are missing.
    """
    o, responses = objective, problem.responses
    shapes = [tuple(row.shape[:1]) for row in logits]
    if shapes != [tuple(each.tokens.shape) for each in responses]:
        raise InputError(
            f"logits have {shapes} rows; the responses have {[len(each.tokens) for each in responses]}"
        )
    z = pad_sequence(list(logits), batch_first=True)
    z = z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
    mask = pad_sequence([each.mask for each in responses], batch_first=True).to(z.device)
    if o.mask_truncated:
        kept = torch.tensor([not each.truncated for each in responses], device=z.device)
        mask = mask & kept[:, None]
    # Neutral values take the masked slots before any arithmetic: a NaN survives multiplication by zero.
    log_softmax = (torch.where(mask[..., None], z, 0) / o.temperature).log_softmax(-1)
    tokens = pad_sequence([each.tokens for each in responses], batch_first=True).to(z.device)
    logp = log_softmax.gather(-1, tokens[..., None]).squeeze(-1)
    old = _padded([each.old_logp for each in responses], mask, logp)
    ref = _reference(problem, scores) if o.beta else None
    a = _advantages(o, problem, mask, ref).to(logp)[:, None]
    sampler = _sampler(o, problem, mask, logp)
    loss = _kept(o, a, logp, old if sampler is None else sampler, mask) * _policy_term(
        o, a, logp, old, mask, _correction(o, old, sampler, mask)
    )
    if ref is not None and o.kl_in == "loss":
        loss = loss + o.beta * _kl_term(o, logp, old, _padded(ref, mask, logp), mask)
    if o.entropy_bonus:
        # Zero times minus infinity is NaN; a forbidden token has no share in the entropy.
        surprise = torch.where(log_softmax.isinf(), 0, log_softmax)
        loss = loss + o.entropy_bonus * (log_softmax.exp() * surprise).sum(-1)
    return _aggregate(o, torch.where(mask, loss, 0), mask)


def _padded(values: Sequence[Tensor], mask: Tensor, like: Tensor) -> Tensor:
    padded = pad_sequence([each.to(like.device) for each in values], batch_first=True)
    return torch.where(mask, padded, 0).to(like.dtype)


def _reference(problem: Problem, scores: Scores | None) -> Sequence[Tensor]:
    if scores is not None and scores.ref_logp is not None:
        return scores.ref_logp
    values = [each.ref_logp for each in problem.responses if each.ref_logp is not None]
    if len(values) < len(problem.responses):
        raise InputError(
            "the objective has beta above 0 and the problem no ref_logp; score the reference policy, or set beta=0"
        )
    return values


def _advantages(
    o: Objective, problem: Problem, mask: Tensor, ref: Sequence[Tensor] | None
) -> Tensor:
    """[N] float64, with one-hot group membership [groups, N] in place of loops."""
    rewards = torch.tensor([float(each.reward) for each in problem.responses], dtype=torch.float64)
    rewards = rewards.to(mask.device)
    if ref is not None and o.kl_in == "reward":
        old = _padded([each.old_logp for each in problem.responses], mask, rewards)
        kl = _kl(o.kl, old - _padded(ref, mask, rewards))
        rewards = rewards - o.beta * torch.where(mask, kl, 0).sum(1)
    if o.advantage == "none":
        return rewards
    group_of = torch.tensor(problem.group_of, device=mask.device)
    labels = torch.arange(int(group_of.max()) + 1, device=mask.device)
    belongs = (group_of[None] == labels[:, None]).double()
    size = (belongs @ torch.ones_like(rewards))[:, None]
    # Centring by the group's maximum first leaves exact zeros where all rewards of a group are equal.
    top = torch.where(belongs > 0, rewards, -math.inf).amax(1)
    shifted = rewards - belongs.T @ top
    mean = belongs @ shifted / size[:, 0]
    centred = shifted - belongs.T @ mean
    if o.advantage == "leave_one_out":
        n = belongs.T @ size[:, 0]
        return torch.where(n > 1, centred * n / (n - 1).clamp(min=1), rewards)
    if o.advantage == "group_mean":
        return centred
    if o.advantage == "group_std":
        variance = (belongs @ centred.square()) / (size[:, 0] - 1).clamp(min=1)
        scale = belongs.T @ variance.sqrt() + o.advantage_epsilon
    else:
        spread = (rewards - rewards[0]).std() if len(rewards) > 1 else rewards.new_zeros(())
        scale = (spread + o.advantage_epsilon).expand_as(rewards)
    return centred / torch.where(centred == 0, 1, scale)


def _sampler(o: Objective, problem: Problem, mask: Tensor, logp: Tensor) -> Tensor | None:
    values = [each.sampler_logp for each in problem.responses if each.sampler_logp is not None]
    if len(values) == len(problem.responses):
        return _padded(values, mask, logp)
    if o.sampler_correction != "none":
        raise InputError("the objective has a sampler_correction and the problem no sampler_logp")
    return None


def _correction(o: Objective, old: Tensor, sampler: Tensor | None, mask: Tensor) -> Tensor:
    """[N, R] constants, 1 at masked slots and where there is nothing to correct."""
    if o.sampler_correction == "none" or sampler is None:
        return torch.ones_like(old)
    level, _, constraint = o.sampler_correction.partition("_")
    ratio = torch.where(mask, old - sampler, 0)
    ratio = (ratio if level == "token" else ratio.sum(1, keepdim=True).expand_as(ratio)).exp()
    bounded = ratio.clamp(o.sampler_clip_min or 0.0, o.sampler_clip_max or math.inf)
    if constraint == "mask":
        bounded = torch.where(bounded == ratio, ratio, 0)
    return torch.where(mask, bounded, 1)


def _kept(o: Objective, a: Tensor, logp: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """[N, 1] 0 for a response that is too far off-policy, 1 otherwise."""
    if o.off_policy_threshold is None:
        return torch.ones_like(a)
    drift = torch.where(mask, sampler - logp.detach(), 0).sum(1, keepdim=True)
    far = drift / mask.sum(1, keepdim=True).clamp(min=1) > o.off_policy_threshold
    return torch.where((a < 0) & far, 0, 1).to(a)


def _kl_term(o: Objective, logp: Tensor, old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """[N, R]"""
    estimate = _kl(o.kl, logp - ref)
    if o.kl_straight_through:
        # k2 has slope logp - ref, which multiplies logp here while the value stays the estimate's.
        slope = (logp - ref).detach()
        return estimate.detach() + slope * (logp - logp.detach())
    return estimate * _whole(o, logp, old, mask).exp() if o.kl_weighted else estimate


def _whole(o: Objective, logp: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """[N, R] log-ratios, 0 at masked slots of a ratio per token; equal along a row otherwise."""
    log_ratio = torch.where(mask, logp - old, 0)
    if o.ratio == "token":
        return log_ratio
    whole = log_ratio.sum(1, keepdim=True)
    whole = whole / mask.sum(1, keepdim=True).clamp(min=1) if o.ratio == "sequence" else whole
    return whole.expand_as(logp)


def _vespo(o: Objective, a: Tensor, log_ratio: Tensor, correction: Tensor) -> Tensor:
    """[N, 1] from log-ratios and corrections [N, R] that are 0 and 1 at masked slots."""
    bounds = (math.log(1e-8), 20.0)
    total = log_ratio.clamp(-20, 20).sum(1) + correction.log().clamp(*bounds).sum(1)
    w = total.clamp(*bounds).exp()[:, None]
    power = _by_sign(a >= 0, o.vespo_k_pos, o.vespo_k_neg, w)
    decay = _by_sign(a >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg, w)
    return (w**power * (decay * (1 - w)).exp()).detach()


def _by_sign(chosen: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """Numbers in the dtype of `like`; torch.where on two floats would round them to float32."""
    return torch.where(chosen, like.new_tensor(yes), like.new_tensor(no))


def _policy_term(
    o: Objective, a: Tensor, logp: Tensor, old: Tensor, mask: Tensor, correction: Tensor
) -> Tensor:
    """[N, R] from advantages [N, 1]; what it holds at masked slots is finite and dropped later."""
    if o.clip == "vespo":
        weight = _vespo(o, a, torch.where(mask, logp - old, 0), correction)
        return -a * weight * logp
    if o.ratio == "none":
        return -a * logp * correction
    log_ratio = _whole(o, logp, old, mask)
    if o.clip == "cispo":
        weight = log_ratio.exp().clamp(1 - o.epsilon_low, 1 + o.epsilon_high)
        return -a * weight.detach() * logp * correction
    if o.clip == "sapo":
        tau = _by_sign(a > 0, o.sapo_temperature_pos, o.sapo_temperature_neg, log_ratio)
        # Where the sigmoid is 1 to the last bit its slope is 0, and the clamp keeps exp from overflowing.
        gate = torch.sigmoid(tau * torch.expm1(log_ratio.clamp(max=30)))
        return -a * 4 / tau * gate * correction
    # For one sign of A the pessimistic minimum is a one-sided clamp: from above for A > 0; from below, and by
    # dual_clip from above, for A < 0. Clamping the logarithm keeps exp from overflowing where it is cut off.
    high, low = torch.full_like(a, math.inf), torch.full_like(a, -math.inf)
    if o.clip == "two_sided":
        high = torch.where(a < 0, math.log(o.dual_clip or math.inf), high)
        high = torch.where(a > 0, math.log1p(o.epsilon_high), high)
        low = low if o.epsilon_low == 1 else torch.where(a < 0, math.log1p(-o.epsilon_low), low)
    high, low = (torch.where(a == 0, 0, bound) for bound in (high, low))
    return -a * torch.minimum(torch.maximum(log_ratio, low), high).exp() * correction


def _kl(kind: str, difference: Tensor) -> Tensor:
    """From logp - ref_logp."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference**2
    return torch.expm1(-difference) + difference


def _aggregate(o: Objective, loss: Tensor, mask: Tensor) -> Tensor:
    """[] from masked losses [N, R]."""
    if o.aggregation == "sequence_mean":
        return (loss.sum(1) / mask.sum(1).clamp(min=1)).mean()
    if o.aggregation == "global_tokens":
        return loss.sum() / mask.sum().clamp(min=1)
    if o.aggregation == "constant":
        return loss.sum() / (len(loss) * o.constant_length)
    size = o.micro_batch or len(loss)
    pairs = zip(torch.split(loss, size), torch.split(mask, size), strict=True)
    return torch.stack([part.sum() / its.sum().clamp(min=1) for part, its in pairs]).mean()
