"""Estimators of what arms earn, and how far two arms are apart; on arrays, with generators as arguments.

rewards [S, P]: the mean reward of each of P frozen test prompts over its sampled responses, after training with seed s. Such
a prompt's success is the unit of every distribution here, never a single binary reward. Arms share seeds and prompts, row
by row and column by column, and every interval and p-value keeps both together.

Whoever resamples here resamples whole seeds: the steps of one training depend on each other, and so do its prompts. The decision
between arms is in `equivalence`; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product
from math import factorial

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict
from scipy import stats

from lsverify.errors import InputError

Array = NDArray[np.float64]

DRAWS = 2000
EXACT_UP_TO = 5040  # permutations: all of 7 points, all sign flips of 12 seeds
LEVELS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Estimate(BaseModel):
    """A value with the interval that was found with it, in the value's unit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    interval: tuple[float, float]
    confidence: float


class Distribution(BaseModel):
    """Of the rewards of one arm on the test set.

    mean: over all prompts and seeds, with the spread (standard deviation, S - 1) over seeds of the mean over prompts.
    iqm: interquartile mean over all (seed, prompt).
    seed_quantiles, prompt_quantiles: minimum, quartiles and maximum of the means over prompts and of the means over seeds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean: Estimate
    iqm: Estimate
    spread: float
    seed_quantiles: tuple[float, ...]
    prompt_quantiles: tuple[float, ...]


class Distance(BaseModel):
    """One distance of two arms, with the p-value of swapping them within whole seeds; 0 where they are the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    p: float


class Distances(BaseModel):
    """Of the distributions of an arm's and a reference's prompt successes, over all (seed, prompt).

    ks: the largest difference of distribution functions, 0 to 1 (Kolmogorov-Smirnov).
    superiority: P(arm > reference) + P(equal) / 2 - 1/2, from -1/2 to 1/2: Mann-Whitney's U / (n m) - 1/2.
    wasserstein: the area between the distribution functions, in units of reward.
    energy: the square root of twice the integral of their squared difference, as scipy defines it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ks: Distance
    superiority: Distance
    wasserstein: Distance
    energy: Distance


class Correlation(BaseModel):
    """Spearman's rho, None where one side is constant; two-sided p of permuting one side, exact where all were tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rho: float | None
    p: float | None
    points: int
    exact: bool


