"""A folder as a night leaves it, with everything that its page can show: made up, as a page is read and not as models learn.

`python tests/demonstration_night.py DIR` makes one to look at, at the size of a real night.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from judged import made_up as made_up_case
from judged import receipt_of
from small_nights import made_up, spend, suite

from lsverify import evidence
from lsverify.ablation_records import Ablation, Group, Row
from lsverify.curves import Curve, StepRow, TestRow, ToFull
from lsverify.evidence import CaseConfig
from lsverify.nightly_page import write_page
from lsverify.nightly_suite import Entry
from lsverify.stale_drift import Drift
from lsverify.state_term import DistancePart, KindPart, StateTerm

ARMS = ("full", "exact", "detach", "window:8", "kinds:recurrent", "other_seeds", "scrambled")
# By arm: where the success of the prompts ends from a start of 0.45, and cosine and relative L2 of the gradient.
COURSES = {
    "full": (0.72, 1.0, 0.0),
    "other_seeds": (0.72, 1.0, 0.0),
    "detach": (0.61, 0.83, 0.56),
    "window:8": (0.66, 0.9, 0.43),
    "kinds:recurrent": (0.705, 0.97, 0.21),
    "scrambled": (0.3, 0.12, 1.35),
}
START, PROMPTS = 0.45, 96


def curve(training):
    arm = "full" if training.arm == "exact" else training.arm
    end, cosine, rel_l2 = COURSES.get(arm, (0.62, 0.82, 0.55))
    numbers = np.random.default_rng([training.seed, *arm.encode(), *training.arch.encode()])
    ease = np.random.default_rng(7).normal(0, 0.22, PROMPTS)
    end += 0.012 * numbers.standard_normal()

    def success(step):
        return START + (end - START) * (1 - np.exp(-3.5 * step / training.steps)) / 0.97

    def test(step):
        chance = np.clip(success(step) + ease, 0.02, 0.98)
        return TestRow(step=step, rewards=tuple((numbers.binomial(8, chance) / 8).tolist()))

    rows = [TestRow(step=0, rewards=_start(training))]
    for step in range(1, training.steps + 1):
        due = training.compare_every and (step - 1) % training.compare_every == 0
        noise = numbers.standard_normal(6)
        apart = ToFull(
            cosine=min(1.0, cosine + 0.02 * noise[0] * (cosine < 1)),
            rel_l2=abs(rel_l2 * (1 + 0.06 * noise[1])) if rel_l2 else 1e-15,
            norm_ratio=1 - rel_l2 / 4,
        )
        rows.append(
            StepRow(
                step=step,
                loss=0.0,
                reward=float(np.clip(success(step) + 0.05 * noise[2], 0, 1)),
                reward_sd=0.3,
                kl_to_start=0.06 * step / training.steps * (1 + 0.1 * float(noise[3])) ** 2,
                entropy=1.6 - 0.7 * step / training.steps + 0.03 * float(noise[4]),
                gradient_norm=0.4 * float(np.exp(0.2 * noise[5])),
                clip_share=0.0,
                response_length=2.0,
                tokens_forwarded=9000 if training.arm in ("exact", "detach") else 16000,
                seconds={"exact": 0.35, "detach": 0.28}.get(training.arm, 0.31),
                peak_resident=int(620e6),
                to_full=apart if due else None,
                drift=Drift(
                    age=1 + (step - 1) % int(training.arm[6:]),
                    log_prob=0.004 * (1 + (step - 1) % int(training.arm[6:])),
                    loss_kept=0.21,
                    loss_fresh=0.2,
                )
                if training.arm.startswith("stale:")
                else None,
            )
        )
        if training.tests_at(step):
            rows.append(test(step))
    return Curve(tuple(rows))


def _start(training):
    numbers = np.random.default_rng([training.seed, *training.arch.encode()])
    ease = np.random.default_rng(7).normal(0, 0.22, PROMPTS)
    return tuple((numbers.binomial(8, np.clip(START + ease, 0.02, 0.98)) / 8).tolist())


def ablation():
    def groups(names, bias):
        return {
            name: Group(rel_l2=bias * (1 + 0.4 * np.sin(place)), cosine=0.9, norm_ratio=1, lost=0.2)
            for place, name in enumerate(names)
        }

    layers, kinds = [*map(str, range(4)), "-"], ["q", "k", "v", "o", "mlp", "norm", "embedding"]
    rows = [
        Row(
            arch="warm:qwen3_5",
            policy=policy,
            length=24,
            seed=seed,
            status="proven",
            reference="full",
            to_claim=1e-15,
            limit=1e-12,
            rel_l2=bias,
            cosine=1 - bias**2 / 2,
            norm_ratio=1.0,
            per_layer=groups(layers, bias),
            per_kind=groups(kinds, bias),
        )
        for policy, bias in (("exact", 1.3e-15), ("detach", 0.56), ("window:8", 0.43))
        for seed in (0, 1)
    ]
    term = StateTerm(
        arch="warm:qwen3_5",
        length=24,
        seed=0,
        size=0.56,
        cosine=0.6,
        kinds=(KindPart(kind="recurrent", norm=1.0, cosine=1.0, projection=1.0),),
        kinds_left=0.0,
        distances=tuple(
            DistancePart(above=low, upto=high, within=within, norm=0.5, cosine=0.5, projection=0.25)
            for low, high, within in ((0, 4, 0.21), (4, 8, 0.48), (8, 16, 0.83), (16, 23, 1.0))
        ),
        distances_left=0.0,
        held={"0.5": 16, "0.9": 23},
    )
    return Ablation(
        environment=evidence.environment(),
        command=("ablate", "--arch", "warm:qwen3_5"),
        dtype="float64",
        objective="grpo",
        rows=tuple(rows),
        state_terms=(term,),
    )


def entries(steps, seeds):
    options = {
        "steps": steps,
        "test_every": max(steps // 6, 1),
        "compare_every": max(steps // 12, 1),
    }
    stale = options | {"rollouts_per_prompts": 8, "compare_every": 0}
    return suite(
        Entry(name="llama-recall", arch="warm:llama", arms=ARMS[:4] + ARMS[5:], options=options),
        Entry(name="qwen3_5-recall", arch="warm:qwen3_5", arms=ARMS, options=options),
        Entry(
            name="llama-stale",
            arch="warm:llama",
            kind="drift",
            arms=("stale:1", "stale:2", "stale:4", "stale:8"),
            options=stale,
        ),
        seeds=seeds,
    )


def make(folder: Path, monkeypatch, *, steps=24, seeds=8):
    """Trainings of these sizes, a receipt and an ablation, in `folder`."""
    made_up(monkeypatch, curve, version="3105a48c-0ebeb4")
    spend(folder, entries(steps, seeds), command=("nightly", "--out", "lsverify-nightly"))
    cases = [
        made_up_case(config=CaseConfig(arch=arch, policy=policy))
        for arch in ("llama", "qwen3_5")
        for policy in ("exact", "detach")
    ]
    evidence.save(
        receipt_of(*cases, made_up_case(status="failed", measure=0.3)), folder / "receipt.json"
    )
    (folder / "ablation.json").write_text(ablation().model_dump_json())
    return folder


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        print(write_page(make(Path(sys.argv[1]), patch, steps=300, seeds=8)))  # noqa: T201
