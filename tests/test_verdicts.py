import re

import numpy as np
import pytest
from scipy import stats as scipy_stats

from lsverify.equivalence import Margin
from lsverify.errors import InputError
from lsverify.verdicts import Comparison, compare

SEEDS, PROMPTS = 8, 24
PROMPT = np.linspace(-0.2, 0.2, PROMPTS)


def standardised(seed):
    """Noise over seeds [S, 1] of mean 0 and standard deviation 1, so that gaps and spreads are exactly as asked."""
    noise = np.random.default_rng(seed).normal(size=(SEEDS, 1))
    return (noise - noise.mean()) / noise.std(ddof=1)


def table(gap=0.0, *, spread=0.005, reward=0.7, seed=0):
    """Test rewards [S, P]: a training moves all prompts together, and prompts differ."""
    return reward + 0.02 * standardised(0) + gap + spread * standardised(seed + 1) + PROMPT


def sweep(**changed):
    return {
        "full": table(spread=0),
        "exact": table(0.002, seed=1),
        "detach": table(-0.1, seed=2),
        "scrambled": table(-0.2, seed=3),
        "full, other seeds": table(spread=0.02, seed=4),
        **changed,
    }


def without(name):
    return {other: values for other, values in sweep().items() if other != name}


START = 0.5 + PROMPT


def decisions(comparison):
    return {arm.arm: arm.decision for arm in comparison.arms}


def test_arms_are_decided_and_everything_is_in_the_record():
    found = compare(sweep(), START)
    assert found.void == ()
    assert decisions(found) == {"exact": "equivalent", "detach": "different"}
    assert (found.control.decision, found.yardstick.decision) == ("different", "equivalent")
    assert Comparison.model_validate_json(found.model_dump_json()) == found
    exact = found.arms[0]
    half = scipy_stats.t.isf(0.05, SEEDS - 1) * 0.005 / np.sqrt(SEEDS)
    assert (exact.gap, exact.spread) == pytest.approx((0.002, 0.005))
    assert exact.interval == pytest.approx((0.002 - half, 0.002 + half))
    assert exact.worst == pytest.approx(0.002 + 0.005 * standardised(2).min())
    assert exact.margin == pytest.approx(0.035)
    assert exact.p_gap == pytest.approx(
        scipy_stats.ttest_1samp(0.002 + 0.005 * standardised(2), 0).pvalue[0]
    )
    assert exact.reason == "gap +0.0020 +- 0.0033 over 8 seeds lies within the margin 0.0350"


def test_start_may_be_given_for_each_seed():
    assert compare(sweep(), np.tile(START, (SEEDS, 1))) == compare(sweep(), START)


def test_prompts_and_seeds_may_come_in_any_order_that_all_arms_share():
    rows, columns = np.random.default_rng(5).permutation(SEEDS), np.arange(PROMPTS)[::-1]
    moved = {name: values[rows][:, columns] for name, values in sweep().items()}
    before, after = compare(sweep(), START), compare(moved, START[columns])
    for one, other in zip(before.arms, after.arms, strict=True):
        assert one.decision == other.decision
        assert one.p_equivalent == pytest.approx(other.p_equivalent)


def test_wrong_pairing_loses_power():
    """The reference's seeds spread by more than the gap does: paired with another seed's, the arm cannot be decided."""
    wide = 0.6 + 0.4 * np.random.default_rng(6).random((SEEDS, 1)) + PROMPT / 2
    arm = wide + 0.005 * np.random.default_rng(7).normal(size=(SEEDS, 1))
    right = compare(sweep(full=wide, exact=arm), START)
    wrong = compare(sweep(full=wide, exact=np.roll(arm, 1, axis=0)), START)
    assert decisions(right)["exact"] == "equivalent"
    assert decisions(wrong)["exact"] == "undecided"


