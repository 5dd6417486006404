import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats as scipy_stats

from lsverify import equivalence
from lsverify.equivalence import Margin, decide, holm, p_above, p_values, seeds_to_decide
from lsverify.errors import InputError

MARGIN = Margin()
REWARDS = arrays(np.float64, (3, 5), elements=st.integers(0, 64).map(lambda k: k / 64))


def rng(seed=0):
    return np.random.default_rng(seed)


def sides_of(rewards):
    return MARGIN.sides(*rewards)


def test_contrasts_worked_by_hand():
    """Gap -0.03, gain 0.2: 0.035 and 0.04 are the margins."""
    sides = MARGIN.sides(np.array([0.67, 0.67]), np.array([0.7, 0.7]), np.array([0.5, 0.5]))
    expected = [0.035 - 0.03, 0.035 + 0.03, 0.04 - 0.03, 0.04 + 0.03]
    assert sides == pytest.approx(np.repeat(expected, 2).reshape(4, 2))
    assert MARGIN.width(0.7, 0.5) == pytest.approx(0.035)
    assert MARGIN.width(0.7, 0.66) == pytest.approx(0.008)


def test_p_above_is_scipys_paired_t():
    a, b = rng(0).normal(size=(2, 4, 6))
    expected = scipy_stats.ttest_rel(a, b, axis=-1, alternative="greater").pvalue
    assert p_above(a - b) == pytest.approx(expected)


def test_p_above_of_contrasts_without_spread():
    contrasts = np.array([[0.5, 0.5], [-0.5, -0.5], [0.0, 0.0], [-1.0, 1.0]])
    assert p_above(contrasts).tolist() == [0, 1, 1, 0.5]


@pytest.mark.parametrize("percent", range(1, 13))
def test_an_arm_exactly_on_the_margin_without_spread_is_neither(percent):
    gap, gain = percent / 100, 5 * percent / 100
    reference, start = np.full(6, 0.1 + gain), np.full(6, 0.1)
    for arm in (reference - gap, reference + gap):
        assert min(p_values(Margin(of_reward=0.99).sides(arm, reference, start))) == 1


def test_all_must_be_above_and_one_below_is_enough():
    sides = rng(1).normal(size=(4, 7)) + np.array([[2.0], [1.0], [0.4], [3.0]])
    each = [scipy_stats.ttest_1samp(row, 0, alternative="greater").pvalue for row in sides]
    below = [scipy_stats.ttest_1samp(row, 0, alternative="less").pvalue for row in sides]
    equivalent, different = p_values(sides)
    assert equivalent == pytest.approx(max(each))
    assert different == pytest.approx(min(1, 4 * min(below)))


@pytest.mark.parametrize(
    ("p", "corrected"),
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.5, 0.001, 0.9], [1, 0.003, 1]),
        ([0.02], [0.02]),
        ([[0.04, 0.01], [0.01, 0.04]], [[0.04, 0.02], [0.02, 0.04]]),
    ],
)
def test_holm_worked_by_hand(p, corrected):
    assert holm(np.array(p)) == pytest.approx(np.array(corrected))


@given(rewards=REWARDS)
@settings(max_examples=60, deadline=None)
def test_no_arm_is_both_equivalent_and_different(rewards):
    equivalent, different = p_values(sides_of(rewards))
    assert max(equivalent, different) >= 0.5


