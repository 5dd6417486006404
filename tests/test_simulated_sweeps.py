import subprocess
import sys

import numpy as np
import pytest

from lsverify import simulated_sweeps
from lsverify.equivalence import Margin
from lsverify.errors import InputError
from lsverify.simulated_sweeps import NOISE, Sweep, just_over, main, rates

CHANCE = 3 * np.sqrt(0.05 * 0.95 / 1000)  # three standard errors of a rate of 5% over 1,000 sweeps


def rng(seed=0):
    return np.random.default_rng(seed)


def measured(seed=0, *, nights=None, corrected=True, **fields):
    return rates(Sweep(**fields), rng(seed), nights=nights, corrected=corrected)


def over(**fields):
    sweep = Sweep(**fields)
    return {**fields, "gap": just_over(sweep)}


@pytest.mark.parametrize(("spread", "seeds"), [(0.01, 6), (0.02, 8), (0.03, 12), (0.05, 32)])
@pytest.mark.parametrize("arms", [1, 5])
def test_of_1000_sweeps_without_a_gap_80_percent_are_equivalent_and_just_over_it_5(
    spread, seeds, arms
):
    """At the first night's look, with as many seeds as that spread needs."""
    fields = {"spread": spread, "seeds": seeds, "arms": arms}
    found = measured(**fields, nights=1)
    assert found.equivalent >= 0.8
    assert found.any_different == 0
    assert measured(**over(**fields), nights=1).equivalent <= 0.05


@pytest.mark.parametrize("spread", [0.02, 0.03])
def test_a_single_look_just_over_the_margin_errs_in_less_than_5_percent(spread):
    """The rate is near 4%, so that 1,000 sweeps would show more than 5% once in ten times: 20,000 do not."""
    sweep = Sweep(spread=spread, seeds=12)
    sweep = sweep.model_copy(update={"gap": just_over(sweep)})
    assert rates(sweep, rng(), sweeps=20_000).equivalent <= 0.05


def test_too_few_seeds_are_undecided_and_not_wrong():
    found = measured(spread=0.05, seeds=4)
    assert found.equivalent < 0.1
    assert found.different < 0.01


def test_an_arm_that_learned_half_is_never_equivalent():
    found = measured(spread=0.03, gap=-0.1)
    assert found.equivalent == 0
    assert found.different > 0.9


@pytest.mark.parametrize("gap", ["just inside", "just outside"])
@pytest.mark.parametrize("spread", [0.01, 0.1])
def test_wrong_claims_on_either_side_of_the_margin_keep_their_level(gap, spread):
    """Both wrong claims, for spreads far below the margin and above it."""
    inside = -0.9999 * Margin().width(0.7, 0.5)
    found = measured(spread=spread, gap=inside if gap == "just inside" else 1.0002 * inside)
    wrong = found.different if gap == "just inside" else found.equivalent
    assert wrong <= 0.05 + CHANCE


def test_any_of_five_arms_on_the_margin_errs_no_more_than_one():
    edge = -1.0001 * Margin().width(0.7, 0.5)
    fields = {"spread": 0.01, "seeds": 8, "gap": edge, "others": edge, "arms": 5}
    assert measured(**fields).any_equivalent <= 0.05 + CHANCE


def test_arms_without_holm_err_more(monkeypatch):
    monkeypatch.setattr("lsverify.equivalence.holm", lambda p: p)
    edge = -1.0001 * Margin().width(0.7, 0.5)
    fields = {"spread": 0.01, "seeds": 8, "gap": edge, "others": edge, "arms": 5}
    assert measured(**fields).any_equivalent > 0.1


@pytest.mark.parametrize("spread", [0.02, 0.05])
def test_thirty_nights_of_looking_err_no_more_than_one_look(spread):
    fields = over(spread=spread, seeds=6)
    assert measured(**fields, nights=30).equivalent <= 0.05
    assert measured(**fields, nights=30, corrected=False).equivalent > 0.15
    edge = {**fields, "gap": -0.9999 * Margin().width(0.7, 0.5)}
    assert measured(**edge, nights=30).different <= 0.05


def test_more_nights_decide_what_one_cannot():
    once, five = (measured(spread=0.05, seeds=6, nights=nights) for nights in (1, 10))
    assert once.equivalent < 0.1
    assert five.equivalent > 0.95


def test_spending_that_never_ends_is_seen(monkeypatch):
    """alpha / k sums to infinity."""
    monkeypatch.setattr(simulated_sweeps, "level", lambda alpha, look: alpha / look)
    assert measured(**over(spread=0.02, seeds=6), nights=30).equivalent > 0.05


def test_the_first_arm_has_the_gap_and_the_others_theirs():
    sweep = Sweep(gap=-0.1, others=0.2, arms=3, spread=0.05)
    arms, reference = sweep.draw(4000, 6, rng())
    gaps = arms - reference[:, None]
    assert gaps.mean(axis=(0, 2)) == pytest.approx([-0.1, 0.2, 0.2], abs=0.002)
    assert gaps.std(axis=(0, 2)) == pytest.approx([0.05] * 3, rel=0.02)
    assert (reference.mean(), reference.std()) == pytest.approx((0.7, 0.03), rel=0.02)


@pytest.mark.parametrize("shape", NOISE)
def test_shapes_have_mean_zero_and_variance_one(shape):
    noise = NOISE[shape](rng(), (200_000,))
    assert noise.mean() == pytest.approx(0, abs=0.01)
    assert noise.var() == pytest.approx(1, abs=0.02)


def test_tails_towards_loss_cost_some_of_the_level():
    """Not a promise but a measurement: six seeds seldom show the tail, and 5% become up to 16%."""
    found = measured(**over(spread=0.03, shape="skewed"))
    assert 0.08 < found.equivalent < 0.2


def test_the_command_writes_a_table(capsys):
    main(["--seeds", "6", "--spread", "0.01", "0.05", "--sweeps", "200"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| spread | seeds | no gap: equivalent")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 0.01", "| 0.05"]
    assert lines[2].split(" | ")[2] == "100.0%"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "1"], "seeds 1 is not allowed: give 2 or more"),
        (["--arms", "0"], "arms 0 is not allowed: give 1 or more"),
        (["--sweeps", "0"], "sweeps 0 is not allowed: give 1 or more"),
        (["--spread", "-1"], "spread -1.0 is not allowed: give 0 or more"),
        (["--nights", "0"], "nights 0 is not allowed: give 1 or more"),
    ],
)
def test_values_out_of_range_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {message}")


def test_statistics_need_no_torch():
    modules = "stats, equivalence, verdicts, looking, keyed, simulated_sweeps"
    code = f"import sys; from lsverify import {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rates_refuse_too_few_seeds():
    with pytest.raises(InputError, match="seeds 1 is not allowed"):
        rates(Sweep(seeds=1), rng())
