"""The objective from its formulas, with floats and loops, one token at a time.

It shares no code with `objective` and `monolithic`, so that the three can disagree; only the options they are
given are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from lsverify.errors import InputError

if TYPE_CHECKING:
    from lsverify.objective import Objective
    from lsverify.problems import Problem

Rows = Sequence[Sequence[float]]


def logp_by_hand(row: Sequence[float], token: int, temperature: float) -> float:
    """Log-prob of a token from one row of logits."""
    scaled = [value / temperature for value in row]
    top = max(scaled)
    return scaled[token] - top - math.log(math.fsum(math.exp(value - top) for value in scaled))


def entropy_by_hand(row: Sequence[float], temperature: float) -> float:
    """Entropy in nats of one row of logits."""
    logps = [logp_by_hand(row, token, temperature) for token in range(len(row))]
    return -math.fsum(math.exp(logp) * logp for logp in logps if logp > -math.inf)


def loss_by_hand(
    objective: Objective,
    problem: Problem,
    logps: Rows,
    entropies: Rows | None = None,
    ref: Rows | None = None,
    detached_at: Rows | None = None,
) -> float:
    """The loss from log-probs, one token at a time.

    logps        N rows of R_i log-probs at the objective's temperature; masked slots are not read.
    entropies    the same for entropies in nats; needed with an entropy bonus.
    ref          the same for the reference policy; None: the problem's own.
    detached_at  the log-probs at which constants of the gradient (the weight of `cispo`) are taken; None:
                 logps. Differences of the loss around x approach its gradient only with this fixed at x.
    """
    terms = terms_by_hand(objective, problem, logps, entropies, ref, detached_at)
    return math.fsum(term.value for term in terms)


class Term(NamedTuple):
    """A counted token's share of one part of the loss, and the size of what was added and subtracted to get it."""

    value: float
    size: float


def terms_by_hand(
    o: Objective,
    problem: Problem,
    logps: Rows,
    entropies: Rows | None,
    ref: Rows | None,
    detached_at: Rows | None,
) -> list[Term]:
    """The counted tokens' shares of `loss_by_hand`, which sums them; same arguments.

    Policy, KL and entropy are terms of their own: beside a clipped ratio, which is constant, an entropy is small.
    """
    responses = problem.responses
    slots = [
        []
        if o.mask_truncated and each.truncated
        else [t for t, counts in enumerate(each.mask.tolist()) if counts]
        for each in responses
    ]
    old = [each.old_logp.tolist() for each in responses]
    if ref is None and o.beta:
        ref = [each.ref_logp.tolist() for each in responses if each.ref_logp is not None]
    sampler = [
        None if each.sampler_logp is None else each.sampler_logp.tolist() for each in responses
    ]
    rewards = [float(each.reward) for each in responses]
    if o.sampler_correction != "none" and None in sampler:
        raise InputError("there is a sampler_correction and no sampler_logp; give it, or set none")
    if o.beta and (ref is None or len(ref) < len(responses)):
        raise InputError(
            "beta is above 0 and there are no reference log-probs; give ref, or set beta=0"
        )
    if o.entropy_bonus and entropies is None:
        raise InputError(
            "entropy_bonus is above 0 and there are no entropies; give them, or set it to 0"
        )
    if ref is not None and o.beta and o.kl_in == "reward":
        for i, its in enumerate(slots):
            rewards[i] -= o.beta * math.fsum(_kl(o.kl, old[i][t], ref[i][t]) for t in its)
    advantages, unit = _advantages(o, rewards, problem.group_of)
    terms = []
    for i, its in enumerate(slots):
        divisor = _divisor(o, slots, i)
        constant = logps[i] if detached_at is None else detached_at[i]
        weights = _corrections(o, old[i], sampler[i], its)
        dropped = _off_policy(o, advantages[i], constant, sampler[i] or old[i], its)
        for t in its:
            value = 0.0
            if not dropped:
                value = _policy_term(o, advantages[i], logps[i], constant, old[i], weights, its, t)
            # An advantage is a difference of rewards: rounding in it is relative to them, not to it.
            parts = [(value, max(abs(value), 1e-3 * unit))]
            if ref is not None and o.beta and o.kl_in == "loss":
                ratio = _ratio(o, logps[i], old[i], its, t) if o.kl_weighted else 1.0
                kl = o.beta * _kl_term(o, logps[i], constant, old[i], ref[i], its, t)
                parts.append((kl, o.beta * ratio * (1 + abs(logps[i][t] - ref[i][t]))))
            if entropies is not None and o.entropy_bonus:
                entropy = o.entropy_bonus * entropies[i][t]
                parts.append((-entropy, entropy))
            terms += [Term(part / divisor, size / divisor) for part, size in parts]
    return terms


def _advantages(
    o: Objective, rewards: Sequence[float], group_of: Sequence[int]
) -> tuple[list[float], float]:
    """The advantages, from exact fractions, and the largest reward in units of advantage."""
    exact = [Fraction(reward) for reward in rewards]
    spread_of_all = _std(exact)
    advantages, unit = [], 0.0
    for i, reward in enumerate(exact):
        group = [exact[j] for j in range(len(exact)) if group_of[j] == group_of[i]]
        peers = [exact[j] for j in range(len(exact)) if group_of[j] == group_of[i] and j != i]
        mean = sum(group, Fraction(0)) / len(group)
        baseline, scale = mean, 1.0
        if o.advantage == "none" or (o.advantage == "leave_one_out" and not peers):
            baseline = Fraction(0)
        elif o.advantage == "leave_one_out":
            baseline = sum(peers, Fraction(0)) / len(peers)
        elif o.advantage == "group_std":
            scale = _std(group) + o.advantage_epsilon
        elif o.advantage == "batch_std":
            scale = spread_of_all + o.advantage_epsilon
        advantages.append(float(reward - baseline) / scale if reward != baseline else 0.0)
        unit = max(unit, abs(rewards[i]) / scale if scale else 0.0)
    return advantages, unit


