"""The smooth weights of `sapo` and `vespo`, and the constant weights that the sampler's log-probs give.

Each looks at one response only, so a response's part of the loss needs nothing of its siblings' weights.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lsverify.objective_options import Objective

VESPO_TOKEN = 20.0
"""A token's log-ratio counts at most this, either way (TRL and the paper's code)."""
VESPO_WHOLE = (math.log(1e-8), 20.0)
"""Bounds of a log-ratio of a whole response, and of a token's sampler correction inside it."""
SATURATED = 750.0
"""Beyond this a float64 sigmoid is 1 and its slope 0, while the ratio itself may overflow."""


def sapo_gate(objective: Objective, advantage: float, log_ratio: Tensor) -> Tensor:
    """[R] the gate f(r) = 4 / tau * sigmoid(tau (r - 1)) of log-ratios [R] (2511.20347, eq. 6).

    tau is the temperature of the advantage's sign. f is 2 / tau at r = 1, where its slope is 1.
    """
    tau = objective.sapo_temperature_pos if advantage > 0 else objective.sapo_temperature_neg
    full = tau * (log_ratio.detach().exp() - 1) > SATURATED
    ratio = torch.where(full, 0.0, log_ratio).exp()
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return torch.where(full, 4 / tau, gate)


def vespo_weight(
    objective: Objective, advantage: float, log_ratio: Tensor, correction: Tensor | None
) -> Tensor:
    """[] the constant phi(w) = e^lambda w^k e^(-lambda w), w the ratio of the whole response (2602.10693).

    log_ratio   [counted tokens], per token.
    correction  [counted tokens] weights of `sampler_weights` for tokens, which join the ratio; None: none.
    """
    low, high = VESPO_WHOLE
    log_w = log_ratio.detach().clamp(-VESPO_TOKEN, VESPO_TOKEN).sum()
    if correction is not None:
        log_w = log_w + correction.log().clamp(low, high).sum()
    log_w = log_w.clamp(low, high)
    positive = advantage >= 0
    k = objective.vespo_k_pos if positive else objective.vespo_k_neg
    decay = objective.vespo_lambda_pos if positive else objective.vespo_lambda_neg
    return (decay + k * log_w - decay * log_w.exp()).exp()


def sampler_weights(objective: Objective, old: Tensor, sampler: Tensor) -> Tensor:
    """[R] exp(old - sampler) within the bounds of the options, from log-probs [R] of the counted tokens.

    Truncated importance sampling: per token, or for `sequence_*` one number, from the sum, at all of them.
    """
    log_weight = old - sampler
    if objective.sampler_correction.startswith("sequence"):
        log_weight = log_weight.sum().expand_as(log_weight)
    weight = log_weight.exp()
    low, high = objective.sampler_clip_min, objective.sampler_clip_max
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    if objective.sampler_correction.endswith("_mask"):
        return weight.masked_fill((weight < low) | (weight > high), 0.0)
    return weight.clamp(low, high)
