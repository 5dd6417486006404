"""How often the decision errs, measured on simulated sweeps.

    python -m lsverify.simulated_sweeps --seeds 6 8 --spread 0.01 0.03 --arms 5

A sweep is a reference with mean test reward 0.7 from an untrained 0.5, whose seeds spread by 0.03, and arms whose paired
gaps have a given mean and spread over seeds. The decision is the real one (`equivalence.decide`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict

from lsverify.equivalence import Array, Margin, decide
from lsverify.errors import InputError
from lsverify.looking import level

Shape = Literal["normal", "skewed", "collapsing"]
SPREADS = (0.01, 0.02, 0.03, 0.05)
SEEDS = (4, 6, 8, 12, 24)
JUST_OVER = 1.02  # times the margin


class Sweep(BaseModel):
    """What is true in a simulated sweep, in units of reward.

    arms: how many are compared and corrected for. gap: the true mean of arm minus reference; spread: its standard deviation over
    seeds. others: the gap of all arms but the first. reference_spread: of the reference's own reward over seeds. seeds: per look.
    shape: of the gap's distribution over seeds: `normal`; `skewed`, an exponential tail towards loss; `collapsing`, where
    one seed in ten loses much and half of the variance is normal. All have mean 0 and variance 1 before they are scaled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seeds: int = 6
    spread: float = 0.03
    gap: float = 0.0
    others: float = 0.0
    arms: int = 1
    reward: float = 0.7
    start: float = 0.5
    reference_spread: float = 0.03
    shape: Shape = "normal"

    def draw(self, sweeps: int, seeds: int, generator: np.random.Generator) -> tuple[Array, Array]:
        """Mean test rewards per seed: arms [sweeps, arms, seeds] and reference [sweeps, seeds]."""
        reference = self.reward + self.reference_spread * generator.normal(size=(sweeps, seeds))
        gaps = np.full((self.arms, 1), self.others)
        gaps[0] = self.gap
        noise = NOISE[self.shape](generator, (sweeps, self.arms, seeds))
        return reference[:, None] + gaps + self.spread * noise, reference


class Rates(BaseModel):
    """The share of sweeps in which the first arm was called so; `any_equivalent`, `any_different`: some arm was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    equivalent: float
    different: float
    any_equivalent: float
    any_different: float


def rates(
    sweep: Sweep,
    generator: np.random.Generator,
    *,
    sweeps: int = 1000,
    nights: int | None = None,
    alpha: float = 0.05,
    margin: Margin | None = None,
    corrected: bool = True,
) -> Rates:
    """Of one planned look at `sweep.seeds`, or of any of `nights` looks that add as many each; `corrected` for looking or not."""
    counts = {
        "seeds": sweep.seeds,
        "arms": sweep.arms,
        "sweeps": sweeps,
        "nights": 1 if nights is None else nights,
    }
    for name, count in counts.items():
        if count < (least := 2 if name == "seeds" else 1):
            raise InputError(f"{name} {count} is not allowed: give {least} or more")
    if sweep.spread < 0:
        raise InputError(f"spread {sweep.spread} is not allowed: give 0 or more")
    looks: Sequence[int | None] = [None] if nights is None else range(1, nights + 1)
    arms, reference = sweep.draw(sweeps, sweep.seeds * len(looks), generator)
    equivalent = np.zeros((sweeps, sweep.arms), dtype=bool)
    different = np.zeros_like(equivalent)
    for look in looks:
        seen = sweep.seeds * (look or 1)
        at = level(alpha, look if corrected else None)
        start = np.array(sweep.start)
        *_, decisions = decide(arms[..., :seen], reference[:, :seen], start, margin or Margin(), at)
        equivalent |= decisions == "equivalent"
        different |= decisions == "different"
    return Rates(
        equivalent=float(equivalent[:, 0].mean()),
        different=float(different[:, 0].mean()),
        any_equivalent=float(equivalent.any(axis=1).mean()),
        any_different=float(different.any(axis=1).mean()),
    )


def just_over(sweep: Sweep, margin: Margin | None = None) -> float:
    """A loss of a little more than the margin at this sweep's true rewards."""
    return -JUST_OVER * (margin or Margin()).width(sweep.reward, sweep.start)


def _normal(generator: np.random.Generator, size: tuple[int, ...]) -> Array:
    return generator.standard_normal(size)


def _skewed(generator: np.random.Generator, size: tuple[int, ...]) -> Array:
    return 1 - generator.standard_exponential(size)


def _collapsing(generator: np.random.Generator, size: tuple[int, ...]) -> Array:
    lost = np.where(generator.random(size) < 0.1, -3, 1 / 3)
    found: Array = (lost + generator.standard_normal(size)) / np.sqrt(2)
    return found


NOISE: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": _normal,
    "skewed": _skewed,
    "collapsing": _collapsing,
}


def table(
    spreads: Sequence[float],
    seeds: Sequence[int],
    *,
    sweeps: int,
    seed: int,
    nights: int | None = None,
    **fields: Any,
) -> Iterator[str]:
    """Markdown lines, one for each spread and number of seeds; every cell draws sweeps of its own."""
    yield "| spread | seeds | no gap: equivalent | no gap: different | just over: equivalent | half lost: different |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for row, (spread, count) in enumerate(product(spreads, seeds)):
        sweep = Sweep(spread=spread, seeds=count, **fields)
        half_lost = (sweep.start - sweep.reward) / 2
        none, over, half = (
            rates(
                sweep.model_copy(update={"gap": gap}),
                np.random.default_rng([seed, row, cell]),
                sweeps=sweeps,
                nights=nights,
            )
            for cell, gap in enumerate((0.0, just_over(sweep), half_lost))
        )
        shares = (none.equivalent, none.different, over.equivalent, half.different)
        yield f"| {spread} | {count} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Error rates of the decision, by simulation.")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="per look")
    parser.add_argument("--spread", type=float, nargs="+", default=SPREADS)
    parser.add_argument(
        "--arms", type=int, default=1, help="compared and corrected for; the others have no gap"
    )
    parser.add_argument("--nights", type=int, help="look every night; a single look without")
    parser.add_argument("--shape", choices=get_args(Shape), default="normal")
    parser.add_argument("--sweeps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    lines = table(
        asked.spread,
        asked.seeds,
        sweeps=asked.sweeps,
        seed=asked.seed,
        nights=asked.nights,
        arms=asked.arms,
        shape=asked.shape,
    )
    try:
        found = list(lines)
    except InputError as error:
        parser.error(str(error))
    sys.stdout.write("\n".join(found) + "\n")


if __name__ == "__main__":
    main()
