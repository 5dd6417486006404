"""Users' own data as tasks: a JSONL or parquet file of prompts, and a reward function that the user names.

Each row has a `prompt`, as token ids or, for a policy with a tokenizer, as text, which is taken as it stands. It may have an
`answer`, an `evidence` (where in the prompt the answer's evidence begins: a token's position, a character's in text), a `split`
(`train` or `test`), and whatever else the reward reads. The reward is called as `reward(response, row)`, with the response as the
prompt is given, and returns a finite number from 0 to 1. Without one, answers of token ids are graded by the share of
tokens in their place.

Where no row has a split, the rows of a fifth of the prompts are the test set: those whose sha256 come first. Rows of equal
prompts are never on both sides.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from torch import Tensor

from lsverify import pretrained
from lsverify.cases import is_warm, load_named, source_of
from lsverify.errors import InputError
from lsverify.families.sizes import VOCABULARY
from lsverify.tasks import Task

OWN = "file:"
MOST = 32
"""Tokens of a response at most, where neither the user nor an answer of token ids says."""
TEST_SHARE = 5

Reward = Callable[[Any, dict[str, Any]], float]


class OwnRow(BaseModel):
    """What a row must be; other fields are the reward's."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    prompt: str | list[NonNegativeInt] = Field(min_length=1)
    answer: str | list[NonNegativeInt] | None = None
    evidence: NonNegativeInt | None = None
    split: Literal["train", "test"] | None = None


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """One row: prompt [P] of token ids, at most `most` tokens of a response, and what grades it."""

    name: str
    prompt: tuple[int, ...]
    evidence: int | None
    most: int
    graded: Callable[[list[int]], float]

    @property
    def distance(self) -> int | None:
        """Tokens from the first token of the evidence to the end of the prompt, both counted."""
        return None if self.evidence is None else len(self.prompt) - self.evidence

    def reward(self, response: Sequence[int] | Tensor) -> float:
        """Of the tokens of a response, 0 to 1. Raises `InputError` for what the user's function returns otherwise."""
        return self.graded(list(map(int, response)))


