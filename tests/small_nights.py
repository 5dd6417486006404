"""Nights whose trainings are made up: curves that follow from arm and seed, written where real ones would be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from small_trainings import SMALL, cluster_of_one

from lsverify import nightly, stats, sweeps
from lsverify.code_version import Version
from lsverify.curves import Curve, CurveFile, StepRow, TestRow, ToFull
from lsverify.nightly import night
from lsverify.nightly_suite import Entry, Suite
from lsverify.stale_drift import Drift

ARMS = ("full", "exact", "detach", "other_seeds", "scrambled")
# Where each arm ends, from a start of 0.4.
ENDS = {"full": 0.6, "exact": 0.6, "detach": 0.5, "other_seeds": 0.6, "scrambled": 0.1}
PROMPTS = 96


def entry(name="small", **fields):
    return Entry(**{"name": name, "arch": "warm:llama", "arms": ARMS, "options": SMALL} | fields)


def suite(*entries, seeds=4, rotating=0):
    return Suite(seeds=seeds, rotating=rotating, entries=entries or (entry(),))


def test_row(step, reward):
    return TestRow(step=step, rewards=(reward,) * PROMPTS)


def curve(training, ends=ENDS):
    """`exact` is `full` of the same seed to the bit; seeds and arms differ by 0.003 beside what arms are made to lose."""
    arm = "full" if training.arm == "exact" else training.arm
    numbers = np.random.default_rng([training.seed, *arm.encode()])
    end = ends.get(arm, 0.5) + 0.003 * float(numbers.standard_normal())
    rows = [test_row(0, 0.4)]
    for step in range(1, training.steps + 1):
        keeps = training.arm.startswith("stale:")
        rows.append(
            StepRow(
                step=step,
                loss=0.0,
                reward=end,
                reward_sd=0.25,
                kl_to_start=0.01 * step,
                entropy=1.5,
                gradient_norm=1.0 + float(numbers.random()),
                clip_share=0.0,
                response_length=3.0,
                tokens_forwarded=1000,
                seconds=0.5,
                peak_resident=2**29,
                to_full=ToFull(cosine=0.9, rel_l2=1 - end, norm_ratio=1.0) if step % 2 else None,
                drift=Drift(age=step, log_prob=0.1 * step, loss_kept=1.5, loss_fresh=1.0)
                if keeps
                else None,
            )
        )
    return Curve((*rows, test_row(training.steps, end)))


def made_up(monkeypatch, curve=curve, version="v1"):
    """From here on nights train by `curve` and run code of this version. Returns what was trained, in order."""
    begun = []
    ray = cluster_of_one(monkeypatch)
    ray.wait = lambda waiting, num_returns: (waiting[:num_returns], waiting[num_returns:])

    def train(values, breaking):
        begun.append(sweeps.Training.parse(values))
        return curve(begun[-1])

    monkeypatch.setattr(sweeps, "_train_there", train)
    monkeypatch.setitem(stats.bootstrap.__kwdefaults__, "draws", 100)
    code_is(monkeypatch, version)
    return begun


def code_is(monkeypatch, name):
    monkeypatch.setattr(nightly, "code_version", lambda: Version(name=name, code=name, packages={}))


def spend(out: Path, of: Suite | None = None, **options):
    return night(of or suite(), out, engine="ray", **options)


def rewrite(folder: Path, change):
    """Put another curve in place of the one in a training's folder."""
    CurveFile(folder, Curve(tuple(map(change, sweeps.read_curve(folder).rows))))
