"""What a training learns: where its prompts come from, what ends a response, and the frozen test set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lsverify import pretrained
from lsverify.cases import is_warm
from lsverify.errors import InputError
from lsverify.keyed import PROMPTS, keyed_words
from lsverify.own_tasks import OWN, OwnTask, OwnTasks
from lsverify.tasks import KINDS, Task
from lsverify.tasks import draw as draw_tasks
from lsverify.text_tasks import TEXT, TextTasks, require_text
from lsverify.warm_starts import SIZE, SPLIT_SEED, Recipe, recipe_of, split_of

# A seed that no training can have: prompts of a second test are none of theirs.
FAR = 2**31


class Asked(Protocol):
    """What a course asks: a prompt of token ids, at most how many tokens answer it, and what a response is worth."""

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def evidence(self) -> int | None:
        """The position of the first prompt token that the answer rests on, None where it is not known."""

    @property
    def most(self) -> int: ...

    def reward(self, response: Sequence[int] | Tensor) -> float:
        """From 0 to 1, of the tokens of a response."""


class Course(Protocol):
    """Tasks of one kind: `test` is the frozen test set; `ends` are the tokens that end a response, each at its `most` if none."""

    @property
    def test(self) -> Sequence[Asked]: ...

    @property
    def ends(self) -> tuple[int, ...]: ...

    def tasks(self, seed: int, turn: int, number: int) -> Sequence[Asked]:
        """`number` tasks; those of a place are the same whatever else is drawn."""

    def at(self, length: int, number: int) -> Sequence[Asked]:
        """At most `number` tasks with prompts of `length` tokens that no training sees, their evidence anywhere."""


@dataclass(frozen=True, kw_only=True)
class DrawnCourse:
    """Tasks made anew by `one(length, seed)`, with prompt lengths in turn."""

    one: Callable[[int, int], Asked]
    lengths: tuple[int, ...]
    test: tuple[Asked, ...]
    ends: tuple[int, ...] = ()

    def tasks(self, seed: int, turn: int, number: int) -> list[Asked]:
        length = self.lengths[turn % len(self.lengths)]
        return [self.one(length, own) for own in _seeds(seed, turn, number)]

    def at(self, length: int, number: int) -> list[Asked]:
        return [self.one(length, own) for own in _seeds(FAR, length, number)]


def _seeds(seed: int, turn: int, number: int) -> list[int]:
    """One for each place of a turn."""
    high, low, *_ = keyed_words(PROMPTS | seed, turn, np.arange(number), 0, 0)
    return [int(own) for own in (high << np.uint64(31)) ^ low]


@dataclass(frozen=True)
class OwnCourse:
    """Rows of a user's file: each once before any comes again, in an order of its own for each seed and pass."""

    train: tuple[OwnTask, ...]
    test: tuple[OwnTask, ...]
    ends: tuple[int, ...]

    def tasks(self, seed: int, turn: int, number: int) -> list[OwnTask]:
        size = len(self.train)
        places = range(turn * number, (turn + 1) * number)
        orders = {turn: _order(seed, turn, size) for turn in {place // size for place in places}}
        return [self.train[orders[place // size][place % size]] for place in places]

    def at(self, length: int, number: int) -> list[OwnTask]:
        """Of the test set: prompts of more than half of `length` and up to `length` tokens, with evidence."""
        fits = [task for task in self.test if length < 2 * len(task.prompt) <= 2 * length]
        return [task for task in fits if task.evidence is not None][:number]


def _order(seed: int, turn: int, size: int) -> list[int]:
    high, low, *_ = keyed_words(PROMPTS | seed, turn, np.arange(size), 0, 0)
    found: list[int] = np.lexsort((low, high)).tolist()
    return found


def course_of(
    arch: str,
    task: str,
    *,
    lengths: tuple[int, ...] = (),
    reward: str | None = None,
    most: int | None = None,
) -> Course:
    """Of a policy and a task; recall as its warm start learned it, other kinds at its prompt lengths.

    lengths: prompt tokens of training's tasks, in turn, in place of the default ones. reward, most: of a file's tasks, see
    `own_tasks`. Raises `InputError`.
    """
    require_course(arch, task, lengths=lengths, reward=reward, most=most)
    if task.startswith(OWN):
        own = OwnTasks.read(Path(task.removeprefix(OWN)), reward=reward, most=most)
        return OwnCourse(*own.for_policy(arch))
    if task.startswith(TEXT):
        source = TextTasks.of(task, pretrained.tokenizer(arch))
        return DrawnCourse(
            one=source.one,
            lengths=lengths or source.lengths,
            test=source.test(arch),
            ends=source.ends,
        )
    recipe = recipe_of(arch) if is_warm(arch) else Recipe()
    if task != "recall":
        test = draw_tasks(task, recipe.lengths, SIZE, seed=SPLIT_SEED)
    else:
        test = split_of(arch) if is_warm(arch) else recipe.split(SPLIT_SEED)
    one = recipe.task if task == "recall" else functools.partial(_drawn, task)
    return DrawnCourse(one=one, lengths=lengths or recipe.lengths, test=tuple(test))


def _drawn(kind: str, length: int, seed: int) -> Task:
    return KINDS[kind](length, torch.Generator().manual_seed(seed))


def require_course(
    arch: str, task: str, *, lengths: tuple[int, ...], reward: str | None, most: int | None
) -> None:
    """Raises `InputError` for what `course_of` would refuse, as far as it can be told without a tokenizer."""
    own = task.startswith(OWN)
    if not own and (reward is not None or most is not None):
        raise InputError(
            f"task {task!r} has its own rewards and lengths of responses: leave reward and most out, or give "
            f"{OWN}PATH with rows of your own"
        )
    if own:
        if lengths:
            raise InputError(
                "lengths are those of drawn prompts: a file has its own, leave them out"
            )
        OwnTasks.read(Path(task.removeprefix(OWN)), reward=reward, most=most)
    elif task.startswith(TEXT):
        require_text(arch, task)
    elif task not in KINDS:
        raise InputError(
            f"task {task!r} is not known: use one of {', '.join(KINDS)}, {TEXT}KIND or {OWN}PATH"
        )
    elif is_warm(arch):
        recipe_of(arch)
