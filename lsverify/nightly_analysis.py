"""What the curves of one entry say: decisions, distributions, whether `exact` keeps to the reference, bias beside gap, drift."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from lsverify import stats
from lsverify.arms import CONTROL, REFERENCE, YARDSTICK, policy_of
from lsverify.courses import Asked
from lsverify.curves import Curve, TestRow
from lsverify.looking import Decision, standing
from lsverify.nightly_record import ArmRecord, Bias, Cost, EntryRecord, Parting, Planned, Span
from lsverify.nightly_suite import Entry
from lsverify.stale_drift import DriftRow, drift_table
from lsverify.stats import Correlation
from lsverify.sweeps import rewards_by_arm
from lsverify.trainings import Training
from lsverify.verdicts import Comparison, compare

EXACT = "exact"
# Rounding grows along a training: over 200 steps of llama the gradient's norm of `exact` came to differ by 5e-11, that of other
# arms by more than 0.5. An error of the gradient grows by the same factor, so one of 1e-10 ends above this.
LIMIT = 1e-6
SPANS = 4

Array = NDArray[np.float64]
Curves = Mapping[Training, Curve]


def entry_record(
    entry: Entry, planned: Planned, earlier: Sequence[Planned], curves: Curves, folder: str
) -> EntryRecord:
    """Of all seeds of a code version; `earlier` are its finished nights with this entry, and `curves` of all of them and of tonight."""
    look = len(earlier) + 1
    seeds = tuple(sorted(chain(planned.seeds, *(night.seeds for night in earlier))))
    drift = drift_of(curves)
    if entry.kind == "drift":
        return EntryRecord(
            entry=entry,
            folder=folder,
            look=look,
            seeds=seeds,
            fresh=planned.seeds,
            comparison=None,
            gain=None,
            standing={},
            exact=None,
            arms=tuple(_arm(arm, curves, look, None) for arm in entry.arms),
            spans=(),
            correlation=None,
            drift=drift,
            failures=(),
        )
    rewards, start = rewards_by_arm(_ended(curves), entry.arch, entry.task)
    comparison = compare(rewards, start, yardstick=YARDSTICK, control=CONTROL, look=look)
    stands = {
        verdict.arm: standing(
            [
                *(night.decisions[verdict.arm] for night in earlier),
                verdict.decision,
            ]
        )
        for verdict in comparison.arms
    }
    arms = tuple(_arm(arm, curves, look, rewards) for arm in entry.arms)
    exact = parting(curves)
    return EntryRecord(
        entry=entry,
        folder=folder,
        look=look,
        seeds=seeds,
        fresh=planned.seeds,
        comparison=comparison,
        gain=stats.difference(rewards[REFERENCE], start, _generator(look, "gain")),
        standing=stands,
        exact=exact,
        arms=arms,
        spans=_spans(entry, rewards, look),
        correlation=_correlation(arms, look),
        drift=drift,
        failures=_failures(comparison, stands, exact),
    )


def parting(curves: Curves) -> Parting | None:
    """None without `exact`. Trainings of different length, one of which broke off, are infinitely far apart: as a reward of 1."""
    pairs = [
        (curves[each.model_copy(update={"arm": REFERENCE})], curve, each)
        for each, curve in curves.items()
        if each.arm == EXACT
    ]
    if not pairs:
        return None
    whole = all(len(one.rows) == len(other.rows) for one, other, _ in pairs)
    steps = [pair for one, other, _ in pairs for pair in zip(one.steps, other.steps, strict=False)]
    tests = [
        abs(a - b)
        for one, other, _ in pairs
        for x, y in zip(one.tests, other.tests, strict=False)
        for a, b in zip(x.rewards, y.rewards, strict=True)
    ]
    test_reward = max(tests) if whole else 1.0
    reward = max(abs(x.reward - y.reward) for x, y in steps)
    loss = max(abs(x.loss - y.loss) for x, y in steps)
    norm = max(_relative(x.gradient_norm, y.gradient_norm) for x, y in steps)
    equal = test_reward == reward == 0 and max(loss, norm) <= LIMIT
    return Parting(
        test_reward=test_reward,
        reward=reward,
        loss=loss,
        gradient_norm=norm,
        limit=LIMIT,
        seeds=len(pairs),
        equal=equal if all(each.dtype == "float64" for _, _, each in pairs) else None,
    )


def drift_of(curves: Curves) -> tuple[DriftRow, ...]:
    """Over all arms that keep states, and all seeds."""
    found = []
    for each, curve in curves.items():
        policy = policy_of(each.arm)
        if policy is not None and policy.refresh:
            found += [(policy.refresh, row.drift) for row in curve.steps if row.drift]
    return tuple(drift_table(found))


def over_entries(entries: Sequence[EntryRecord]) -> Correlation | None:
    """Of mean bias and mean gap, reference minus arm: one point for each entry and arm that claims something."""
    points = [
        (arm.bias.rel_l2, -float(np.mean(arm.bias.gap_by_seed)))
        for entry in entries
        if entry.comparison
        for arm in entry.arms
        if arm.bias and arm.arm in entry.verdicts
    ]
    if len(points) < 2:
        return None
    bias, gap = zip(*points, strict=True)
    return stats.rank_correlation(bias, gap, _generator(len(points), "entries"))


def _arm(arm: str, curves: Curves, look: int, rewards: Mapping[str, Array] | None) -> ArmRecord:
    """Without `rewards` nothing is compared, and the distribution is of this arm's own."""
    own = sorted((each for each in curves if each.arm == arm), key=lambda each: each.seed)
    ended = _ended({each: curves[each] for each in own})
    final = np.array([ended[each].end.rewards for each in own])
    reference = None if rewards is None or arm == REFERENCE else rewards[REFERENCE]
    gaps = np.zeros(len(own)) if reference is None else (final - reference).mean(axis=1)
    return ArmRecord(
        arm=arm,
        distribution=stats.distribution(final, _generator(look, arm, "distribution")),
        difference=None
        if reference is None
        else stats.difference(final, reference, _generator(look, arm, "difference")),
        distances=None
        if reference is None
        else stats.distances(final, reference, _generator(look, arm, "distances")),
        bias=_bias([curves[each] for each in own], gaps),
        broken=tuple(each.seed for each in own if not curves[each].reaches(each.steps)),
        cost=_cost([curves[each] for each in own]),
    )


