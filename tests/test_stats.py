from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as scipy_stats

from lsverify import stats
from lsverify.errors import InputError
from lsverify.stats import (
    bias_and_gap,
    bootstrap,
    difference,
    distances,
    distribution,
    iqm,
    mean,
    over_training,
    rank_correlation,
)


def rng(seed=0):
    return np.random.default_rng(seed)


def eighths(shape):
    """Rewards with many ties, as means over few responses have."""
    return arrays(np.float64, shape, elements=st.integers(0, 8).map(lambda k: k / 8))


PAIRS = st.tuples(st.integers(2, 4), st.integers(1, 6)).flatmap(
    lambda shape: st.tuples(eighths(shape), eighths(shape))
)


def simulated(generator, *, seeds=6, prompts=96, gap=0.0, spread=0.03, shared=0.05):
    """A paired arm and reference: prompts differ, and each training moves all prompts together."""
    prompt = generator.normal(size=(1, prompts)) * 0.2
    training = shared * generator.normal(size=(seeds, 1))
    reference = 0.7 + prompt + training + 0.1 * generator.normal(size=(seeds, prompts))
    moved = gap + spread * generator.normal(size=(seeds, 1))
    return reference + moved + 0.1 * generator.normal(size=(seeds, prompts)), reference


@given(pair=PAIRS)
@settings(max_examples=40, deadline=None)
def test_distances_are_those_of_scipy_with_ties(pair):
    arm, reference = pair
    found = distances(arm, reference, rng())
    x, y = arm.ravel(), reference.ravel()
    assert found.ks.value == pytest.approx(
        scipy_stats.ks_2samp(x, y, method="asymp").statistic, abs=1e-12
    )
    u = scipy_stats.mannwhitneyu(x, y).statistic
    assert found.superiority.value == pytest.approx(u / (x.size * y.size) - 0.5, abs=1e-12)
    wasserstein = scipy_stats.wasserstein_distance(x, y)
    assert found.wasserstein.value == pytest.approx(wasserstein, abs=1e-12)
    energy = scipy_stats.energy_distance(x, y)
    assert found.energy.value == pytest.approx(energy, abs=1e-7)


@given(pair=PAIRS)
@settings(max_examples=20, deadline=None)
def test_distances_are_symmetric_but_for_the_sign_of_superiority(pair):
    one, other = distances(*pair, rng()), distances(*pair[::-1], rng())
    for name in ("ks", "wasserstein", "energy"):
        assert getattr(one, name).value == pytest.approx(getattr(other, name).value, abs=1e-12)
        assert getattr(one, name).p == getattr(other, name).p
    assert one.superiority.value == pytest.approx(-other.superiority.value, abs=1e-12)
    assert one.superiority.p == other.superiority.p


@given(pair=PAIRS, order=st.randoms())
@settings(max_examples=20, deadline=None)
def test_the_order_of_seeds_and_prompts_does_not_matter(pair, order):
    seeds, prompts = pair[0].shape
    rows, columns = order.sample(range(seeds), seeds), order.sample(range(prompts), prompts)
    moved = [values[rows][:, columns] for values in pair]
    before, after = distances(*pair, rng()), distances(*moved, rng())
    for name in stats.Distances.model_fields:
        assert getattr(after, name).value == pytest.approx(getattr(before, name).value, abs=1e-12)
        assert getattr(after, name).p == getattr(before, name).p


def test_equal_arms_have_distance_zero_and_p_one():
    arm, _ = simulated(rng())
    for found in distances(arm, arm, rng()).model_dump().values():
        assert found == {"value": 0, "p": 1}


@pytest.mark.parametrize("seeds", [3, 6])
def test_an_arm_apart_in_every_seed_has_the_smallest_p_there_is(seeds):
    reference = np.arange(seeds * 4).reshape(seeds, 4) / 100
    found = distances(reference + 1, reference, rng())
    assert found.ks.value == 1
    assert found.superiority.value == 0.5
    assert found.wasserstein.value == pytest.approx(1)
    assert {each.p for each in (found.ks, found.superiority, found.wasserstein)} == {2 / 2**seeds}


