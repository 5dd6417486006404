"""Random numbers that are keyed, never streamed: the same (seed, step, prompt, response, token) gives the same number.

Two trainings that sample with them differ only where their policies differ, in whatever order, batch or process each
draws. A stream would part at the first response that ends one token earlier, and never meet again.

The generator is Philox4x32 with ten rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011): the seed is its key of 64 bits, (step, prompt, response, token) its counter of four words of 32 bits. For one
seed it is a bijection of the counter, so that no two of these places share a block of random bits. Two purposes
(sampling, the order of prompts) need two seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lsverify.errors import InputError

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
WORD = np.uint64(0xFFFFFFFF)
MOST_SEED = 2**31 - 1
# Each purpose has keys of its own, PURPOSE | seed: the numbers of one say nothing about those of another.
PROMPTS, RESPONSES, TEST, ORDER, FAR_TEST = (purpose << 32 for purpose in range(5))


def keyed_uniform(
    seed: ArrayLike, step: ArrayLike, prompt: ArrayLike, response: ArrayLike, token: ArrayLike
) -> NDArray[np.float64]:
    """Numbers in [0, 1) with 53 bits, one for each place of the broadcast arguments, in their shape.

    All are integers: `seed` from 0 to 2**64 - 1, the others from 0 to 2**32 - 1. Raises InputError.
    """
    high, low, *_ = keyed_words(seed, step, prompt, response, token)
    return ((high << np.uint64(21)) | (low >> np.uint64(11))) * 2.0**-53


def keyed_words(
    seed: ArrayLike, step: ArrayLike, prompt: ArrayLike, response: ArrayLike, token: ArrayLike
) -> tuple[NDArray[np.uint64], ...]:
    """The four words of 32 bits behind each number, as uint64; arguments as in `keyed_uniform`."""
    key = _words("seed", seed, bits=64)
    counter = {"step": step, "prompt": prompt, "response": response, "token": token}
    given = [key, *(_words(name, values, bits=32) for name, values in counter.items())]
    try:
        key, a, b, c, d = np.broadcast_arrays(*given)
    except ValueError:
        shapes = ", ".join(str(array.shape) for array in given)
        raise InputError(
            f"keys of shapes {shapes} do not broadcast: give single numbers or arrays of one shape"
        ) from None
    first, second = key & WORD, key >> np.uint64(32)
    for _ in range(ROUNDS):
        one, two = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (two >> np.uint64(32)) ^ b ^ first, two & WORD
        c, d = (one >> np.uint64(32)) ^ d ^ second, one & WORD
        first, second = (first + KEY_STEPS[0]) & WORD, (second + KEY_STEPS[1]) & WORD
    return a, b, c, d


def _words(name: str, values: ArrayLike, *, bits: int) -> NDArray[np.uint64]:
    array: NDArray[Any] = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"{name} of dtype {array.dtype} is no key: give integers from 0 to 2**{bits} - 1"
        )
    if array.size and (int(array.min()) < 0 or int(array.max()) >= 2**bits):
        worst = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise InputError(f"{name} {worst} is no key: give integers from 0 to 2**{bits} - 1")
    return array.astype(np.uint64)
