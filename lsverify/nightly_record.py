"""What nights leave behind: OUT/nightly.json, the record of the last one, and OUT/nights.json, the ledger of them all.

    OUT/nightly.json                        Nightly: the last night
    OUT/nights/0001.json, 0002.json, ...    Nightly: each of them
    OUT/nights.json                         Ledger: what each night was to do, and whether it came to its end
    OUT/VERSION/ENTRY/ARCH/TASK/ARM/seedN/  a training: training.json, curve.jsonl (`lsverify.sweeps.folder_of`)

Rewards are means of test rewards, 0 to 1, on an entry's frozen test set. Gaps are arm minus reference.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lsverify.code_version import Version
from lsverify.curves import Curve, read_curve
from lsverify.evidence import Environment
from lsverify.looking import Decision
from lsverify.nightly_suite import Entry, Suite
from lsverify.stale_drift import DriftRow
from lsverify.stats import BiasAndGap, Correlation, Distances, Distribution, Estimate
from lsverify.sweeps import folder_of
from lsverify.trainings import Training
from lsverify.verdicts import Comparison

RECORD, LEDGER = "nightly.json", "nights.json"


def read_curves(folder: Path, entry: Entry, seeds: tuple[int, ...]) -> dict[Training, Curve]:
    """Of an entry's folder; empty ones where nothing is. Raises `InputError` for files that are no curves."""
    return {each: read_curve(folder / folder_of(each)) for each in entry.sweep(seeds).trainings()}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Parting(_Record):
    """`exact` beside the reference of the same seed, step by step: the largest difference at any step or test of any seed.

    test_reward: of a prompt's test reward. reward: of a rollout's. loss: absolute; on-policy it is zero by construction and says
    nothing, so gradient_norm is compared too, relative to the reference's. `equal` where both rewards are equal to the bit
    and the others within `limit`; None in float32, where rounding alone draws other tokens.
    """

    test_reward: float
    reward: float
    loss: float
    gradient_norm: float
    limit: float
    seeds: int
    equal: bool | None


class Bias(_Record):
    """The gradient against full autograd's at the same weights and problem: means over a training's steps, then over seeds.

    by_seed: relative L2 by seed, in the order of the entry's seeds; gap_by_seed: the final gap beside it. steps: how many
    steps of a training were compared at most; those where a norm is zero have no distance and are left out.
    """

    cosine: float
    rel_l2: float
    norm_ratio: float
    by_seed: tuple[float, ...]
    gap_by_seed: tuple[float, ...]
    steps: int


class Cost(_Record):
    """What does not repeat. tokens_per_second: forwarded by the arm over the time of its steps and rollouts, all seeds together.

    seconds_per_step: the mean. peak_resident: the largest resident size of a process while it trained the arm, in bytes; None
    where the system does not tell.
    """

    tokens_per_second: float
    seconds_per_step: float
    peak_resident: int | None


class ArmRecord(_Record):
    """One arm over all seeds of its version.

    difference, distances: to the reference, None of the reference itself. bias: None where no step was compared. broken: seeds
    whose training broke off because logits or gradient were not finite: they leave no policy, and count with a reward of 0
    on every prompt.
    """

    arm: str
    distribution: Distribution
    difference: Estimate | None
    distances: Distances | None
    bias: Bias | None
    broken: tuple[int, ...]
    cost: Cost


class Span(_Record):
    """Test prompts by where their evidence lies or by their length, `low` to `high` tokens, both counted; with each arm's mean gap."""

    of: str
    """`distance`: tokens from the first token of the evidence to the prompt's end; `length`: of the prompt."""
    low: int
    high: int
    prompts: int
    reference_reward: float
    gaps: dict[str, Estimate]


class EntryRecord(_Record):
    """One entry of the suite.

    folder: of its trainings, below OUT. seeds: all of this version so far, ascending; fresh: those of this night. look: which
    night of this version it is, from 1. comparison, gain, exact, spans and correlation are None or empty in an entry of drift;
    gain is reference minus start. standing: by arm, over all nights of this version (`lsverify.looking.standing`).
    correlation: None below two arms with a bias. drift: of the arms that keep states.
    """

    entry: Entry
    folder: str
    look: int
    seeds: tuple[int, ...]
    fresh: tuple[int, ...]
    comparison: Comparison | None
    gain: Estimate | None
    standing: dict[str, Decision]
    exact: Parting | None
    arms: tuple[ArmRecord, ...]
    spans: tuple[Span, ...]
    correlation: BiasAndGap | None
    drift: tuple[DriftRow, ...]
    failures: tuple[str, ...]
    """Why the night fails by this entry; empty where it does not."""

    def curves(self, out: Path) -> dict[Training, Curve]:
        """By training, of all seeds, from the files below OUT. Raises `InputError`."""
        return read_curves(out / self.folder, self.entry, self.seeds)

    @property
    def verdicts(self) -> dict[str, Decision]:
        """Tonight's decision by arm, without control and yardstick."""
        return {v.arm: v.decision for v in self.comparison.arms} if self.comparison else {}


class Nightly(_Record):
    """One night. number: counted in OUT over all versions.

    correlation: of mean bias and mean gap (reference minus arm), one point for each entry and compared arm; None below two points.
    """

    number: int
    version: Version
    environment: Environment
    command: tuple[str, ...]
    suite: Suite
    full: bool
    entries: tuple[EntryRecord, ...]
    correlation: Correlation | None

    @property
    def failures(self) -> tuple[str, ...]:
        """One line each, with the entry's name in front."""
        return tuple(f"{e.entry.name}: {why}" for e in self.entries for why in e.failures)

    @property
    def exit_code(self) -> int:
        """1 where a comparison is void, or `exact` parts from the reference or is decided different; else 0."""
        return 1 if self.failures or not self.entries else 0


class Planned(_Record):
    """What a night adds to an entry; what it decided by arm, and which seeds of an arm broke off, when it is finished.

    entry: its name. trains: a hash of all that it trains but seeds (`Entry.trains`): a ledger outlives the options of a code version.
    """

    entry: str
    trains: str
    seeds: tuple[int, ...]
    decisions: dict[str, Decision] = {}
    broken: dict[str, tuple[int, ...]] = {}


class Night(_Record):
    """suite: its hash (`Suite.digest`). One that is not finished and not the last was given up, since the code changed; it is no look."""

    version: str
    suite: str
    full: bool
    planned: tuple[Planned, ...]
    finished: bool = False


class Ledger(_Record):
    """All nights in a folder, in order."""

    nights: tuple[Night, ...] = ()
