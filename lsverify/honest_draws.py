"""Honest cases drawn by their number over families, lengths, groups, objectives, policies and harmless changes.

Every case is right: whatever refuses one is a false alarm. Neighbours share a model, a problem and its references, so that
ten thousand of them are a matter of hours.
"""

from __future__ import annotations

import importlib.metadata
import random
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from lsverify.at_work import at_work
from lsverify.evidence import CaseConfig
from lsverify.ladder import judge
from lsverify.objective import PRESETS

# Cases of one problem: a policy of each form, and a harmless change of full autograd or of sharing.
FORMS = (
    ("exact",),
    ("detach",),
    ("window:1", "window:4", "window:7", "window:8", "window:9", "window:300"),
    ("tail:2", "tail:9", "tail:3+window:0", "tail:3+window:6", "stale:2"),
    ("layers:all", "kinds:all", "roulette:0.5", "roulette:0.1", "tail:2+roulette:0.5"),
)
CHANGES = (
    "dense",
    "sharing",
    "recomputed",
    "last_response_first",
    "one_backward_pass",
    "eager_attention",
)
PER_PROBLEM = len(FORMS) + 1
# Around windows and top-k of 8 and chunks of 8; one-token prompts and responses.
PROMPTS = (1, 2, 3, 7, 8, 9, 10, 12, 16, 17, 18, 23)
RESPONSES = ((1,), (3, 1), (4, 2, 5), (1, 3, 2), (7, 5, 6), (9, 2))
OPTIONS = (
    "beta=0.04",
    "temperature=0.7",
    "entropy_bonus=0.01",
    "sampler_correction=token_truncate",
    "sampler_correction=token_mask",
)


class Wrong(BaseModel):
    """An honest case that was refused, and by what; `case` alone makes it again."""

    case: CaseConfig
    refusal: str


class Honest(BaseModel):
    """How many problems of each architecture were drawn, `PER_PROBLEM` cases on each, and those that were refused."""

    model_config = ConfigDict(extra="forbid")

    transformers: str = importlib.metadata.version("transformers")
    torch: str = importlib.metadata.version("torch")
    dtype: str
    problems: dict[str, int] = {}
    wrong: list[Wrong] = []

    @property
    def cases(self) -> int:
        return PER_PROBLEM * sum(self.problems.values())

    def summary(self) -> str:
        return (
            f"{len(self.wrong)} false alarms in {self.cases} honest cases on {sum(self.problems.values())} problems of "
            f"{len(self.problems)} architectures, {self.dtype}"
        )


def continued(record: Honest, archs: Sequence[str], cases: int, workers: int) -> Iterator[Honest]:
    """Draw on until the record has so many cases, an architecture after the other; the record after each round of them."""
    yield record
    with at_work(problem_judged, workers) as judged:
        while record.cases < cases:
            number = {arch: record.problems.get(arch, 0) for arch in archs}
            for arch, wrong in zip(
                archs, judged([(arch, record.dtype, number[arch]) for arch in archs]), strict=True
            ):
                record.problems[arch] = number[arch] + 1
                record.wrong += wrong
            yield record


def problem_judged(arch: str, dtype: str, number: int) -> list[Wrong]:
    """Judge all cases of one problem; an error of ours is an alarm too."""
    return [wrong for case in drawn_cases(arch, dtype, number) for wrong in _refusal(case)]


def _refusal(case: CaseConfig) -> Iterator[Wrong]:
    try:
        receipt = judge(case, brief=True)
    except Exception as error:
        yield Wrong(case=case, refusal=f"{type(error).__name__}: {error}")
        return
    if not receipt.reached:
        rung = receipt.unmet[0]
        yield Wrong(case=case, refusal=f"{rung.name} {rung.status}: {rung.detail}"[:1000])


def drawn_cases(arch: str, dtype: str, number: int) -> Iterator[CaseConfig]:
    """`PER_PROBLEM` cases on problem `number` of an architecture."""
    draw = random.Random(f"{arch} {dtype} {number}")
    shape: dict[str, Any] = {
        "arch": arch,
        "dtype": dtype,
        "seed": number,
        "prompt_length": draw.choice(PROMPTS),
        "group_size": draw.choice((1, 2, 3)),
        "response_lengths": draw.choice(RESPONSES),
        "objective": _objective(draw),
        "training": draw.random() < 0.5,
        "require": "gradient",
    }
    for form in FORMS:
        how: dict[str, Any] = {
            "chunk": draw.choice((1, 3, 4, 8, 64)),
            "branches": draw.choice((1, 1, 2)),
        }
        yield CaseConfig(policy=draw.choice(form), **shape, **how)
    yield CaseConfig(candidate=f"lsverify.faults.honest:{draw.choice(CHANGES)}", **shape)


def _objective(draw: random.Random) -> str:
    options = [option for option in OPTIONS[:3] if draw.random() < 0.25]
    options += [draw.choice(OPTIONS[3:])] if draw.random() < 0.2 else []
    return ",".join([draw.choice(sorted(PRESETS)), *options])