def _bias(curves: Sequence[Curve], gaps: Array) -> Bias | None:
    compared = [
        [
            (row.to_full.cosine, row.to_full.rel_l2, row.to_full.norm_ratio)
            for row in curve.steps
            if row.to_full and None not in (row.to_full.cosine, row.to_full.rel_l2)
        ]
        for curve in curves
    ]
    if not all(compared):
        return None
    means = np.array([np.array(rows, dtype=np.float64).mean(axis=0) for rows in compared])
    cosine, rel_l2, norm_ratio = means.mean(axis=0).tolist()
    return Bias(
        cosine=cosine,
        rel_l2=rel_l2,
        norm_ratio=norm_ratio,
        by_seed=tuple(means[:, 1].tolist()),
        gap_by_seed=tuple(gaps.tolist()),
        steps=max(map(len, compared)),
    )


def _cost(curves: Sequence[Curve]) -> Cost:
    rows = [row for curve in curves for row in curve.steps]
    seconds = sum(row.seconds for row in rows)
    peaks = [row.peak_resident for row in rows if row.peak_resident is not None]
    return Cost(
        tokens_per_second=sum(row.tokens_forwarded for row in rows) / seconds,
        seconds_per_step=seconds / len(rows),
        peak_resident=max(peaks, default=None),
    )


def _correlation(arms: Sequence[ArmRecord], look: int) -> stats.BiasAndGap | None:
    claims = [arm.bias for arm in arms if arm.arm not in (REFERENCE, YARDSTICK, CONTROL)]
    biased = [bias for bias in claims if bias is not None]
    if len(biased) < 2:
        return None
    along = np.array([bias.by_seed for bias in biased])[..., None]
    gap = -np.array([bias.gap_by_seed for bias in biased])
    return stats.bias_and_gap(along, gap, _generator(look, "correlation"))


def _spans(entry: Entry, rewards: Mapping[str, Array], look: int) -> tuple[Span, ...]:
    """Test prompts by quarters of their evidence's distance, and of their length."""
    training = entry.sweep((0,)).trainings()[0]
    test = training.course().test[: training.test_prompts]
    return tuple(
        Span(
            of=of,
            low=int(where[members].min()),
            high=int(where[members].max()),
            prompts=len(members),
            reference_reward=float(rewards[REFERENCE][:, members].mean()),
            gaps={
                arm: stats.difference(
                    found[:, members], rewards[REFERENCE][:, members], _generator(look, arm, of)
                )
                for arm, found in rewards.items()
                if arm != REFERENCE
            },
        )
        for of in ("distance", "length")
        for where in _where(of, test)
        for members in _quarters(where)
    )


def _where(of: str, test: Sequence[Asked]) -> Iterator[Array]:
    """Each prompt's place, once; nothing where the evidence of a prompt is not known."""
    starts = [0 if of == "length" else each.evidence for each in test]
    if None not in starts:
        yield np.array([len(each.prompt) - (s or 0) for each, s in zip(test, starts, strict=True)])


def _quarters(where: Array) -> list[NDArray[np.intp]]:
    """Places by value, in up to four parts of about equal number; equal values stay together."""
    inner = np.quantile(where, np.arange(1, SPANS) / SPANS, method="lower")
    part = np.searchsorted(np.unique(inner), where, side="left")
    return [np.flatnonzero(part == each) for each in np.unique(part)]


def _failures(
    comparison: Comparison, stands: Mapping[str, Decision], exact: Parting | None
) -> tuple[str, ...]:
    found = [f"void: {reason}" for reason in comparison.void]
    if exact is not None and exact.equal is False:
        found.append(
            f"exact parts from full: test rewards by {exact.test_reward:.2g}, rollouts' by {exact.reward:.2g}, loss by "
            f"{exact.loss:.2g}, the gradient's norm by {exact.gradient_norm:.2g} of it (limit {exact.limit:.0e})"
        )
    for verdict in comparison.arms:
        if verdict.arm == EXACT and "different" in (verdict.decision, stands[EXACT]):
            found.append(f"exact is decided different from full: {verdict.reason}")
    return tuple(found)


def _ended(curves: Curves) -> dict[Training, Curve]:
    """With a test of rewards 0 at the end of trainings that broke off: they leave no policy."""
    return {
        each: curve
        if curve.reaches(each.steps)
        else Curve(
            (*curve.rows, TestRow(step=each.steps, rewards=(0.0,) * len(curve.start.rewards)))
        )
        for each, curve in curves.items()
    }


def _relative(one: float, other: float) -> float:
    return abs(one - other) / abs(one) if one else float(other != 0)


def _generator(look: int, *names: str) -> np.random.Generator:
    return np.random.default_rng([look, zlib.crc32("/".join(names).encode())])