def test_an_undecided_arm_says_how_many_seeds_would_decide():
    found = compare(sweep(exact=table(-0.01, spread=0.1, seed=9)), START).arms[0]
    assert found.decision == "undecided"
    assert found.seeds_to_decide > SEEDS
    assert found.reason.endswith(f": {found.seeds_to_decide} seeds in all would decide")
    on_the_margin = table(-0.035, spread=0) + 0.03 * np.array([[1], [-1]] * (SEEDS // 2))
    found = compare(sweep(exact=on_the_margin), START).arms[0]
    assert (found.decision, found.seeds_to_decide) == ("undecided", None)
    assert found.reason.endswith(": more than 1000 seeds would decide")


def one_wide_arm():
    """t = 0.035 / (0.04 / sqrt(8)) = 2.5 with 7 degrees of freedom; p of the reference's own spread is in the second digit."""
    return {**without("detach"), "exact": table(0.0, spread=0.04, seed=12)}


def test_more_arms_need_more():
    alone = one_wide_arm()
    assert compare(alone, START).arms[0].p_equivalent == pytest.approx(0.021, abs=2e-3)
    assert decisions(compare(alone, START))["exact"] == "equivalent"
    beside_nine = {**alone, **{f"other {k}": table(-0.035, seed=k) for k in range(20, 29)}}
    first = compare(beside_nine, START).arms[0]
    assert first.decision == "undecided"
    assert first.seeds_to_decide > 8
    wider = {"exact": table(0.0, spread=0.1, seed=12)}
    more, fewer = (
        compare({**arms, **wider}, START).arms[0].seeds_to_decide for arms in (beside_nine, alone)
    )
    assert more > 1.5 * fewer


def test_a_later_look_needs_more():
    first, second = (compare(one_wide_arm(), START, look=look) for look in (1, 2))
    assert (first.level, second.level) == pytest.approx((0.05 / 2, 0.05 / 6))
    assert decisions(first)["exact"] == "equivalent"
    assert decisions(second)["exact"] == "undecided"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"scrambled": table(0.0, seed=5)},
            r"the control 'scrambled' is not seen as different \(gap .* lies within the margin 0\.0350\): a loss would not be seen either",
        ),
        (
            {"scrambled": table(-0.1, spread=0.08, seed=5)},
            r"the control 'scrambled' is not seen as different \(gap .* would decide\): a loss would not be seen either",
        ),
        (
            {"full, other seeds": table(-0.1, seed=5)},
            r"the yardstick 'full, other seeds' is seen as different \(gap -0\.1.*\): the same training with other seeds would be accused",
        ),
        (
            {"full": table(spread=0, reward=0.49)},
            r"the reference is not better than its untrained start \(p 0\.\d+, limit 0\.05\): nothing was learned that could be lost",
        ),
    ],
)
def test_a_comparison_is_void_with_its_reason(changed, reason):
    found = compare(sweep(**changed), START)
    assert set(decisions(found).values()) == {"void"}
    assert any(re.fullmatch(reason, each) for each in found.void), found.void
    assert all(arm.reason == "; ".join(found.void) for arm in found.arms)


def test_an_undecided_yardstick_voids_nothing():
    found = compare(sweep(**{"full, other seeds": table(spread=0.1, seed=5)}), START)
    assert found.yardstick.decision == "undecided"
    assert decisions(found)["exact"] == "equivalent"


def test_a_margin_of_its_own():
    strict = compare(sweep(), START, margin=Margin(of_reward=0.001))
    assert decisions(strict)["exact"] != "equivalent"
    assert strict.arms[0].margin == pytest.approx(0.0007, abs=1e-4)


@pytest.mark.parametrize(
    ("rewards", "start", "message"),
    [
        (
            without("scrambled"),
            START,
            "arm 'scrambled' is missing from 'full', 'exact', 'detach', 'full, other seeds': "
            "a comparison needs its reference, its control and its yardstick",
        ),
        (
            {name: sweep()[name] for name in ("full", "scrambled", "full, other seeds")},
            START,
            "no arm to compare: give at least one beside reference, control, yardstick",
        ),
        (
            {name: values[:1] for name, values in sweep().items()},
            START,
            "rewards of 'full' have shape (1, 24): give [seeds, prompts] with 2 seeds or more",
        ),
        (
            sweep(exact=table()[:5]),
            START,
            "rewards of 'exact' have shape (5, 24), those of 'full' (8, 24): "
            "give every arm the same seeds and prompts",
        ),
        (
            sweep(),
            START[:3],
            "start has shape (3,): give [prompts] or [seeds, prompts] as in (8, 24)",
        ),
        (
            sweep(exact=table() * np.nan),
            START,
            "rewards of 'exact' contain nan: give finite numbers of at least 0, "
            "since the margin is a share of the reference's reward",
        ),
        (
            sweep(exact=table() * 0 - 1),
            START,
            "rewards of 'exact' contain -1: give finite numbers of at least 0, "
            "since the margin is a share of the reference's reward",
        ),
    ],
)
def test_unusable_rewards_are_refused(rewards, start, message):
    with pytest.raises(InputError) as refused:
        compare(rewards, start)
    assert str(refused.value) == message


def test_one_arm_cannot_be_reference_and_control():
    with pytest.raises(InputError, match="names an arm twice"):
        compare(sweep(), START, control="full")
