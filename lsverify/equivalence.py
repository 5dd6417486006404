"""Whether an arm trains to what the reference trains to: a decision by equivalence tests over seeds.

An arm is within the margin where, in expectation over seeds and on the frozen test set,

    |arm - reference| < r reference     and     |arm - reference| < g (reference - start),    r = 5%, g = 20%.

The right sides are estimates too, so no margin is computed and then taken as known: each side is a linear contrast of
(arm, reference, start), taken per seed and positive within the margin,

    r reference + gap,   r reference - gap,   g gain + gap,   g gain - gap,     gap = arm - reference, gain = reference - start,

and a one-sided t test asks whether its mean is above 0 (the device of Fieller, "Some problems in interval estimation",
JRSS B 1954: a ratio is tested as a contrast without division). With six seeds a bootstrap over seeds is anti-conservative
(it knows neither the spread's own error nor the factor S / (S - 1)); the paired t is exact for normal contrasts.

- `equivalent`: all four are above 0. Each is tested at the whole level: to claim all, none needs correction (intersection-union,
  Berger and Hsu, "Bioequivalence trials, intersection-union tests and equivalence confidence sets", Stat. Sci. 1996). A gap that
  is significant yet within the margin is equivalent: the margin says what matters.
- `different`: some contrast is below 0, each at a quarter of the level (Bonferroni: any of the four may be the one). A
  contrast cannot be above and below 0 at levels under one half, so no arm is both.
- `undecided`: neither, with the number of seeds that would decide.

Over arms, Holm's correction for each of the two claims: an arm that is wrongly called equivalent (or different) is the error,
whichever arm it is, and Holm bounds the chance of any such error without assumptions on the dependence between arms, which share seeds
and reference. Control and yardstick claim nothing about an arm, they can only make the comparison void, and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from lsverify.errors import InputError

Array = NDArray[np.float64]

SIDES = 4
POWER = 0.8
MOST_SEEDS = 1000
ROUNDING = 1e-12  # of rewards of order one: without it an arm exactly on the margin falls to either side of it


@dataclass(frozen=True, kw_only=True)
class Margin:
    """How far an arm's mean test reward may be from the reference's: below both shares. Raises InputError."""

    of_reward: float = 0.05
    of_gain: float = 0.2

    def __post_init__(self) -> None:
        for name, share in (("of_reward", self.of_reward), ("of_gain", self.of_gain)):
            if not 0 < share < 1:
                raise InputError(
                    f"margin {name} {share} is not allowed: use a share above 0 and below 1"
                )

    def sides(self, arm: Array, reference: Array, start: Array) -> Array:
        """The four contrasts per seed, [..., 4, S], from mean test rewards [..., S]; all positive within the margin."""
        gap, gain = arm - reference, reference - start
        reward = self.of_reward * reference
        gains = self.of_gain * gain
        return np.stack(
            np.broadcast_arrays(reward + gap, reward - gap, gains + gap, gains - gap), axis=-2
        )

    def width(self, reference: float, start: float) -> float:
        """The margin in units of reward at these mean rewards."""
        return min(self.of_reward * reference, self.of_gain * (reference - start))


def p_above(contrast: Array) -> Array:
    """One-sided p that the mean over seeds of a contrast [..., S] is above 0; 1 where it is exactly 0 everywhere."""
    seeds = contrast.shape[-1]
    contrast = np.where(np.abs(contrast) < ROUNDING, 0.0, contrast)
    mean = contrast.mean(axis=-1)
    error = contrast.std(axis=-1, ddof=1) / np.sqrt(seeds)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, np.where(error == 0, -np.inf, 0.0), mean / error)
    found: Array = special.stdtr(seeds - 1, -t)
    return found


def p_values(sides: Array) -> tuple[Array, Array]:
    """p of `equivalent` and of `different` [...], from contrasts [..., 4, S]; before any correction over arms."""
    return (
        p_above(sides).max(axis=-1),
        np.minimum(1, SIDES * p_above(-sides).min(axis=-1)),
    )


def holm(p: Array) -> Array:
    """p-values [..., A] corrected over their last axis (Holm, Scand. J. Stat. 1979)."""
    arms = p.shape[-1]
    order = np.argsort(p, axis=-1)
    steps = np.take_along_axis(p, order, axis=-1) * np.arange(arms, 0, -1)
    stepped = np.minimum(1, np.maximum.accumulate(steps, axis=-1))
    found = np.empty_like(p)
    np.put_along_axis(found, order, stepped, axis=-1)
    return found


def decide(
    arms: Array, reference: Array, start: Array, margin: Margin, at: float
) -> tuple[Array, Array, NDArray[np.str_]]:
    """Corrected p of `equivalent` and of `different`, and the decisions at level `at`, all [..., A].

    arms [..., A, S], reference [..., S], start [..., S] or []: mean test rewards per seed.
    """
    start = np.broadcast_to(start, reference.shape)
    sides = margin.sides(arms, reference[..., None, :], start[..., None, :])
    equivalent, different = map(holm, p_values(sides))
    decisions = np.where(
        equivalent <= at, "equivalent", np.where(different <= at, "different", "undecided")
    )
    return equivalent, different, decisions


def seeds_to_decide(sides: Array, *, arms: int, alpha: float, look: int | None) -> int | None:
    """Seeds in all that give 80% power for one of the claims if means and spreads are as in `sides` [4, S].

    Each further look is taken to add as many seeds as the looks before did on average. Power of a t test by the normal
    approximation of the noncentral t (Johnson and Welch, Biometrika 1940).
    """
    seeds = sides.shape[-1]
    n = np.arange(seeds + 1, MOST_SEEDS + 1)
    looks = None if look is None else np.ceil(n * look / seeds)
    each = (alpha if looks is None else alpha / (looks * (looks + 1))) / arms
    mean, sd = sides.mean(axis=-1), np.maximum(sides.std(axis=-1, ddof=1), 1e-300)
    shift = (mean / sd)[:, None] * np.sqrt(n)
    all_above = 1 - (1 - _power(shift, n - 1, each)).sum(axis=0)
    one_below = _power(-shift, n - 1, each / SIDES).max(axis=0)
    enough = np.flatnonzero(np.maximum(all_above, one_below) >= POWER)
    return int(n[enough[0]]) if enough.size else None


def _power(shift: Array, df: NDArray[np.int_], at: Any) -> Array:
    """P(T > its critical value) of a noncentral t with noncentrality `shift`."""
    critical = -special.stdtrit(df, np.broadcast_to(at, df.shape))
    z = (shift - critical * (1 - 1 / (4 * df))) / np.sqrt(1 + critical**2 / (2 * df))
    found: Array = special.ndtr(z)
    return found