@given(rewards=REWARDS, order=st.permutations(range(5)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_seeds_does_not_matter(rewards, order):
    before, after = p_values(sides_of(rewards)), p_values(sides_of(rewards[:, order]))
    assert after == pytest.approx(before, abs=1e-6)


@given(rewards=REWARDS)
@settings(max_examples=30, deadline=None)
def test_a_gain_is_judged_like_the_loss_of_its_size(rewards):
    arm, reference, start = rewards
    mirrored = np.stack([2 * reference - arm, reference, start])
    assert p_values(sides_of(mirrored)) == pytest.approx(p_values(sides_of(rewards)), abs=1e-6)


@given(rewards=REWARDS, shift=st.integers(-64, 64))
@settings(max_examples=30, deadline=None)
def test_the_margin_of_the_gain_does_not_move_with_a_common_shift(rewards, shift):
    before, after = sides_of(rewards)[2:], sides_of(rewards + shift / 64)[2:]
    assert after == pytest.approx(before, abs=1e-12)


def drawn(generator, *, gap, spread=0.01, seeds=8, start=0.5):
    reference = 0.7 + 0.005 * generator.normal(size=seeds)
    arm = reference + gap + spread * generator.normal(size=seeds)
    return arm[None], reference, np.array(start)


@pytest.mark.parametrize(
    ("gap", "decision"),
    [
        (0.0, "equivalent"),
        (-0.02, "equivalent"),  # significantly lower, and within the margin
        (0.02, "equivalent"),
        (-0.1, "different"),  # learned half
        (0.1, "different"),
        (-0.035, "undecided"),  # on the margin
    ],
)
def test_decisions(gap, decision):
    *_, found = decide(*drawn(rng(2), gap=gap), MARGIN, 0.05)
    assert found.tolist() == [decision]


def test_an_arm_that_learned_half_of_a_small_gain_is_not_equivalent():
    """Reference 0.70 from 0.66: half is lost at 0.68, which is within 5% of the reward."""
    half = drawn(rng(3), gap=-0.02, spread=0.003, start=0.66)
    *_, found = decide(*half, MARGIN, 0.05)
    assert found == ["different"]
    *_, without_gain = decide(*half, Margin(of_gain=0.999), 0.05)
    assert without_gain == ["equivalent"]


def test_the_margins_own_error_is_in_the_test():
    """On the margin of the gain, with a gap that follows each seed's gain exactly: a margin taken as known passes every second."""
    generator = rng(4)
    reference = 0.7 + 0.03 * generator.normal(size=(4000, 6))
    start = np.full((4000, 6), 0.6) + 0.03 * generator.normal(size=(4000, 6))
    gap = np.full((4000, 6), -0.02)
    *_, decisions = decide((reference + gap)[:, None], reference, start, MARGIN, 0.05)
    taken_as_known = 0.2 * (reference - start).mean(axis=1) > 0.02
    assert 0.045 < (decisions == "equivalent").mean() <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / 4000)
    assert taken_as_known.mean() > 0.45


@pytest.mark.parametrize("df", [3, 5, 11, 30])
@pytest.mark.parametrize("at", [0.05, 0.01])
def test_power_is_that_of_the_noncentral_t(df, at):
    shift = np.linspace(0.5, 8, 16)
    critical = scipy_stats.t.isf(at, df)
    expected = scipy_stats.nct.sf(critical, df, shift)
    found = np.array([equivalence._power(one, np.array([df]), at)[0] for one in shift])
    near = (expected > 0.6) & (expected < 0.95)
    assert near.any()
    assert found[near] == pytest.approx(expected[near], abs=0.04)


@pytest.mark.parametrize(
    ("gap", "decision"), [(0.0, "equivalent"), (-0.02, "equivalent"), (-0.08, "different")]
)
@pytest.mark.parametrize("look", [None, 1])
def test_the_number_of_seeds_named_decides_four_of_five_such_sweeps(gap, decision, look):
    """A pilot with exactly this mean and spread; then sweeps of the size that it names."""
    shape = np.array([-1.0, -1.0, 0.0, 0.0, 1.0, 1.0])
    noise = 0.04 * shape / shape.std(ddof=1)
    reference = np.full(6, 0.7)
    sides = MARGIN.sides(reference + gap + noise, reference, np.full(6, 0.5))
    needed = seeds_to_decide(sides, arms=2, alpha=0.05, look=look)
    looks = 1 if look is None else -(-needed // 6)
    at = 0.05 / 2 / (1 if look is None else looks * (looks + 1))

    def share(seeds):
        arm = 0.7 + gap + 0.04 * rng(5).normal(size=(4000, 1, seeds))
        *_, found = decide(arm, np.full((4000, seeds), 0.7), np.array(0.5), MARGIN, at)
        return (found == decision).mean()

    assert 0.77 <= share(needed) <= 0.9
    assert share(needed * 4 // 5) < 0.77


def test_no_number_of_seeds_decides_a_gap_on_the_margin():
    reference = np.full(4, 0.7)
    arm = reference - 0.035 + np.array([0.03, -0.03, 0.01, -0.01])
    sides = MARGIN.sides(arm, reference, np.full(4, 0.5))
    assert seeds_to_decide(sides, arms=1, alpha=0.05, look=None) is None


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1])
def test_a_margin_out_of_range_is_refused(share):
    with pytest.raises(InputError) as refused:
        Margin(of_gain=share)
    assert str(refused.value) == (
        f"margin of_gain {share} is not allowed: use a share above 0 and below 1"
    )
