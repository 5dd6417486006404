"""What is concluded about each arm of a comparison, and when nothing may be."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict
from scipy import special

from lsverify.equivalence import MOST_SEEDS, Array, Margin, decide, p_above, seeds_to_decide
from lsverify.errors import InputError
from lsverify.looking import Decision, level


class Verdict(BaseModel):
    """One arm against the reference. Rewards and gaps are means over prompts, then over seeds, in units of reward.

    gap: arm minus reference, with its t interval over seeds at 1 - 2 level, not corrected for arms.
    spread: standard deviation over seeds (S - 1) of the paired gap; worst: the lowest gap of any seed. A t test over few seeds
    does not see a collapse rarer than one seed in S: look at `worst`.
    margin: in units of reward at the measured means, for reading only; the tests carry its error.
    p_equivalent, p_different: after Holm over the arms; p_gap: two-sided paired t of gap = 0, uncorrected.
    seeds_to_decide: seeds in all at which one of the two claims has 80% power if gap and spread are as measured, with all
    arms' correction; None where the arm is decided, or where 1000 seeds would not do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    decision: Decision
    reward: float
    gap: float
    interval: tuple[float, float]
    spread: float
    worst: float
    margin: float
    p_equivalent: float
    p_different: float
    p_gap: float
    seeds: int
    seeds_to_decide: int | None
    reason: str


