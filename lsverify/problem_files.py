"""Problems on disk: flat tensors in problem.safetensors, everything else in problem.json.

Reading trusts nothing. Sizes are held against each other and against the file before any tensor is made, the content
against the hash that was written, and whatever does not fit is one InputError line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from
from safetensors.torch import save as bytes_of
from torch import Tensor

from lsverify.errors import InputError
from lsverify.problem_types import LOGP_NAMES, Group, Problem, Response
from lsverify.whole_files import write_whole

# 2 has spans of prompts; what has none is written as 1, which every version reads.
SCHEMA_VERSIONS = (1, 2)
TENSORS, LAYOUT = "problem.safetensors", "problem.json"
# Far above any real problem's; keeps a hostile file from being parsed for minutes.
LARGEST_JSON = 64 * 2**20

_DTYPES = {"prompt_tokens": "I64", "response_tokens": "I64", "mask": "BOOL"} | dict.fromkeys(
    LOGP_NAMES, "F64"
)
_BYTES = {"I64": 8, "BOOL": 1, "F64": 8}


_Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


class _Layout(BaseModel):
    """problem.json. Lengths count tokens; response_lengths, rewards and truncated go by member, spans by prompt."""

    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: Literal[1, 2]
    seed: int | None
    prompt_lengths: Annotated[list[PositiveInt], Field(min_length=1)]
    group_sizes: list[PositiveInt]
    response_lengths: list[PositiveInt]
    rewards: list[FiniteFloat]
    truncated: list[bool]
    log_probs: list[Literal["old_logp", "ref_logp", "sampler_logp"]]
    content_hash: str
    spans: list[list[_Pair]] | None = None

    def elements(self) -> dict[str, int]:
        """Elements of each tensor that the other file must hold."""
        responses = sum(self.response_lengths)
        return {"prompt_tokens": sum(self.prompt_lengths)} | dict.fromkeys(
            ("response_tokens", "mask", *self.log_probs), responses
        )


def save(problem: Problem, directory: str | Path) -> Path:
    """Write a problem into a directory, made if need be; returns it. Files of the same names are replaced.

    Each file appears whole or not at all. The hash in problem.json ties it to the tensors it was written with, so a
    save that stops between the two files is noticed by `load`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.contiguous().cpu() for name, value in problem.flat().items()}
    described = problem.layout()
    layout = {
        "schema_version": 2 if "spans" in described else 1,
        **described,
        "log_probs": [name for name in LOGP_NAMES if name in tensors],
        "content_hash": problem.content_hash(),
    }
    write_whole(directory / TENSORS, bytes_of(tensors))
    write_whole(directory / LAYOUT, (json.dumps(layout, indent=1) + "\n").encode())
    return directory


def load(directory: str | Path) -> Problem:
    """The problem that `save` wrote into a directory, equal to it by content_hash.

    Raises InputError, naming the file, for anything missing, malformed, contradictory or altered.
    """
    directory = Path(directory)
    layout = _read_layout(directory / LAYOUT)
    tensors = _read_tensors(directory / TENSORS, layout)
    try:
        problem = _assemble(layout, tensors)
    except InputError as error:
        _refuse(directory / TENSORS, str(error))
    if problem.content_hash() != layout.content_hash:
        _refuse(
            directory,
            "the content does not match its content_hash; the files were altered or mixed",
        )
    return problem


def _refuse(path: Path, why: str) -> NoReturn:
    raise InputError(f"{path}: {why}") from None


def _read(path: Path, largest: int | None = None) -> bytes:
    try:
        if largest is not None and path.stat().st_size > largest:
            _refuse(path, f"{path.stat().st_size} bytes; at most {largest} are read")
        return path.read_bytes()
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")


