"""Prompts whose answer lies far back, for the tiny vocabulary: each with its answer and a reward that can be checked.

A task is drawn from a generator and a prompt length, which is its difficulty: the longer, the further back the
evidence and the more there is to confuse it with. Tokens 0 to 9 are digits, 10 to 16 marks, the others words.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from lsverify.errors import InputError
from lsverify.families.sizes import VOCABULARY

ASK, NEEDLE, COPY, SWAP, COUNT, IS, PLUS = range(10, 17)
WORDS = tuple(range(17, VOCABULARY))
MOST_PAIRS = 20


@dataclass(frozen=True, kw_only=True)
class Task:
    """One prompt [P], its answer [A] and `evidence`, the position of the first prompt token that the answer rests on.

    Leaving out what stands before `evidence` leaves the answer as it is; leaving out one token more does not.
    """

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    evidence: int

    @property
    def distance(self) -> int:
        """Tokens from the first token of the evidence to the end of the prompt, both counted."""
        return len(self.prompt) - self.evidence

    @property
    def most(self) -> int:
        """Tokens of a response at most: those of the answer."""
        return len(self.answer)

    def reward(self, response: Sequence[int] | Tensor) -> float:
        """The share of tokens that are right and in their place, of the longer of response [R] and answer; 0 to 1."""
        tokens = response.tolist() if isinstance(response, Tensor) else response
        right: int = sum(one == other for one, other in zip(tokens, self.answer, strict=False))
        return right / max(len(tokens), len(self.answer))


def recall(
    length: int,
    generator: Generator,
    *,
    pairs: int | None = None,
    width: int = 2,
    words: int = len(WORDS),
    within: int | None = None,
) -> Task:
    """Keys with values of `width` words each, noted as in `notes`; asked for one key."""
    found = notes(length, generator, pairs=pairs, width=width, words=words, within=within)
    asked = _below(len(found.pairs), generator)
    return Task(
        name="recall",
        prompt=(*found.context, ASK, found.pairs[asked][0]),
        answer=found.pairs[asked][1:],
        evidence=found.starts[asked],
    )


@dataclass(frozen=True, kw_only=True)
class Notes:
    """A prompt without its question, the pairs in it (a key and its value's words), and where each starts."""

    context: tuple[int, ...]
    pairs: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]