def iqm(values: Array) -> Array:
    """Interquartile mean over the last two axes of [..., S, P]: a quarter of the values is cut from either end, rounded down.

    Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice", NeurIPS 2021.
    """
    flat = np.sort(values.reshape(*values.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    found: Array = flat[..., cut : flat.shape[-1] - cut].mean(axis=-1)
    return found


def mean(values: Array) -> Array:
    """Over the last two axes of [..., S, P]."""
    found: Array = values.mean(axis=(-2, -1))
    return found


def bootstrap(
    statistic: Callable[[Array], Array],
    values: Array,
    generator: np.random.Generator,
    *,
    draws: int = DRAWS,
    confidence: float = 0.95,
) -> Estimate:
    """A statistic of [..., S, P] with its percentile interval under resampled seeds and, across all of them, prompts.

    All seeds are tested on the same prompts, so both factors are crossed and a draw takes one sample of each (Owen, "The
    pigeonhole bootstrap", Ann. Appl. Stat. 2007); prompts drawn anew for each seed would average their error away. Paired
    statistics take paired values, such as arm minus reference. With few seeds the interval is too narrow: it describes
    and does not decide.
    """
    seeds, prompts = values.shape
    rows = generator.integers(seeds, size=(draws, seeds, 1))
    columns = generator.integers(prompts, size=(draws, 1, prompts))
    drawn = statistic(values[rows, columns])
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(
        value=float(statistic(values)), interval=(float(low), float(high)), confidence=confidence
    )


def distribution(rewards: ArrayLike, generator: np.random.Generator) -> Distribution:
    """Of rewards [S, P]. Raises InputError."""
    values = _table("rewards", rewards)
    by_seed, by_prompt = values.mean(axis=1), values.mean(axis=0)
    return Distribution(
        mean=bootstrap(mean, values, generator),
        iqm=bootstrap(iqm, values, generator),
        spread=float(by_seed.std(ddof=1)),
        seed_quantiles=tuple(np.quantile(by_seed, LEVELS).tolist()),
        prompt_quantiles=tuple(np.quantile(by_prompt, LEVELS).tolist()),
    )


def over_training(curves: ArrayLike) -> NDArray[np.float64]:
    """Of training rewards [S, T] at each step, over seeds: minimum, quartiles and maximum, [5, T]. Raises InputError."""
    found: Array = np.quantile(_table("curves", curves), LEVELS, axis=0)
    return found


def difference(arm: ArrayLike, reference: ArrayLike, generator: np.random.Generator) -> Estimate:
    """Mean of arm minus reference, both [S, P] and paired, in units of reward. Raises InputError."""
    return bootstrap(mean, np.subtract(*_paired(arm, reference)), generator)


def distances(arm: ArrayLike, reference: ArrayLike, generator: np.random.Generator) -> Distances:
    """Between the distributions of arm and reference, both [S, P] and paired.

    Under no difference arm and reference may change places within any seed: p-values swap whole seeds, in all 2**S ways up to
    12 seeds (the smallest p is then 2 / 2**S), else in 5040 drawn ones with the found one counted in (Phipson and Smyth,
    2010). The tests that scipy has for these distances take prompts for independent and are wrong here. Raises InputError.
    """
    pair = np.stack(_paired(arm, reference))
    seeds = pair.shape[1]
    found = _apart(pair, np.ones((1, seeds)))
    if 2**seeds <= EXACT_UP_TO:
        swapped = _apart(pair, np.array(list(product((1.0, -1.0), repeat=seeds))))
    else:
        signs = generator.choice((1.0, -1.0), size=(EXACT_UP_TO, seeds))
        swapped = np.concatenate([found, _apart(pair, signs)])
    p = _share_as_large(swapped, found[0])
    named = {
        name: Distance(value=float(value), p=float(chance))
        for name, value, chance in zip(Distances.model_fields, found[0], p, strict=True)
    }
    return Distances(**named)


def _apart(pair: Array, signs: Array) -> Array:
    """The four distances [N, 4] of pair [2, S, P] (arm, reference), with both swapped in the seeds of sign -1, signs [N, S]."""
    values = pair.ravel()
    order = np.argsort(values, kind="stable")
    sorted_values = values[order]
    steps = np.diff(sorted_values)
    is_reference, seed, _ = np.unravel_index(order, pair.shape)
    own = np.where(is_reference, -1.0, 1.0)
    count = len(values) / 2
    last_of_ties = np.append(steps > 0, True)
    ranks = stats.rankdata(sorted_values)
    found = np.empty((len(signs), 4))
    for index, sign in enumerate(signs):
        weights = own * sign[seed]
        gap = np.cumsum(weights) / count  # of the two distribution functions
        found[index] = (
            np.abs(gap[last_of_ties]).max(),
            weights @ ranks / (2 * count**2),
            np.abs(gap[:-1]) @ steps,
            np.sqrt(2 * (gap[:-1] ** 2 @ steps)),
        )
    return found


def rank_correlation(x: ArrayLike, y: ArrayLike, generator: np.random.Generator) -> Correlation:
    """Spearman's of x [N] and y [N], whose N points are independent: seeds or arms, never steps of one training.

    All N! permutations up to 7 points (below 4 no p can be under 0.08), else 5040 drawn ones with the found one counted in.
    """
    one, other = _vector("x", x), _vector("y", y)
    if len(one) != len(other):
        raise InputError(f"x has {len(one)} points and y {len(other)}: give pairs")
    both = np.array([one, other])
    points = both.shape[1]
    exact = factorial(points) <= EXACT_UP_TO
    ranks = stats.rankdata(both, axis=1) - (points + 1) / 2
    scale = np.sqrt((ranks**2).sum(axis=1).prod())
    if scale == 0:
        return Correlation(rho=None, p=None, points=points, exact=exact)
    rho = ranks[0] @ ranks[1] / scale
    if exact:
        orders = np.array(list(permutations(range(points))))
    else:
        drawn = generator.permuted(np.tile(np.arange(points), (EXACT_UP_TO, 1)), axis=1)
        orders = np.concatenate([np.arange(points)[None], drawn])
    permuted = ranks[1][orders] @ ranks[0] / scale
    p = float(_share_as_large(permuted[:, None], np.array([rho]))[0])
    return Correlation(rho=float(rho), p=p, points=points, exact=exact)


class BiasAndGap(BaseModel):
    """Whether a larger bias of the gradient along training goes with a larger loss at its end.

    over_arms: of the arms' means over seeds. over_seeds: of the seeds within each arm, in the order given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    over_arms: Correlation
    over_seeds: tuple[Correlation, ...]


def bias_and_gap(bias: ArrayLike, gap: ArrayLike, generator: np.random.Generator) -> BiasAndGap:
    """bias [A, S, T]: relative L2 distance of the gradient to full autograd's at each of T steps, of A arms with S seeds.

    gap [A, S]: mean test reward, reference minus arm. A training's bias is its mean over steps, one point; arms or seeds are
    permuted. Raises InputError.
    """
    steps, lost = np.asarray(bias, dtype=np.float64), _table("gap", gap)
    if steps.ndim != 3 or steps.shape[:2] != lost.shape or not np.isfinite(steps).all():
        raise InputError(
            f"bias of shape {steps.shape} does not go with gaps of shape {lost.shape}: "
            "give finite [arms, seeds, steps] and [arms, seeds]"
        )
    along = steps.mean(axis=2)
    return BiasAndGap(
        over_arms=rank_correlation(along.mean(axis=1), lost.mean(axis=1), generator),
        over_seeds=tuple(
            rank_correlation(one, other, generator) for one, other in zip(along, lost, strict=True)
        ),
    )


def _share_as_large(found: Array, observed: Array) -> Array:
    """The share of rows of found [N, K] that are at least as far from 0 as observed [K], with rounding as a tie."""
    share: Array = (np.abs(found) >= np.abs(observed) * (1 - 1e-12) - 1e-15).mean(axis=0)
    return share


def _paired(arm: ArrayLike, reference: ArrayLike) -> tuple[Array, Array]:
    ours, theirs = _table("arm", arm), _table("reference", reference)
    if ours.shape != theirs.shape:
        raise InputError(
            f"arm has shape {ours.shape} and reference {theirs.shape}: "
            "give both the same seeds and prompts, in the same order"
        )
    return ours, theirs


def _table(name: str, values: ArrayLike) -> Array:
    table = np.asarray(values, dtype=np.float64)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 1:
        raise InputError(f"{name} has shape {table.shape}: give two axes, with 2 rows or more")
    return _finite(name, table)


def _vector(name: str, values: ArrayLike) -> Array:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) < 2:
        raise InputError(f"{name} has shape {vector.shape}: give one axis of 2 points or more")
    return _finite(name, vector)


def _finite(name: str, values: Array) -> Array:
    unusable = int((~np.isfinite(values)).sum())
    if unusable:
        raise InputError(
            f"{name} has {unusable} values that are not finite: leave out seeds that broke off"
        )
    return values
