import pytest

from lsverify.errors import InputError
from lsverify.looking import level, standing


def test_levels_of_all_nights_sum_to_less_than_alpha():
    assert [level(0.06, night) for night in (1, 2, 3)] == pytest.approx([0.03, 0.01, 0.005])
    assert level(0.06, None) == 0.06
    for nights in (1, 10, 1000):
        spent = sum(level(0.05, night) for night in range(1, nights + 1))
        assert spent == pytest.approx(0.05 * nights / (nights + 1))


@pytest.mark.parametrize(
    ("nights", "stands"),
    [
        ([], "undecided"),
        (["undecided", "void"], "undecided"),
        (["void", "void"], "void"),
        (["undecided", "equivalent", "undecided"], "equivalent"),
        (["void", "different", "different"], "different"),
        (["equivalent", "undecided", "different"], "undecided"),
    ],
)
def test_the_first_decision_stands_until_its_opposite(nights, stands):
    assert standing(nights) == stands


@pytest.mark.parametrize(
    ("alpha", "look", "message"),
    [
        (0.0, 1, "alpha 0.0 is not allowed: use a number above 0 and below 0.5"),
        (0.5, 1, "alpha 0.5 is not allowed: use a number above 0 and below 0.5"),
        (0.05, 0, "look 0 is not allowed: count the nights of a code version from 1"),
    ],
)
def test_values_out_of_range_are_refused(alpha, look, message):
    with pytest.raises(InputError) as refused:
        level(alpha, look)
    assert str(refused.value) == message