def notes(
    length: int,
    generator: Generator,
    *,
    pairs: int | None,
    width: int,
    words: int,
    within: int | None = None,
) -> Notes:
    """`pairs` keys and their values, two tokens shorter than `length`; by default as many as fit, at most 20.

    `words`: keys and values come from the first so many words, what stands between them from the others. `within`: all
    pairs stand in the last so many tokens of the prompt; anywhere if None.
    """
    most = min(max((length - 2) // (1 + width), 1), MOST_PAIRS, words // (1 + width))
    drawn = _words((most if pairs is None else pairs) * (1 + width), generator, words)
    found = [drawn[i : i + 1 + width] for i in range(0, len(drawn), 1 + width)]
    room = min(length, within or length) - 2
    context, starts = _laid(found, [], room, generator, WORDS[words:])
    before = _chosen(WORDS[words:], length - 2 - room, generator)
    return Notes(
        context=(*before, *context),
        pairs=tuple(map(tuple, found)),
        starts=tuple(len(before) + start for start in starts),
    )


def chain(length: int, generator: Generator, *, hops: int = 3) -> Task:
    """Links from one word to the next in any order, one chain true and one beside it; the answer follows every hop."""
    words = _words(2 * (hops + 1), generator)
    first, other = words[: hops + 1], words[hops + 1 :]
    links = [[IS, a, b] for own in (first, other) for a, b in itertools.pairwise(own)]
    order = torch.randperm(len(links), generator=generator).tolist()
    prompt, starts = _laid([links[i] for i in order], [ASK, first[0]], length, generator)
    evidence = min(start for start, i in zip(starts, order, strict=True) if i < hops)
    return Task(name="chain", prompt=prompt, answer=tuple(first[1:]), evidence=evidence)


def needle(length: int, generator: Generator, *, distractors: int = 3, width: int = 2) -> Task:
    """One marked note among words, and notes like it under other names; asked for the one."""
    size = 1 + width
    words = _words((distractors + 1) * size, generator)
    marked = [[NEEDLE, *words[i : i + size]] for i in range(0, len(words), size)]
    asked = _below(len(marked), generator)
    prompt, starts = _laid(marked, [ASK, NEEDLE, marked[asked][1]], length, generator)
    return Task(
        name="needle", prompt=prompt, answer=tuple(marked[asked][2:]), evidence=starts[asked]
    )


def copy_edited(length: int, generator: Generator, *, width: int = 4) -> Task:
    """A passage of `width` words, to be copied with one of them replaced by another."""
    *passage, new = _words(width + 1, generator)
    old = passage[_below(width, generator)]
    prompt, (start,) = _laid([[COPY, *passage, COPY]], [SWAP, old, new], length, generator)
    answer = tuple(new if word == old else word for word in passage)
    return Task(name="copy_edited", prompt=prompt, answer=answer, evidence=start)


def count(length: int, generator: Generator, *, most: int = 20) -> Task:
    """How often a word stands in the prompt, 1 to `most` or what there is room for, as two digits."""
    (word,) = _words(1, generator)
    often = 1 + _below(max(min(most, 99, (length - 2) // 2), 1), generator)
    prompt, starts = _laid([[word]] * often, [COUNT, word], length, generator)
    return Task(name="count", prompt=prompt, answer=(often // 10, often % 10), evidence=starts[0])


def arithmetic(length: int, generator: Generator, *, variables: int = 4) -> Task:
    """Words that stand for numbers of two digits, and the sum of two of them as three digits."""
    names = _words(variables, generator)
    values = torch.randint(10, (variables, 2), generator=generator).tolist()
    pieces = [[IS, name, *digits] for name, digits in zip(names, values, strict=True)]
    one, other = torch.randperm(variables, generator=generator)[:2].tolist()
    prompt, starts = _laid(pieces, [ASK, names[one], PLUS, names[other]], length, generator)
    total = sum(10 * tens + units for tens, units in (values[one], values[other]))
    answer = (total // 100, total // 10 % 10, total % 10)
    evidence = min(starts[one], starts[other])
    return Task(name="arithmetic", prompt=prompt, answer=answer, evidence=evidence)


KINDS: dict[str, Callable[..., Task]] = {
    make.__name__: make for make in (recall, chain, needle, copy_edited, count, arithmetic)
}


def draw(
    name: str, lengths: Sequence[int], number: int, *, seed: int, **sizes: int | None
) -> list[Task]:
    """`number` tasks of one kind, their prompt lengths taken from `lengths` in turn; the same from the same seed.

    `sizes` are the kind's own, `pairs` of `recall` for instance. Raises `InputError` for an unknown kind, no length,
    and a length without room for what the prompt must hold.
    """
    if name not in KINDS:
        raise InputError(f"task {name!r} is not known: use one of {', '.join(KINDS)}")
    if not lengths:
        raise InputError("no prompt length was given: name at least one, in tokens")
    generator = torch.Generator().manual_seed(seed)
    return [KINDS[name](lengths[i % len(lengths)], generator, **sizes) for i in range(number)]


def rows(tasks: Iterable[Task]) -> list[dict[str, Any]]:
    """Plain dicts, one a task: name, prompt and answer as lists of ints, evidence, distance."""
    return [
        asdict(task)
        | {"prompt": list(task.prompt), "answer": list(task.answer), "distance": task.distance}
        for task in tasks
    ]


def from_rows(found: Sequence[dict[str, Any]]) -> list[Task]:
    """The tasks that `rows` made plain. Raises `InputError` for a row whose distance is not its evidence's."""
    tasks = [
        Task(
            name=row["name"],
            prompt=tuple(row["prompt"]),
            answer=tuple(row["answer"]),
            evidence=row["evidence"],
        )
        for row in found
    ]
    for i, (task, row) in enumerate(zip(tasks, found, strict=True)):
        if task.distance != row["distance"]:
            raise InputError(
                f"row {i}: distance {row['distance']}, but the evidence is {task.distance} tokens back"
            )
    return tasks


def to_dataset(some: Iterable[Task]) -> Any:
    """A Hugging Face `datasets.Dataset` with the columns of `rows`. Raises `InputError` where datasets is not installed."""
    try:
        from datasets import Dataset
    except ImportError:
        raise InputError(
            "a dataset needs datasets, which is not installed: pip install 'lsverify[data]'"
        ) from None
    return Dataset.from_list(rows(some))


def from_dataset(dataset: Any) -> list[Task]:
    """The tasks that `to_dataset` made a dataset of, and what users made of it with its own means. Raises as `from_rows` does."""
    return from_rows(dataset.to_list())


def _words(number: int, generator: Generator, among: int = len(WORDS)) -> list[int]:
    """Different ones of the first `among` words. Raises `InputError` where there are not so many."""
    if number > among:
        raise InputError(f"{number} different words were asked for; there are {among}")
    return [WORDS[i] for i in torch.randperm(among, generator=generator)[:number].tolist()]


def _chosen(words: Sequence[int], number: int, generator: Generator) -> list[int]:
    """Any of these words, as often as it comes; none where nothing is wanted."""
    if number == 0:
        return []
    return [words[i] for i in torch.randint(len(words), (number,), generator=generator).tolist()]


def _below(number: int, generator: Generator) -> int:
    return int(torch.randint(number, (1,), generator=generator))


def _laid(
    pieces: Sequence[Sequence[int]],
    ask: Sequence[int],
    length: int,
    generator: Generator,
    between: Sequence[int] = (),
) -> tuple[tuple[int, ...], list[int]]:
    """A prompt of `length` tokens that ends in `ask`, with `pieces` in their order among other words; where each starts.

    The other words are those of `between`, or all that the pieces and the question do not use. Raises `InputError`
    where the length has no room.
    """
    needed = sum(map(len, pieces)) + len(ask)
    if (free := length - needed) < 0:
        raise InputError(f"{length} prompt tokens have no room for this task: it needs {needed}")
    used = {token for piece in (*pieces, ask) for token in piece}
    noise = between or [word for word in WORDS if word not in used]
    places = torch.randint(free + 1, (len(pieces),), generator=generator).sort().values.tolist()
    fill = _chosen(noise, free, generator)
    tokens: list[int] = []
    starts = []
    for place, before, piece in zip(places, [0, *places], pieces, strict=False):
        tokens += fill[before:place]
        starts.append(len(tokens))
        tokens += piece
    tokens += fill[places[-1] :]
    return (*tokens, *ask), starts