def _std(values: Sequence[Fraction]) -> float:
    if len(values) == 1:
        return 0.0
    mean = sum(values, Fraction(0)) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _kl(kind: str, logp: float, ref: float) -> float:
    if kind == "k1":
        return logp - ref
    if kind == "k2":
        return (logp - ref) ** 2 / 2
    return math.expm1(ref - logp) - (ref - logp)


def _kl_term(
    o: Objective,
    logp: Sequence[float],
    constant: Sequence[float],
    old: Sequence[float],
    ref: Sequence[float],
    slots: Sequence[int],
    t: int,
) -> float:
    if o.kl_straight_through:
        # Around `constant` it moves as k2 does, at the height of the estimator.
        moved = _kl("k2", logp[t], ref[t]) - _kl("k2", constant[t], ref[t])
        return _kl(o.kl, constant[t], ref[t]) + moved
    weight = _ratio(o, logp, old, slots, t) if o.kl_weighted else 1.0
    return weight * _kl(o.kl, logp[t], ref[t])


def _corrections(
    o: Objective, old: Sequence[float], sampler: Sequence[float] | None, slots: Sequence[int]
) -> dict[int, float]:
    """The weight that the sampler's log-probs give each counted token."""
    if o.sampler_correction == "none" or sampler is None:
        return dict.fromkeys(slots, 1.0)
    whole = math.fsum(old[s] - sampler[s] for s in slots)
    weights = {}
    for t in slots:
        per_token = o.sampler_correction in ("token_truncate", "token_mask")
        weight = math.exp(old[t] - sampler[t] if per_token else whole)
        below = o.sampler_clip_min is not None and weight < o.sampler_clip_min
        above = o.sampler_clip_max is not None and weight > o.sampler_clip_max
        if below or above:
            bound = o.sampler_clip_min if below else o.sampler_clip_max
            truncated = o.sampler_correction in ("token_truncate", "sequence_truncate")
            weight = bound if truncated and bound is not None else 0.0
        weights[t] = weight
    return weights


def _off_policy(
    o: Objective,
    advantage: float,
    logp: Sequence[float],
    sampler: Sequence[float],
    slots: Sequence[int],
) -> bool:
    if o.off_policy_threshold is None or advantage >= 0 or not slots:
        return False
    return math.fsum(sampler[s] - logp[s] for s in slots) / len(slots) > o.off_policy_threshold


def _vespo(
    o: Objective,
    advantage: float,
    logp: Sequence[float],
    old: Sequence[float],
    weights: dict[int, float],
) -> float:
    tiny = 1e-8
    total = math.fsum(min(max(logp[s] - old[s], -20.0), 20.0) for s in weights)
    total += math.fsum(min(math.log(max(weight, tiny)), 20.0) for weight in weights.values())
    w = min(max(math.exp(min(total, 20.0)), tiny), math.exp(20.0))
    k, decay = o.vespo_k_pos, o.vespo_lambda_pos
    if advantage < 0:
        k, decay = o.vespo_k_neg, o.vespo_lambda_neg
    return math.exp(k * math.log(w) + decay * (1 - w))


def _policy_term(
    o: Objective,
    advantage: float,
    logp: Sequence[float],
    constant: Sequence[float],
    old: Sequence[float],
    weights: dict[int, float],
    slots: Sequence[int],
    t: int,
) -> float:
    if o.clip == "vespo":
        return -_vespo(o, advantage, constant, old, weights) * advantage * logp[t]
    return weights[t] * _surrogate(o, advantage, logp, constant, old, slots, t)


def _surrogate(
    o: Objective,
    advantage: float,
    logp: Sequence[float],
    constant: Sequence[float],
    old: Sequence[float],
    slots: Sequence[int],
    t: int,
) -> float:
    if o.ratio == "none":
        return -advantage * logp[t]
    if o.clip == "cispo":
        weight = _ratio(o, constant, old, slots, t)
        weight = min(max(weight, 1 - o.epsilon_low), 1 + o.epsilon_high)
        return -weight * advantage * logp[t]
    ratio = _ratio(o, logp, old, slots, t)
    if o.clip == "none":
        return -ratio * advantage
    if o.clip == "sapo":
        tau = o.sapo_temperature_pos if advantage > 0 else o.sapo_temperature_neg
        return -4 / (tau * (1 + math.exp(-tau * (ratio - 1)))) * advantage
    clipped = min(max(ratio, 1 - o.epsilon_low), 1 + o.epsilon_high)
    surrogate = min(ratio * advantage, clipped * advantage)
    if o.dual_clip is not None and advantage < 0:
        surrogate = max(surrogate, o.dual_clip * advantage)
    return -surrogate


def _ratio(
    o: Objective, logp: Sequence[float], old: Sequence[float], slots: Sequence[int], t: int
) -> float:
    if o.ratio == "token":
        return math.exp(logp[t] - old[t])
    total = math.fsum(logp[s] - old[s] for s in slots)
    return math.exp(total / len(slots) if o.ratio == "sequence" else total)


def _divisor(o: Objective, slots: Sequence[Sequence[int]], i: int) -> float:
    members = len(slots)
    if o.aggregation == "sequence_mean":
        return members * len(slots[i])
    if o.aggregation == "global_tokens":
        return sum(len(its) for its in slots)
    if o.aggregation == "constant":
        return members * o.constant_length
    size = o.micro_batch or members
    first = i - i % size
    return math.ceil(members / size) * sum(len(its) for its in slots[first : first + size])