class Comparison(BaseModel):
    """All arms against one reference at one look. `void` says why nothing may be concluded; then every arm's decision is `void`.

    control and yardstick keep their own decisions in a void comparison: they are what it is void by.
    p_learned: one-sided paired t over seeds that the reference's reward is above its start's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    reference_reward: float
    start_reward: float
    p_learned: float
    level: float
    look: int | None
    arms: tuple[Verdict, ...]
    control: Verdict
    yardstick: Verdict
    void: tuple[str, ...]


def compare(
    rewards: Mapping[str, ArrayLike],
    start: ArrayLike,
    *,
    reference: str = "full",
    control: str = "scrambled",
    yardstick: str = "full, other seeds",
    margin: Margin | None = None,
    alpha: float = 0.05,
    look: int | None = None,
) -> Comparison:
    """Decide about every arm.

    rewards: per arm [S, P], the mean reward (at least 0) of each of P frozen test prompts over its sampled responses, after
    training with seed s; row s is the same seed in all arms but the yardstick, which is the reference trained with other
    seeds. start [P] or [S, P]: the same of the untrained model. look: which night of this code version it is, all of
    whose seeds are given; None for a single planned look. The seed is the unit: conclusions are about this test set.
    Raises InputError.
    """
    margin = margin or Margin()
    means, start_means = _means(rewards, start, (reference, control, yardstick))
    at = level(alpha, look)
    names = [name for name in means if name not in (reference, control, yardstick)]

    def verdicts(names: list[str]) -> tuple[Verdict, ...]:
        arms = np.array([means[name] for name in names])
        return _verdicts(names, arms, means[reference], start_means, margin, alpha, look)

    (control_seen,), (yardstick_seen,) = verdicts([control]), verdicts([yardstick])
    p_learned = float(p_above(means[reference] - start_means))
    void = _void(control_seen, yardstick_seen, p_learned, at)
    arms = verdicts(names)
    if void:
        arms = tuple(
            arm.model_copy(update={"decision": "void", "reason": "; ".join(void)}) for arm in arms
        )
    return Comparison(
        reference=reference,
        reference_reward=float(means[reference].mean()),
        start_reward=float(start_means.mean()),
        p_learned=p_learned,
        level=at,
        look=look,
        arms=arms,
        control=control_seen,
        yardstick=yardstick_seen,
        void=void,
    )


def _verdicts(
    names: list[str],
    arms: Array,
    reference: Array,
    start: Array,
    margin: Margin,
    alpha: float,
    look: int | None,
) -> tuple[Verdict, ...]:
    at = level(alpha, look)
    seeds = len(reference)
    width = margin.width(float(reference.mean()), float(start.mean()))
    all_equivalent, all_different, decisions = decide(arms, reference, start, margin, at)
    found = []
    for index, name in enumerate(names):
        gap = arms[index] - reference
        mean, spread = float(gap.mean()), float(gap.std(ddof=1))
        half = float(-special.stdtrit(seeds - 1, at)) * spread / seeds**0.5
        decision = decisions[index].item()
        needed = None
        if decision == "undecided":
            sides = margin.sides(arms[index], reference, start)
            needed = seeds_to_decide(sides, arms=len(names), alpha=alpha, look=look)
        found.append(
            Verdict(
                arm=name,
                decision=decision,
                reward=float(arms[index].mean()),
                gap=mean,
                interval=(mean - half, mean + half),
                spread=spread,
                worst=float(gap.min()),
                margin=width,
                p_equivalent=float(all_equivalent[index]),
                p_different=float(all_different[index]),
                p_gap=min(1.0, 2 * min(float(p_above(gap)), float(p_above(-gap)))),
                seeds=seeds,
                seeds_to_decide=needed,
                reason=_reason(decision, mean, half, width, seeds, needed),
            )
        )
    return tuple(found)


def _reason(
    decision: Decision, gap: float, half: float, width: float, seeds: int, needed: int | None
) -> str:
    measured = f"gap {gap:+.4f} +- {half:.4f} over {seeds} seeds"
    if decision == "equivalent":
        return f"{measured} lies within the margin {width:.4f}"
    if decision == "different":
        return f"{measured} lies beyond the margin {width:.4f}"
    more = f"more than {MOST_SEEDS} seeds" if needed is None else f"{needed} seeds in all"
    return f"{measured} is neither within nor beyond the margin {width:.4f}: {more} would decide"


def _void(control: Verdict, yardstick: Verdict, p_learned: float, at: float) -> tuple[str, ...]:
    reasons = []
    if p_learned > at:
        reasons.append(
            f"the reference is not better than its untrained start (p {p_learned:.2g}, limit {at:.2g}): nothing was learned that could be lost"
        )
    if control.decision != "different":
        reasons.append(
            f"the control {control.arm!r} is not seen as different ({control.reason}): a loss would not be seen either"
        )
    if yardstick.decision == "different":
        reasons.append(
            f"the yardstick {yardstick.arm!r} is seen as different ({yardstick.reason}): the same training with other seeds would be accused"
        )
    return tuple(reasons)


def _means(
    rewards: Mapping[str, ArrayLike], start: ArrayLike, needed: tuple[str, ...]
) -> tuple[dict[str, Array], Array]:
    """Mean test rewards per seed, [S] for each arm and for the start."""
    missing = [name for name in needed if name not in rewards]
    if missing:
        raise InputError(
            f"arm {missing[0]!r} is missing from {', '.join(map(repr, rewards)) or 'no arms'}: "
            "a comparison needs its reference, its control and its yardstick"
        )
    if len(set(needed)) < len(needed):
        raise InputError(f"{needed} names an arm twice: reference, control and yardstick differ")
    if len(rewards) == len(needed):
        raise InputError(
            "no arm to compare: give at least one beside reference, control, yardstick"
        )
    arms = {name: np.asarray(values, dtype=np.float64) for name, values in rewards.items()}
    shape = arms[needed[0]].shape
    if len(shape) != 2 or shape[0] < 2 or shape[1] < 1:
        raise InputError(
            f"rewards of {needed[0]!r} have shape {shape}: give [seeds, prompts] with 2 seeds or more"
        )
    for name, values in arms.items():
        if values.shape != shape:
            raise InputError(
                f"rewards of {name!r} have shape {values.shape}, those of {needed[0]!r} {shape}: "
                "give every arm the same seeds and prompts"
            )
    untrained = np.asarray(start, dtype=np.float64)
    if untrained.shape not in (shape, shape[1:]):
        raise InputError(
            f"start has shape {untrained.shape}: give [prompts] or [seeds, prompts] as in {shape}"
        )
    for name, values in {**arms, "start": untrained}.items():
        worst = values.min() if np.isfinite(values).all() else np.nan
        if not isfinite(worst) or worst < 0:
            raise InputError(
                f"rewards of {name!r} contain {worst:.4g}: "
                "give finite numbers of at least 0, since the margin is a share of the reference's reward"
            )
    start_means = np.broadcast_to(untrained.mean(axis=-1), shape[:1])
    return {name: values.mean(axis=1) for name, values in arms.items()}, start_means