@dataclass(frozen=True, kw_only=True)
class OwnTasks:
    """A file's rows, checked, with their numbers from 1."""

    file: Path
    rows: tuple[tuple[int, OwnRow], ...]
    reward: str | None
    most: int | None

    @classmethod
    def read(cls, file: Path, *, reward: str | None, most: int | None) -> OwnTasks:
        """Raises `InputError`, one line with file and row, for what is no row, and for a file without two parts."""
        found = []
        for number, values in _rows_of(file):
            try:
                found.append((number, OwnRow.model_validate(values)))
            except ValidationError as error:
                raise InputError(f"{file}, row {number}: {_one_line(error)}") from None
        own = cls(file=file, rows=tuple(found), reward=reward, most=most)
        own._check()
        return own

    def for_policy(
        self, arch: str
    ) -> tuple[tuple[OwnTask, ...], tuple[OwnTask, ...], tuple[int, ...]]:
        """The tasks of both parts, train and test, and the tokens that end a response: none for prompts of token ids."""
        text = any(isinstance(row.prompt, str) for _, row in self.rows)
        tokenizer = _tokenizer(arch, self.file) if text else None
        vocabulary = len(tokenizer) if tokenizer is not None else _vocabulary(arch)
        reward: Reward | None = None if self.reward is None else load_reward(self.reward)
        parts: tuple[list[OwnTask], list[OwnTask]] = [], []
        tested = self._tested()
        for number, row in self.rows:
            task = self._task(number, row, tokenizer, vocabulary, reward)
            parts[number in tested].append(task)
        end = None if tokenizer is None else tokenizer.eos_token_id
        return tuple(parts[0]), tuple(parts[1]), () if end is None else (int(end),)

    def _task(
        self,
        number: int,
        row: OwnRow,
        tokenizer: Any,
        vocabulary: int | None,
        reward: Reward | None,
    ) -> OwnTask:
        where, evidence = f"{self.file}, row {number}", row.evidence
        if isinstance(row.prompt, str):
            prompt = _ids(tokenizer, row.prompt)
            if evidence is not None:
                evidence = min(len(_ids(tokenizer, row.prompt[:evidence])), len(prompt) - 1)
        else:
            prompt = list(row.prompt)
        if vocabulary is not None and (worst := max(prompt)) >= vocabulary:
            raise InputError(
                f"{where}: prompt has token {worst}; the policy knows 0 to {vocabulary - 1}"
            )
        answered = len(row.answer) if isinstance(row.answer, list) else MOST
        most, name = self.most or answered, OWN + self.file.name
        if reward is None:
            assert isinstance(row.answer, list)  # `_check` has seen to it
            task = Task(name=name, prompt=tuple(prompt), answer=tuple(row.answer), evidence=0)
            graded: Callable[[list[int]], float] = task.reward
        else:
            read = tokenizer if isinstance(row.prompt, str) else None
            graded = _Graded(where, str(self.reward), reward, row.model_dump(), read)
        return OwnTask(name=name, prompt=tuple(prompt), evidence=evidence, most=most, graded=graded)

    def _check(self) -> None:
        for number, row in self.rows:
            where = f"{self.file}, row {number}"
            if row.evidence is not None and row.evidence >= len(row.prompt):
                raise InputError(
                    f"{where}: evidence {row.evidence} is behind the prompt's end: give a position below {len(row.prompt)}"
                )
            if self.reward is None and not (isinstance(row.answer, list) and row.answer):
                raise InputError(
                    f"{where}: there is nothing to reward by: name a function with reward=MODULE:NAME, or give each row an "
                    "answer of token ids"
                )
        if (tested := len(self._tested())) in (0, len(self.rows)):
            raise InputError(
                f"{self.file}: {tested} of {len(self.rows)} rows are for the test: give two different prompts or more, and "
                "where rows have a split, rows of both"
            )

    def _tested(self) -> set[int]:
        """The numbers of the rows of the test part."""
        if any(row.split for _, row in self.rows):
            return {number for number, row in self.rows if row.split == "test"}
        keys = {number: _key(row.prompt) for number, row in self.rows}
        distinct = sorted(set(keys.values()))
        chosen = (
            set(distinct[: max(len(distinct) // TEST_SHARE, 1)]) if len(distinct) > 1 else set()
        )
        return {number for number, key in keys.items() if key in chosen}


@dataclass(frozen=True)
class _Graded:
    """The user's function on one row, held to its promise."""

    where: str
    spec: str
    reward: Reward
    row: dict[str, Any]
    tokenizer: Any

    def __call__(self, tokens: list[int]) -> float:
        read = self.tokenizer
        response = tokens if read is None else read.decode(tokens, skip_special_tokens=True)
        try:
            # A copy: what the function writes there must not reach the next response.
            value = self.reward(response, dict(self.row))
        except Exception as error:
            raise InputError(
                f"{self.where}: reward {self.spec!r} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            ) from error
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(
                f"{self.where}: reward {self.spec!r} gave a {type(value).__name__}: return a number from 0 to 1"
            )
        if not (math.isfinite(value) and 0 <= value <= 1):
            raise InputError(
                f"{self.where}: reward {self.spec!r} gave {value}: return a number from 0 to 1"
            )
        return float(value)


def load_reward(spec: str) -> Reward:
    """The function that the user named, MODULE:NAME in the current directory or installed. Raises `InputError`."""
    found: Reward = load_named(spec, "reward", "(response, row) -> float")
    return found


def content_of(file: Path, reward: str | None) -> str:
    """What a training on this file follows from: sha256 of the file (first 16 digits), and of the reward's source (first 12).

    Raises `InputError` for a file that cannot be read.
    """
    found = hashlib.sha256(_bytes(file)).hexdigest()[:16]
    if reward is not None:
        found += f" {reward} {source_of(load_reward(reward))}"
    return found


def _rows_of(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows by number. In parquet a column without a value is left out."""
    if file.suffix == ".parquet":
        for number, row in enumerate(_parquet(file), 1):
            yield number, {name: value for name, value in row.items() if value is not None}
        return
    if file.suffix != ".jsonl":
        raise InputError(f"{file} is neither .jsonl nor .parquet: give one of these")
    for number, line in enumerate(_bytes(file).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise InputError(f"{file}, row {number}: no JSON: {error}") from None


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{file} needs pyarrow, which is not installed: pip install 'lsverify[data]', or give a .jsonl"
        ) from None
    content = _bytes(file)
    try:
        found: list[dict[str, Any]] = pyarrow.parquet.read_table(
            pyarrow.BufferReader(content)
        ).to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(
            f"{file} is no parquet file: {' '.join(str(error).split())[:200]}"
        ) from None
    return found


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None


def _key(prompt: str | list[int]) -> str:
    return hashlib.sha256(json.dumps(prompt).encode()).hexdigest()


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def _tokenizer(arch: str, file: Path) -> Any:
    if arch != pretrained.SMOLLM2 and not Path(arch).is_dir():
        raise InputError(
            f"{file} has prompts of text, and {arch!r} no tokenizer: give token ids, or use {pretrained.SMOLLM2} or a local folder"
        )
    return pretrained.tokenizer(arch)


def _vocabulary(arch: str) -> int | None:
    """Tokens that a policy of the tiny vocabulary knows; None for others, whose own code refuses what they do not know."""
    return VOCABULARY if is_warm(arch) else None


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"][:1])
    given = repr(first["input"])
    given = given if len(given) < 80 else given[:77] + "..."
    return f"{field} is {given}: {first['msg']}" if field else f"{given} is no row: {first['msg']}"
