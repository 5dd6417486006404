"""Questions over real text for a policy that has a tokenizer: pages of the Python language reference, rewards in parts.

A prompt is a piece of the reference that ends in a question and in `[[`; the answer is one word, then `]]` and the end of
the line. Half of the reward is for the word, half for the form. A model that completes text copies the word now and then and
seldom stops there, so there is something to learn within some tens of steps.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor
from transformers import PreTrainedTokenizerBase

from lsverify.errors import InputError
from lsverify.fixture_files import fixture
from lsverify.pretrained import SMOLLM2
from lsverify.text import corpus
from lsverify.warm_starts import SPLIT_SEED

TEXT = "text:"
KINDS = ("copy", "code", "topic")
LENGTHS, SIZE, MOST = (256,), 24, 12
COLOURS = ("red", "blue", "green", "white", "black", "yellow")
NOTES, CHOICES = 3, 4


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """One prompt [P], the word that answers it, and the position of the first token of what the answer rests on."""

    name: str
    prompt: tuple[int, ...]
    answer: str
    evidence: int
    most: int
    read: Callable[[list[int]], str]

    @property
    def distance(self) -> int:
        """Tokens from the first token of the evidence to the end of the prompt, both counted."""
        return len(self.prompt) - self.evidence

    def reward(self, response: Sequence[int] | Tensor) -> float:
        """Of the tokens of a response, 0 to 1; see `graded`."""
        return graded(self.read(list(map(int, response))), self.answer)


def graded(response: str, answer: str) -> float:
    """Half for the right word before `]]`, half for a line that has nothing but one word and `]]`."""
    line, _, _ = response.partition("\n")
    word, closed, rest = line.partition("]]")
    right = word.strip() == answer
    formed = bool(closed) and not rest.strip() and len(word.split()) == 1
    return (right + formed) / 2


@dataclass(frozen=True)
class TextTasks:
    """Tasks of one kind for one tokenizer. `one` makes them, exactly as long as asked for."""

    kind: str
    tokenizer: PreTrainedTokenizerBase
    lengths: tuple[int, ...] = LENGTHS

    @classmethod
    def of(cls, task: str, tokenizer: PreTrainedTokenizerBase) -> TextTasks:
        """Of `text:KIND`."""
        return cls(task.removeprefix(TEXT), tokenizer)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Every token with a line's end in it, and the tokenizer's own end of text."""
        decoded = self.tokenizer.batch_decode([[i] for i in range(len(self.tokenizer))])
        own = {self.tokenizer.eos_token_id} - {None}
        return tuple(sorted(own | {i for i, text in enumerate(decoded) if "\n" in text}))

    def one(self, length: int, seed: int) -> TextTask:
        """The task with a prompt of `length` tokens that follows from the seed. Raises `InputError` where there is no room."""
        generator = torch.Generator().manual_seed(seed)
        make = {"copy": self._copy, "code": self._code, "topic": self._topic}[self.kind]
        prompt, answer, evidence = make(length, generator)
        return self._task(prompt, answer, evidence)

    def test(self, arch: str) -> tuple[TextTask, ...]:
        """24 tasks: frozen in fixtures/ for `smollm2-135m`, whatever the version of Python; drawn for other tokenizers."""
        if arch != SMOLLM2:
            return self.drawn_test()
        found = json.loads(fixture(f"tasks/text-{self.kind}.json").read_text("utf-8"))
        return tuple(self._task(row["prompt"], row["answer"], row["evidence"]) for row in found)

    def drawn_test(self) -> tuple[TextTask, ...]:
        """24 tasks that follow from this version's reference."""
        lengths = itertools.cycle(self.lengths)
        return tuple(self.one(next(lengths), SPLIT_SEED + i) for i in range(SIZE))

    def _task(self, prompt: Sequence[int], answer: str, evidence: int) -> TextTask:
        return TextTask(
            name=TEXT + self.kind,
            prompt=tuple(prompt),
            answer=answer,
            evidence=evidence,
            most=max(MOST, len(self._ids(f"{answer}]]\n")) + 2),
            read=self._read,
        )

    def _read(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _copy(self, length: int, generator: Generator) -> tuple[list[int], str, int]:
        """One word stands in a line of its own; it is to be copied."""
        word = _any(self._words, generator)
        note, ask = f"\n\nThe marked word is [[{word}]]\n\n", "\n\nThe marked word is [["
        prompt, (evidence,) = self._laid([note], ask, length, generator)
        return prompt, word, evidence

    def _code(self, length: int, generator: Generator) -> tuple[list[int], str, int]:
        """Boxes of several colours have codes; one of them is asked for."""
        order = torch.randperm(len(COLOURS), generator=generator)[:NOTES].tolist()
        words = [_any(self._words, generator) for _ in order]
        notes = [
            f"\n\nThe code of the {COLOURS[i]} box is [[{word}]]\n\n"
            for i, word in zip(order, words, strict=True)
        ]
        asked = int(torch.randint(NOTES, (1,), generator=generator))
        ask = f"\n\nThe code of the {COLOURS[order[asked]]} box is [["
        prompt, starts = self._laid(notes, ask, length, generator)
        return prompt, words[asked], starts[asked]

    def _topic(self, length: int, generator: Generator) -> tuple[list[int], str, int]:
        """The section that the prompt begins with, of four that are named; its title stands first."""
        long_enough = [name for name, size in self._sections.items() if size >= length]
        if len(long_enough) < CHOICES:
            raise InputError(
                f"{TEXT}topic has {len(long_enough)} sections of {length} tokens: ask for a smaller length"
            )
        order = torch.randperm(len(long_enough), generator=generator)[:CHOICES].tolist()
        names = [long_enough[i] for i in order]
        answer = names[int(torch.randint(CHOICES, (1,), generator=generator))]
        listed = "\n".join(f"[[{name}]]" for name in names)
        ask = self._ids(f"\n\nTopics:\n{listed}\n\nThe text above is about this topic:\n[[")
        _require_room(length, len(ask) + 1)
        section = self._ids(_topics()[answer][: 12 * length])
        return [*section[: length - len(ask)], *ask], answer, 0

    def _laid(
        self, notes: Sequence[str], ask: str, length: int, generator: Generator
    ) -> tuple[list[int], list[int]]:
        """Text of the reference with the notes in their order between its words, then the question; where each note starts."""
        given, question = [self._ids(note) for note in notes], self._ids(ask)
        free = length - sum(map(len, given)) - len(question)
        _require_room(length, length - free)
        places = torch.randint(free + 1, (len(given),), generator=generator).sort().values.tolist()
        at = int(torch.randint(len(self._pieces), (1,), generator=generator))
        tokens: list[int] = []
        starts: list[int] = []
        filled = 0
        while filled < free or len(starts) < len(given):
            while len(starts) < len(given) and places[len(starts)] <= filled:
                note = given[len(starts)]
                starts.append(len(tokens))
                tokens += note
            piece = self._pieces[at % len(self._pieces)][: free - filled]
            tokens += piece
            filled, at = filled + len(piece), at + 1
        return [*tokens, *question], starts

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    @cached_property
    def _pieces(self) -> list[list[int]]:
        """The reference word by word, each with the space before it."""
        words = corpus().split()
        known = sorted(set(words))
        ids = self.tokenizer([f" {word}" for word in known], add_special_tokens=False)["input_ids"]
        of = dict(zip(known, ids, strict=True))
        return [of[word] for word in words]

    @cached_property
    def _words(self) -> list[str]:
        """Words that are asked for."""
        return sorted(set(re.findall(r"\b[a-z]{5,9}\b", corpus())))

    @cached_property
    def _sections(self) -> dict[str, int]:
        """Tokens of each section."""
        return {name: len(self._ids(text)) for name, text in sorted(_topics().items())}


def require_text(arch: str, task: str) -> None:
    """Raises `InputError` for an unknown kind, and a policy without a tokenizer."""
    kind = task.removeprefix(TEXT)
    if kind not in KINDS:
        listed = ", ".join(TEXT + one for one in KINDS)
        raise InputError(f"task {task!r} is not known: use one of {listed}")
    if arch != SMOLLM2 and not Path(arch).is_dir():
        raise InputError(
            f"task {task!r} needs a policy with a tokenizer, {arch!r} has none: use {SMOLLM2} or a local folder"
        )


@functools.cache
def corpus_hash() -> str:
    """sha256 of the reference (first 16 digits): other versions of Python have other pages."""
    return hashlib.sha256(corpus().encode()).hexdigest()[:16]


def rows(tasks: Sequence[TextTask]) -> list[dict[str, Any]]:
    """Plain dicts, one a task: name, prompt as a list of ints, answer, evidence, distance."""
    return [
        {
            "name": task.name,
            "prompt": list(task.prompt),
            "answer": task.answer,
            "evidence": task.evidence,
            "distance": task.distance,
        }
        for task in tasks
    ]


def _topics() -> dict[str, str]:
    from pydoc_data.topics import topics

    return {name: re.sub(r"[*=]{3,}\n", "", text).strip() for name, text in topics.items()}


def _any(words: Sequence[str], generator: Generator) -> str:
    return words[int(torch.randint(len(words), (1,), generator=generator))]


def _require_room(length: int, needed: int) -> None:
    if length < needed:
        raise InputError(f"{length} prompt tokens have no room for this task: it needs {needed}")