def _read_layout(path: Path) -> _Layout:
    raw = _read(path, LARGEST_JSON)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"not JSON: {error}")
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, bool) or version not in SCHEMA_VERSIONS:
        read = " and ".join(map(str, SCHEMA_VERSIONS))
        _refuse(path, f"schema_version is {version!r}; this version reads {read}")
    try:
        layout = _Layout.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        _refuse(path, f"{name}: {first['msg']}; got {first['input']!r:.80}")
    if (layout.spans is not None) != (version == 2):
        _refuse(
            path, f"spans are for schema_version 2, which must have them; this file says {version}"
        )
    members = sum(layout.group_sizes)
    for name, expected in (
        *([("spans", len(layout.prompt_lengths))] if layout.spans is not None else []),
        ("group_sizes", len(layout.prompt_lengths)),
        ("response_lengths", members),
        ("rewards", members),
        ("truncated", members),
    ):
        if (found := len(getattr(layout, name))) != expected:
            _refuse(path, f"{name} has {found} entries; the other fields ask for {expected}")
    if layout.log_probs != [name for name in LOGP_NAMES if name in layout.log_probs]:
        _refuse(
            path, f"log_probs is {layout.log_probs}; list each name once, in the order {LOGP_NAMES}"
        )
    if "old_logp" not in layout.log_probs:
        _refuse(path, "log_probs lacks old_logp")
    return layout


def _read_tensors(path: Path, layout: _Layout) -> dict[str, Tensor]:
    elements = layout.elements()
    data = sum(count * _BYTES[_DTYPES[name]] for name, count in elements.items())
    raw = _read(path, data + 2**20)
    if len(raw) < 8:
        _refuse(path, f"{len(raw)} bytes; a safetensors file has at least 8")
    header_length = int.from_bytes(raw[:8], "little")
    if 8 + header_length + data != len(raw):
        _refuse(
            path,
            f"{len(raw)} bytes, but the header claims {header_length} and the lengths in {LAYOUT} ask for {data} bytes "
            "of tensors; it is truncated or belongs to another problem",
        )
    try:
        header = json.loads(raw[8 : 8 + header_length])
        tensors: dict[str, Tensor] = tensors_from(raw)
    except (SafetensorError, ValueError, RecursionError) as error:
        _refuse(path, f"not a safetensors file: {error}")
    for name in sorted(elements.keys() ^ tensors.keys()):
        _refuse(path, f"tensor {name} is {'missing' if name in elements else 'not expected'}")
    for name, count in elements.items():
        found = (header[name]["dtype"], header[name]["shape"])
        if found != (_DTYPES[name], [count]):
            _refuse(
                path, f"tensor {name} is {found[0]} {found[1]}; expected {_DTYPES[name]} [{count}]"
            )
    if int(tensors["mask"].view(torch.uint8).max()) > 1:
        _refuse(path, "tensor mask holds bytes other than 0 and 1")
    return tensors


def _assemble(layout: _Layout, tensors: dict[str, Tensor]) -> Problem:
    prompts = torch.split(tensors["prompt_tokens"], layout.prompt_lengths)
    parts = {
        name: torch.split(value, layout.response_lengths)
        for name, value in tensors.items()
        if name != "prompt_tokens"
    }
    members = iter(range(len(layout.response_lengths)))
    spans = layout.spans or [[] for _ in prompts]
    return Problem(
        seed=layout.seed,
        groups=tuple(
            Group(
                prompt=prompt.clone(),
                responses=tuple(_member(next(members), layout, parts) for _ in range(size)),
                spans=tuple((start, end) for start, end in own),
            )
            for prompt, size, own in zip(prompts, layout.group_sizes, spans, strict=True)
        ),
    )


def _member(index: int, layout: _Layout, parts: Mapping[str, Sequence[Tensor]]) -> Response:
    # Clones: a view of the file's tensors would keep all of them alive with the smallest selection.
    own: dict[str, Any] = {name: values[index].clone() for name, values in parts.items()}
    own["tokens"] = own.pop("response_tokens")
    try:
        return Response(reward=layout.rewards[index], truncated=layout.truncated[index], **own)
    except InputError as error:
        raise InputError(f"member {index}: {error}") from None