def test_p_is_that_of_scipys_permutations_of_pairs():
    arm, reference = simulated(rng(5), seeds=5, prompts=7, gap=0.05)
    index = np.arange(5)

    def wasserstein(x, y):
        """Of the rows that each side has after swapping: rows 0 to 4 are the arm's, 5 to 9 the reference's."""
        rows = np.concatenate([arm, reference])
        return scipy_stats.wasserstein_distance(
            rows[x.astype(int)].ravel(), rows[y.astype(int)].ravel()
        )

    expected = scipy_stats.permutation_test(
        (index, index + 5), wasserstein, permutation_type="samples", alternative="greater"
    )
    assert distances(arm, reference, rng()).wasserstein.p == pytest.approx(expected.pvalue)


def test_many_seeds_are_swapped_at_random_from_the_generator_given():
    arm, reference = simulated(rng(1), seeds=13, prompts=5, gap=0.02)
    once = distances(arm, reference, rng(1))
    assert once == distances(arm, reference, rng(1))
    assert once != distances(arm, reference, rng(2))
    apart = distances(arm + 9, reference, rng(1))
    assert 1 / (stats.EXACT_UP_TO + 1) <= apart.ks.p < 0.002


def test_swapping_whole_seeds_keeps_its_level_where_prompts_as_units_do_not():
    """No difference, but each training moves all of its prompts: prompts are no independent units."""
    ours, units = [], []
    for seed in range(60):
        arm, reference = simulated(rng([7, seed]), prompts=24, spread=0.2)
        ours.append(distances(arm, reference, rng()).ks.p <= 0.05)
        units.append(scipy_stats.ks_2samp(arm.ravel(), reference.ravel()).pvalue <= 0.05)
    assert np.mean(ours) <= 0.12
    assert np.mean(units) >= 0.3


@given(values=eighths((3, 8)))
@settings(max_examples=20, deadline=None)
def test_iqm_is_scipys_trimmed_mean(values):
    expected = scipy_stats.trim_mean(values.ravel(), 0.25)
    assert iqm(values) == pytest.approx(expected)
    assert iqm(np.stack([values, values + 1])) == pytest.approx([expected, expected + 1])


def test_iqm_worked_by_hand():
    assert iqm(np.array([[9.0, 1.0, 2.0], [3.0, 0.0, -5.0]])) == pytest.approx((0 + 1 + 2 + 3) / 4)


def test_bootstrap_has_the_spread_of_seeds_plus_that_of_prompts():
    """Of an additive table the variance of a draw is var(seeds) / S + var(prompts) / P, with divisors S and P."""
    seeds, prompts = rng(0).normal(size=(8, 1)), rng(1).normal(size=(1, 50))
    found = bootstrap(mean, seeds + prompts, rng(2), draws=4000, confidence=0.6826895)
    expected = np.sqrt(seeds.var() / 8 + prompts.var() / 50)
    assert np.diff(found.interval)[0] / 2 == pytest.approx(expected, rel=0.08)
    assert found.value == pytest.approx((seeds + prompts).mean())


@given(shift=st.floats(-2, 2))
@settings(max_examples=20, deadline=None)
def test_difference_and_interval_do_not_move_with_a_common_shift(shift):
    arm, reference = simulated(rng(3), prompts=5)
    plain = difference(arm, reference, rng(4))
    assert difference(arm + shift, reference + shift, rng(4)).interval == pytest.approx(
        plain.interval
    )
    moved = difference(arm + shift, reference, rng(4))
    assert moved.interval == pytest.approx([edge + shift for edge in plain.interval])
    assert plain.interval[0] <= plain.value <= plain.interval[1]


def pooled(values, generator):
    """The mistake: every (seed, prompt) for a unit of its own."""
    flat = values.ravel()
    drawn = flat[generator.integers(flat.size, size=(300, flat.size))].mean(axis=1)
    return np.quantile(drawn, [0.025, 0.975])


def test_intervals_cover_the_truth_where_a_pooled_bootstrap_does_not():
    ours, theirs = [], []
    for seed in range(100):
        generator = rng([11, seed])
        gaps = np.subtract(*simulated(generator, prompts=48))
        low, high = bootstrap(mean, gaps, generator, draws=300).interval
        ours.append(low <= 0 <= high)
        low, high = pooled(gaps, generator)
        theirs.append(low <= 0 <= high)
    assert (
        np.mean(ours) >= 0.84
    )  # six seeds: too narrow by a factor that the decision does not have
    assert np.mean(theirs) <= 0.75


