"""Looking again every night, with more seeds each time, until something is decided.

A test at level alpha that is repeated every night errs sooner or later. Here night k = 1, 2, ... of one code version tests at

    alpha / (k (k + 1))        (alpha/2, alpha/6, alpha/12, ...)

and since 1/(k (k + 1)) = 1/k - 1/(k + 1), the levels of K nights sum to alpha (1 - 1/(K + 1)) < alpha. By Bonferroni the
chance to err on any night, of however many, stays below alpha, whatever the dependence between nights and however many
seeds each adds, as long as that number does not depend on their outcome. It is alpha spending (Lan and DeMets,
"Discrete sequential boundaries for clinical trials", Biometrika 1983) without their joint distribution of looks, which
would need the final number of looks and a known spread. Halving the level each night would also be valid, but by night
30 it leaves alpha/2**30; here it is alpha/930. A new code version begins at night 1 with fresh seeds and an alpha of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lsverify.errors import InputError

Decision = Literal["equivalent", "different", "undecided", "void"]


def level(alpha: float, look: int | None) -> float:
    """The level of the test at look `look`, from 1; all of `alpha` (above 0, below 0.5) where None: a single look that was planned."""
    if not 0 < alpha < 0.5:
        raise InputError(f"alpha {alpha} is not allowed: use a number above 0 and below 0.5")
    if look is None:
        return alpha
    if look < 1:
        raise InputError(f"look {look} is not allowed: count the nights of a code version from 1")
    return alpha / (look * (look + 1))


def standing(nights: Sequence[Decision]) -> Decision:
    """What stands after these nights of one arm and one code version, in order.

    The first `equivalent` or `different` stands, since all nights together err with at most alpha. A later night that
    decides the opposite withdraws both, which can only lower the error. `void` nights count for nothing.
    """
    decided = {night for night in nights if night in ("equivalent", "different")}
    if len(decided) == 1:
        return decided.pop()
    return "void" if nights and set(nights) == {"void"} else "undecided"
