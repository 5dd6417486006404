import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lsverify import keyed
from lsverify.errors import InputError
from lsverify.keyed import keyed_uniform, keyed_words

KEY = (7, 3, 2, 1, 0)
WORD = st.integers(0, 3) | st.integers(0, 2**32 - 1)


def grid(*sizes):
    return np.meshgrid(*(np.arange(size) for size in sizes), indexing="ij")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_words_are_those_that_the_authors_of_philox_published(counter, key, words):
    assert " ".join(f"{int(word):08x}" for word in keyed_words(key, *counter)) == words


def test_a_number_has_the_first_53_bits_of_its_words():
    assert keyed_uniform(0, 0, 0, 0, 0) == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) / 2**53


def test_numbers_do_not_depend_on_order_or_batch():
    places = [axis.ravel() for axis in grid(2, 3, 4, 5, 6)]
    together = keyed_uniform(*places)
    order = np.random.default_rng(0).permutation(together.size)
    shuffled = keyed_uniform(*(axis[order] for axis in places))
    assert np.array_equal(shuffled, together[order])
    alone = [float(keyed_uniform(*place)) for place in zip(*places, strict=True)]
    assert alone == together.tolist()


def test_another_process_draws_the_same_number():
    code = f"from lsverify.keyed import keyed_uniform; print(float(keyed_uniform(*{KEY})).hex())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == float(keyed_uniform(*KEY)).hex()


@pytest.mark.parametrize("axis", range(5))
def test_numbers_along_each_axis_are_uniform_and_uncorrelated(axis):
    places = [np.full(20_000, fixed) for fixed in KEY]
    places[axis] = np.arange(20_000)
    numbers = keyed_uniform(*places)
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 4 / np.sqrt(20_000)


def test_no_two_places_share_a_number():
    """50,000 numbers of 53 bits would collide by chance once in ten million times."""
    numbers = keyed_uniform(*grid(5, 10, 10, 10, 10))
    assert np.unique(numbers).size == numbers.size


@given(place=st.tuples(WORD, WORD, WORD, WORD), axes=st.permutations(range(4)))
@settings(max_examples=50, deadline=None)
def test_axes_do_not_stand_in_for_each_other(place, axes):
    moved = tuple(place[axis] for axis in axes)
    assert (keyed_words(1, *place) == keyed_words(1, *moved)) == (place == moved)


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"ROUNDS": 1}, id="one round: counters beside each other stay alike"),
        pytest.param({"MULTIPLIERS": (np.uint64(1), np.uint64(1))}, id="words are never mixed"),
    ],
)
def test_a_generator_that_does_not_mix_is_seen_as_not_uniform(broken, monkeypatch):
    for name, value in broken.items():
        monkeypatch.setattr(keyed, name, value)
    numbers = keyed_uniform(*KEY[:4], np.arange(20_000))
    assert stats.kstest(numbers, "uniform").pvalue < 1e-3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((1.5, 0, 0, 0, 0), "seed of dtype float64 is no key: give integers from 0 to 2**64 - 1"),
        ((True, 0, 0, 0, 0), "seed of dtype bool is no key: give integers from 0 to 2**64 - 1"),
        ((0, -1, 0, 0, 0), "step -1 is no key: give integers from 0 to 2**32 - 1"),
        ((0, 0, 0, 0, 2**32), "token 4294967296 is no key: give integers from 0 to 2**32 - 1"),
        (
            (0, [1, 2], [1, 2, 3], 0, 0),
            "keys of shapes (), (2,), (3,), (), () do not broadcast: give single numbers or arrays of one shape",
        ),
    ],
)
def test_keys_out_of_range_are_refused(keys, message):
    with pytest.raises(InputError) as refused:
        keyed_uniform(*keys)
    assert str(refused.value) == message
