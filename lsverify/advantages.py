"""Rewards to advantages, and the sampled KL estimators: the part of the objective that looks across a group."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def advantages(
    kind: str, rewards: Sequence[float], group_of: Sequence[int], epsilon: float
) -> list[float]:
    """One advantage per member from rewards [N] and the group index of each member [N].

    group_std      (r - mean of the group) / (std of the group + epsilon); GRPO (2402.03300, section
                   4.1.2), TRL scale_rewards="group".
    group_mean     r - mean of the group; Dr. GRPO (2503.20783), TRL scale_rewards="none".
    leave_one_out  r - mean of the group's other rewards; RLOO (2402.14740, eq. 7).
    batch_std      (r - mean of the group) / (std of all N rewards + epsilon); PPO Lite (2508.08221),
                   TRL scale_rewards="batch".
    none           r.

    Standard deviations have the divisor n - 1, as in TRL and torch, and are 0 for one reward. So a
    group of one has advantage 0, except under leave_one_out, where the mean over no peers is taken as
    a baseline of 0 and the advantage is r: the gradient stays unbiased (TRL, where such groups do not
    train, sets 0). A group of two or more equal rewards has advantages of exactly 0.
    """
    if kind == "none":
        return list(rewards)
    peers: dict[int, list[int]] = {}
    for member, group in enumerate(group_of):
        peers.setdefault(group, []).append(member)
    result = [0.0] * len(rewards)
    for members in peers.values():
        # Measured from the first reward, so that equal rewards cancel exactly and large ones lose nothing.
        shifted = [rewards[member] - rewards[members[0]] for member in members]
        total, size = math.fsum(shifted), len(members)
        centred = [value - total / size for value in shifted]
        if kind == "leave_one_out":
            if size == 1:
                result[members[0]] = rewards[members[0]]
                continue
            centred = [value - (total - value) / (size - 1) for value in shifted]
        scale = _sample_std(shifted) + epsilon if kind == "group_std" else 1.0
        for member, value in zip(members, centred, strict=True):
            result[member] = value / scale if value else 0.0
    if kind == "batch_std":
        scale = _sample_std([reward - rewards[0] for reward in rewards]) + epsilon
        result = [value / scale if value else 0.0 for value in result]
    return result


def _sample_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def kl_estimate(kind: str, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[R] estimate of KL(policy || reference) at each sampled token, in nats, from log-probs [R].

    With d = ref_logp - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 (Schulman, "Approximating KL
    divergence", 2020; k3 is GRPO's eq. 4). No importance weight: off-policy it is biased.
    """
    d = ref_logp - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return d.expm1() - d