def test_distribution_and_curves_worked_by_hand():
    rewards = np.array([[0.0, 0.5, 1.0], [0.5, 0.5, 1.0]])
    found = distribution(rewards, rng())
    assert found.mean.value == pytest.approx(3.5 / 6)
    assert found.iqm.value == pytest.approx((0.5 + 0.5 + 0.5 + 1) / 4)
    assert found.spread == pytest.approx(abs(0.5 - 2 / 3) / np.sqrt(2))
    assert found.seed_quantiles[::4] == pytest.approx((0.5, 2 / 3))
    assert found.prompt_quantiles == pytest.approx((0.25, 0.375, 0.5, 0.75, 1.0))
    assert over_training([[0.0, 1.0], [1.0, 3.0]]).tolist() == [
        [0, 1],
        [0.25, 1.5],
        [0.5, 2],
        [0.75, 2.5],
        [1, 3],
    ]
    assert stats.Distribution.model_validate_json(found.model_dump_json()) == found


@given(
    points=st.integers(2, 5).flatmap(lambda n: st.tuples(eighths((n,)), eighths((n,)))),
)
@settings(max_examples=30, deadline=None)
def test_rank_correlation_is_scipys_with_all_permutations(points):
    x, y = points
    found = rank_correlation(x, y, rng())
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        assert (found.rho, found.p) == (None, None)
        return
    assert found.exact
    rho = scipy_stats.spearmanr(x, y).statistic
    assert found.rho == pytest.approx(rho, abs=1e-12)

    def distance(sample):
        return abs(scipy_stats.spearmanr(sample, y).statistic)

    expected = scipy_stats.permutation_test(
        (x,), distance, permutation_type="pairings", alternative="greater"
    )
    assert found.p == pytest.approx(expected.pvalue)


def test_rank_correlation_of_many_points_draws_permutations():
    x = np.arange(20.0)
    y = x + 6 * rng(3).normal(size=20)
    found = rank_correlation(x, y, rng(1))
    assert not found.exact
    assert found.rho == pytest.approx(scipy_stats.spearmanr(x, y).statistic)
    assert found == rank_correlation(x, y, rng(1))
    assert rank_correlation(x, x, rng(1)).p == 1 / (stats.EXACT_UP_TO + 1)
    unrelated = rank_correlation(x, rng(8).normal(size=20), rng(1))
    expected = scipy_stats.spearmanr(x, rng(8).normal(size=20)).pvalue
    assert unrelated.p == pytest.approx(expected, abs=0.03)


def test_bias_goes_with_the_gap_over_arms_and_not_by_steps():
    """Four arms in order: p is 2/24 however many steps there are, while steps taken for points would give 1e-20."""
    bias = np.linspace(0.1, 0.9, 4)[:, None, None] + 0.01 * rng().normal(size=(4, 3, 200))
    gap = np.linspace(0, 0.3, 4)[:, None] + 0.001 * rng(1).normal(size=(4, 3))
    found = bias_and_gap(bias, gap, rng())
    assert (found.over_arms.rho, found.over_arms.p) == (pytest.approx(1), pytest.approx(2 / 24))
    assert [each.points for each in found.over_seeds] == [3] * 4
    by_step = scipy_stats.spearmanr(bias.ravel(), np.repeat(gap.ravel(), 200))
    assert by_step.pvalue < 1e-20


NOT_FINITE = np.array([[0.1, np.nan], [0.2, np.inf]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            partial(distances, np.zeros((3, 2)), np.zeros((2, 2)), rng()),
            "arm has shape (3, 2) and reference (2, 2): give both the same seeds and prompts, in the same order",
        ),
        (
            partial(difference, np.zeros((1, 2)), np.zeros((1, 2)), rng()),
            "arm has shape (1, 2): give two axes, with 2 rows or more",
        ),
        (
            partial(distribution, NOT_FINITE, rng()),
            "rewards has 2 values that are not finite: leave out seeds that broke off",
        ),
        (
            partial(rank_correlation, [1.0], [2.0], rng()),
            "x has shape (1,): give one axis of 2 points or more",
        ),
        (
            partial(rank_correlation, [1.0, 2.0], [1.0, 2.0, 3.0], rng()),
            "x has 2 points and y 3: give pairs",
        ),
        (
            partial(bias_and_gap, np.zeros((2, 3, 4)), np.zeros((2, 4)), rng()),
            "bias of shape (2, 3, 4) does not go with gaps of shape (2, 4): "
            "give finite [arms, seeds, steps] and [arms, seeds]",
        ),
    ],
)
def test_unusable_arrays_are_refused(call, message):
    with pytest.raises(InputError) as refused:
        call()
    assert str(refused.value) == message
