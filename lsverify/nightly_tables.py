"""A night as tables and sentences, the same in its page and in Markdown. Rewards and gaps are in percent points of reward."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from lsverify.ablation_report import Sheet
from lsverify.equivalence import Margin
from lsverify.nightly_record import EntryRecord, Nightly
from lsverify.report import number
from lsverify.stats import Correlation, Estimate
from lsverify.verdicts import Verdict

MIB = 2**20
POINTS = 100
VERDICTS = (
    "arm",
    "stands",
    "gap (points)",
    "tonight",
    "reward (points)",
    "worst seed",
    "to decide",
)
UNIT = "Points are percent points of test reward: 100 is every answer right."


def conclusion(record: Nightly) -> list[str]:
    """One sentence for each entry that compares, then what fails the night."""
    lines = []
    for entry in record.entries:
        if (found := entry.comparison) is None:
            continue
        if found.void:
            lines.append(f"{entry.entry.name}: void, nothing is concluded.")
            continue
        arms: dict[str, list[str]] = {}
        for verdict in found.arms:
            arms.setdefault(stands(entry, verdict), []).append(verdict.arm)
        said = "; ".join(f"{', '.join(named)} {what}" for what, named in arms.items())
        lines.append(f"{entry.entry.name}: {said}.")
    return lines


def stands(entry: EntryRecord, verdict: Verdict) -> str:
    """What all nights say of an arm; of yardstick and control, what tonight does."""
    return entry.standing.get(verdict.arm, verdict.decision)


def learned(entry: EntryRecord) -> str:
    """What the reference gained, and how the margin follows from it."""
    found = entry.comparison
    if found is None or entry.gain is None:
        return ""
    margin = Margin()
    return (
        f"Full autograd went from {_points(found.start_reward)} to {_points(found.reference_reward)} points, a gain of "
        f"{_interval(entry.gain)}. Seeds: {len(entry.seeds)}, {len(entry.fresh)} of them fresh; look {entry.look} of this "
        f"version, level {found.level:.2g}. The margin is {_points(found.yardstick.margin)} points: "
        f"{100 * margin.of_reward:.0f}% of full's reward or {100 * margin.of_gain:.0f}% of its gain, whichever is less."
    )


def verdicts(entry: EntryRecord) -> Sheet:
    found = entry.comparison
    rows = (*found.arms, found.yardstick, found.control) if found else ()
    roles = {found.yardstick.arm: " (yardstick)", found.control.arm: " (control)"} if found else {}
    return Sheet(
        key=f"verdicts_{entry.entry.name}",
        title=f"{entry.entry.name}: each arm against full autograd",
        headers=VERDICTS,
        rows=[
            (
                verdict.arm + roles.get(verdict.arm, ""),
                stands(entry, verdict),
                f"{_signed(verdict.gap)} ({_signed(verdict.interval[0])} to {_signed(verdict.interval[1])})",
                verdict.decision,
                _points(verdict.reward),
                _signed(verdict.worst),
                "-" if verdict.seeds_to_decide is None else f"{verdict.seeds_to_decide} seeds",
            )
            for verdict in rows
        ],
    )


def step_by_step(entry: EntryRecord) -> str:
    """How near `exact` keeps to full autograd."""
    if (found := entry.exact) is None:
        return ""
    said = {True: "equal", False: "NOT equal", None: "not held to bits (float32)"}[found.equal]
    return (
        f"exact beside full, step by step over {found.seeds} seeds: {said}. Largest differences: test reward "
        f"{number(found.test_reward)}, reward of a rollout {number(found.reward)}, loss {number(found.loss)}, norm of the "
        f"gradient {number(found.gradient_norm)} of it (limit {found.limit:.0e})."
    )


def distributions(entry: EntryRecord) -> Sheet:
    return Sheet(
        key=f"distributions_{entry.entry.name}",
        title="Test rewards after training (points)",
        headers=(
            "arm",
            "mean (95%)",
            "interquartile mean",
            "spread over seeds",
            "seeds: least / quartiles / most",
            "seeds that broke off",
        ),
        rows=[
            (
                arm.arm,
                _interval(arm.distribution.mean, signed=False),
                _points(arm.distribution.iqm.value),
                _points(arm.distribution.spread),
                " / ".join(map(_points, arm.distribution.seed_quantiles)),
                ranges(arm.broken) or "none",
            )
            for arm in entry.arms
        ],
    )


def distances(entry: EntryRecord) -> Sheet:
    """Of the arms' distributions to the reference's."""
    rows = []
    for arm in entry.arms:
        if (found := arm.distances) is not None:
            named = ((found.ks, 1), (found.superiority, 1), (found.wasserstein, POINTS), (found.energy, 1))  # fmt: skip
            rows.append((arm.arm, *(f"{scale * d.value:.2g} (p {d.p:.2g})" for d, scale in named)))
    return Sheet(
        key=f"distances_{entry.entry.name}",
        title="How far each distribution is from full autograd's",
        headers=("arm", "Kolmogorov-Smirnov", "superiority", "Wasserstein (points)", "energy"),
        rows=rows,
    )


def biases(entry: EntryRecord) -> Sheet:
    return Sheet(
        key=f"biases_{entry.entry.name}",
        title="Bias of the gradient along training, against full autograd at the same weights and problem",
        headers=("arm", "relative L2", "cosine", "norm ratio", "gap (points)", "steps compared"),
        rows=[
            (
                arm.arm,
                number(arm.bias.rel_l2),
                f"{arm.bias.cosine:.4f}",
                f"{arm.bias.norm_ratio:.3f}",
                "-" if arm.difference is None else _interval(arm.difference),
                f"{arm.bias.steps} of each seed",
            )
            for arm in entry.arms
            if arm.bias
        ],
    )


def correlations(entry: EntryRecord) -> str:
    """Whether a larger bias goes with a larger loss, over arms and over the seeds of each."""
    if (found := entry.correlation) is None:
        return ""
    compared = [arm.arm for arm in entry.arms if arm.bias and arm.arm in entry.verdicts]
    inside = (
        f"{arm} {_rho(of)}" for arm, of in zip(compared, found.over_seeds, strict=True)
    )  # fmt: skip
    return (
        f"Rank correlation of bias and lost reward over arms: {_rho(found.over_arms)}. "
        f"Over the seeds within an arm: {'; '.join(inside)}."
    )


def overall(record: Nightly) -> str:
    if (found := record.correlation) is None:
        return ""
    if found.rho is None or found.p is None:
        return f"Over all entries and arms: {_rho(found)}."
    told = (
        f"a larger bias goes with {'more' if found.rho > 0 else 'less'} lost reward"
        if found.p <= 0.05
        else "no relation of bias and lost reward is shown"
    )
    return f"Over all entries and arms: {_rho(found)}; {told}."


def spans(entry: EntryRecord, of: str) -> Sheet:
    own = [span for span in entry.spans if span.of == of]
    arms = [arm.arm for arm in entry.arms if own and arm.arm in own[0].gaps]
    return Sheet(
        key=f"{of}_{entry.entry.name}",
        title=f"Gap (points) by {'distance of the evidence' if of == 'distance' else 'length of the prompt'}",
        headers=("tokens", "prompts", "full", *arms),
        rows=[
            (
                str(span.low) if span.low == span.high else f"{span.low}\N{EN DASH}{span.high}",
                str(span.prompts),
                _points(span.reference_reward),
                *(_interval(span.gaps[arm]) for arm in arms),
            )
            for span in own
        ],
    )


def drift(entry: EntryRecord) -> Sheet:
    return Sheet(
        key=f"drift_{entry.entry.name}",
        title=f"{entry.entry.name}: kept states against fresh captures; a state is replaced at the last age of its interval",
        headers=(
            "steps a capture serves",
            "age (steps)",
            "mean |log-prob difference| (nats)",
            "loss difference (of the loss)",
            "captures",
        ),
        rows=[
            (
                str(row.refresh),
                str(row.age),
                number(row.log_prob),
                "-" if row.loss_difference is None else f"{100 * row.loss_difference:.2g}%",
                str(row.captures),
            )
            for row in entry.drift
        ],
    )


def costs(record: Nightly) -> Sheet:
    """Seconds rank paths only where nothing else ran; every process has the same share of that."""
    rows = []
    for entry in record.entries:
        full = next((arm.cost for arm in entry.arms if arm.arm == "full"), None)
        for arm in entry.arms:
            cost = arm.cost
            ratio = (
                f" ({cost.seconds_per_step / full.seconds_per_step:.2f} of full)" if full else ""
            )
            rows.append(
                (
                    arm.arm,
                    entry.entry.name,
                    f"{cost.seconds_per_step:.3g}{ratio}",
                    f"{cost.tokens_per_second:,.0f}",
                    "-" if cost.peak_resident is None else f"{cost.peak_resident / MIB:,.0f}",
                )
            )
    return Sheet(
        key="costs",
        title="Cost of a step with its rollout; memory is of the whole process",
        headers=("arm", "entry", "seconds per step", "tokens per second", "peak resident (MiB)"),
        rows=rows,
    )


def made_of(record: Nightly) -> Sheet:
    """What each entry trains, and by which seeds."""
    return Sheet(
        key="entries",
        title="Entries",
        headers=("entry", "architecture", "task", "arms", "options", "seeds"),
        rows=[
            (
                each.entry.name,
                each.entry.arch,
                each.entry.task,
                ", ".join(each.entry.arms),
                ", ".join(f"{name} {value}" for name, value in each.entry.options.items()),
                ranges(each.seeds),
            )
            for each in record.entries
        ],
    )


def command(record: Nightly) -> str:
    return shlex.join(("lsverify", *record.command))


def versions(record: Nightly) -> Iterator[str]:
    here = record.environment
    yield f"code {record.version.name}"
    yield f"Python {here.python} on {here.platform}"
    yield from (f"{name} {found}" for name, found in here.packages.items())


def ranges(seeds: Sequence[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for seed in seeds:
        if runs and seed == runs[-1][-1] + 1:
            runs[-1].append(seed)
        else:
            runs.append([seed])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _rho(found: Correlation) -> str:
    if found.rho is None:
        return f"none, one side is constant ({found.points} points)"
    return f"rho {found.rho:+.2f} (p {found.p:.2g}, {found.points} points)"


def _points(reward: float) -> str:
    return f"{POINTS * reward:.1f}"


def _signed(gap: float) -> str:
    return f"{POINTS * gap:+.1f}" if gap else "0"


def _interval(found: Estimate, *, signed: bool = True) -> str:
    shown = _signed if signed else _points
    return f"{shown(found.value)} ({shown(found.interval[0])} to {shown(found.interval[1])})"
