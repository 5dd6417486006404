"""How far a policy's gradient is from full autograd's where the evidence stands at a given distance.

The same cells as in `lsverify.long_range`, on the policy that a training has made, or on its start: each problem is one task
with responses of this policy's own, and its step is taken by full autograd and by the arm.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from pydantic import BaseModel, ConfigDict
from torch import nn

from lsverify.arms import make_arm
from lsverify.convergence import apart, trained_policy
from lsverify.courses import Asked, Course
from lsverify.errors import InputError
from lsverify.long_range import by_distance
from lsverify.norms import Norms
from lsverify.paths import full_autograd
from lsverify.problems import Problem
from lsverify.references import take_gradients
from lsverify.rollouts_online import rolled_out
from lsverify.trainings import Training

# Tasks that are tried for each problem: one whose responses are all worth the same has no gradient.
TRIED = 8


class DistanceBias(BaseModel):
    """Means over problems of an arm's gradient against full autograd's, over all trained parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    task: str
    arm: str
    length: int
    above: int
    upto: int
    problems: int
    rel_l2: float
    cosine: float
    norm_ratio: float


def bias_by_distance(
    training: Training,
    arms: Sequence[str],
    lengths: Sequence[int],
    *,
    problems: int = 4,
    folder: Path | None = None,
) -> list[DistanceBias]:
    """For each length, third of the distances and arm, over `problems` tasks or fewer; cells without a gradient are left out.

    The policy is that of the training's folder, its start without one. training says all else: precision, responses per
    prompt, objective, seed. An arm that keeps states over steps is taken at its first step. Raises `InputError`.
    """
    if problems < 1:
        raise InputError(f"problems {problems} is not allowed: use 1 or more")
    course, found = training.course(), []
    with trained_policy(training, folder) as model:
        for length in lengths:
            for (above, upto), tasks in by_distance(course, length, TRIED * problems).items():
                drawn = _with_gradient(model, course, tasks, training)
                some = list(itertools.islice(drawn, problems))
                norms = [_norms(model, problem, arms, training) for problem in some]
                found += [
                    DistanceBias(
                        arch=training.arch,
                        task=training.task,
                        arm=arm,
                        length=length,
                        above=above,
                        upto=upto,
                        problems=len(own),
                        rel_l2=fmean(each.error / each.expected for each in own),
                        cosine=fmean(each.cosine or 0.0 for each in own),
                        norm_ratio=fmean(each.actual / each.expected for each in own),
                    )
                    for arm, own in zip(arms, zip(*norms, strict=True), strict=bool(norms))
                ]
    return found


def _with_gradient(
    model: nn.Module, course: Course, tasks: Sequence[Asked], training: Training
) -> Iterator[Problem]:
    """A problem of each task whose responses differ in reward, on-policy."""
    for place, task in enumerate(tasks):
        problem, _ = rolled_out(
            model,
            [task],
            seed=training.seed,
            rollout=place,
            members=training.responses,
            temperature=training.loss.temperature,
            ends=course.ends,
        )
        if len({response.reward for response in problem.responses}) > 1:
            yield problem.replace_logps(ref=[response.old_logp for response in problem.responses])


def _norms(
    model: nn.Module, problem: Problem, arms: Sequence[str], training: Training
) -> list[Norms]:
    """Of each arm's gradient against full autograd's."""
    full_autograd(model, problem, training.loss, batched=not training.serial)
    expected, found = take_gradients(model), []
    for name in arms:
        arm = make_arm(name, seed=training.numbers, chunk=training.chunk, serial=training.serial)
        arm.begin()
        arm.step(model, problem, training.loss)
        found.append(apart(take_gradients(model), expected))
    return found
