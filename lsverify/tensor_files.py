"""Safetensors files from elsewhere: every claim of a header is held against the file before any number is read.

A header may name the same tensor twice, claim gigabytes that are not there, or let two tensors share bytes; each of
these is one `InputError` line. Numbers are read in blocks of bounded size, so a file of any size can be gone through.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lsverify.errors import InputError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATING = ("F64", "F32", "F16", "BF16")
# The format's own bound on a header, and one on an index of shards.
LARGEST_HEADER = 100_000_000
LARGEST_INDEX = 64 * 2**20
INDEX = "model.safetensors.index.json"
BLOCK = 2**20
_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: `dtype` as the format names it; bytes `start` to `end` of the file."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def blocks(self, elements: int = BLOCK) -> Iterator[Tensor]:
        """The values in order, flat, at most `elements` at a time. Raises `InputError` when the file has become shorter."""
        dtype = DTYPES[self.dtype]
        with _opened(self.file) as file:
            file.seek(self.start)
            left = self.elements
            while left:
                count = min(left, elements)
                raw = bytearray(count * dtype.itemsize)
                if file.readinto(raw) != len(raw):
                    refuse(self.file, f"ends inside tensor {shown(self.key)}; write it again")
                yield torch.frombuffer(raw, dtype=dtype)
                left -= count

    def read(self) -> Tensor:
        """The whole tensor."""
        values = torch.empty(self.elements, dtype=DTYPES[self.dtype])
        at = 0
        for block in self.blocks():
            values[at : at + len(block)] = block
            at += len(block)
        return values.view(self.shape)

    def finite(self) -> Entry:
        """Itself. Raises `InputError`, naming the first place, when a value is NaN or infinite."""
        at = 0
        for block in self.blocks():
            self.require_finite(block, at)
            at += len(block)
        return self

    def require_finite(self, block: Tensor, at: int) -> None:
        """Raises `InputError` when a value of a block, which begins at element `at`, is NaN or infinite."""
        if bool(torch.isfinite(block).all()):
            return
        first = int((~torch.isfinite(block)).nonzero()[0])
        refuse(
            self.file,
            f"tensor {shown(self.key)} is {float(block[first])} at element {at + first}; only finite values can be "
            "compared, so mend the step that made it",
        )


@dataclass(frozen=True)
class TensorFiles:
    """Tensors by name: of one file, of the shards of an index, or of a folder of files, one a rank.

    In a folder of files without an index a name is `STEM/NAME`, so that ranks may use the same names (`by_rank`).
    `metadata` is that of the only or the first file.
    """

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    by_rank: bool = False

    @property
    def bytes(self) -> int:
        return sum(entry.end - entry.start for entry in self.entries.values())


def open_tensors(path: Path) -> TensorFiles:
    """A safetensors file, an index of shards or its folder, or a folder of safetensors files, one a rank.

    Raises `InputError` for anything else and for a file that is not what its header claims.
    """
    if os.path.isdir(path):
        return _indexed(path / INDEX) if (path / INDEX).is_file() else _ranks(path)
    if path.name.endswith(".index.json"):
        return _indexed(path)
    entries, metadata = read_header(path)
    return TensorFiles(path, entries, metadata)


def _ranks(folder: Path) -> TensorFiles:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        refuse(
            folder, f"has neither {INDEX} nor a *.safetensors file; name a file, or such a folder"
        )
    entries: dict[str, Entry] = {}
    metadata: Mapping[str, str] = {}
    for file in files:
        own, told = read_header(file)
        metadata = metadata or told
        entries |= {f"{file.stem}/{name}": entry for name, entry in own.items()}
    return TensorFiles(folder, entries, metadata, by_rank=True)


def _indexed(index: Path) -> TensorFiles:
    """The shards of an index. Raises `InputError` when it and they disagree, or a shard is outside the index's folder."""
    content = read_json(index, LARGEST_INDEX)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        refuse(index, "has no weight_map from tensor names to file names; give a safetensors index")
    headers = {}
    metadata: Mapping[str, str] = {}
    for shard in sorted(set(places.values())):
        headers[shard], told = read_header(index.parent / plain_name(index, shard))
        metadata = metadata or told
    for name, shard in places.items():
        if name not in headers[shard]:
            refuse(index, f"says that {shown(name)} is in {shown(shard)}, which has no such tensor")
    for shard, found in headers.items():
        for name in found:
            if places.get(name) != shard:
                refuse(index, f"does not say that {shown(name)} is in {shown(shard)}, which has it")
    entries = {name: headers[shard][name] for name, shard in places.items()}
    return TensorFiles(index, entries, metadata)


def plain_name(owner: Path, name: str) -> str:
    """The name, if it is one of a file beside `owner`. Raises `InputError` for a path that leads anywhere else."""
    unsafe = name in ("", ".", "..") or any(c in name for c in "/\\:\0") or not name.isprintable()
    if unsafe or os.path.islink(owner.parent / name):
        refuse(owner, f"names the file {shown(name)}; only plain files in its own folder are read")
    return name


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a safetensors file. Raises `InputError`, one line, when it is not a sound one."""
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        if len(first) < 8:
            refuse(path, f"has {len(first)} bytes; a safetensors file has at least 8")
        length = int.from_bytes(first, "little")
        if length > min(size - 8, LARGEST_HEADER):
            refuse(
                path,
                f"claims a header of {length} bytes and has {size} bytes (allowed are {LARGEST_HEADER}); it is "
                "truncated or no safetensors file, so write it again",
            )
        raw = file.read(length)
    header = _json(path, raw)
    if not isinstance(header, dict):
        refuse(
            path,
            f"has a header that is a {type(header).__name__}; a safetensors header is an object",
        )
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        refuse(path, "has __metadata__ that is not a mapping of text to text")
    entries = {
        name: _entry(path, name, fields, 8 + length, size - 8 - length)
        for name, fields in header.items()
    }
    _require_covered(path, entries, 8 + length, size)
    return entries, metadata


def _entry(path: Path, name: str, fields: Any, base: int, size: int) -> Entry:
    if not name or not name.isprintable():
        refuse(path, f"names a tensor {shown(name)}; a name is printable and not empty")
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        refuse(
            path, f"describes tensor {shown(name)} by {shown(fields)}; expected {sorted(_FIELDS)}"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(
            path, f"has tensor {shown(name)} of dtype {shown(dtype)}; known are {', '.join(DTYPES)}"
        )
    if not _counts(shape) or len(shape) > 16:
        refuse(
            path,
            f"has tensor {shown(name)} of shape {shown(shape)}; give up to 16 lengths of 0 or more",
        )
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        refuse(
            path,
            f"has tensor {shown(name)} at bytes {shown(offsets)} of {size}; it is truncated or damaged, so write it again",
        )
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if needed != offsets[1] - offsets[0]:
        refuse(
            path,
            f"has tensor {shown(name)} of {dtype} {shown(shape)} in {offsets[1] - offsets[0]} bytes; it takes {shown(needed)}",
        )
    return Entry(path, name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _require_covered(path: Path, entries: Mapping[str, Entry], base: int, size: int) -> None:
    """Every byte after the header belongs to one tensor."""
    at = base
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != at:
            kind = "shares bytes with another" if entry.start < at else "leaves a gap before it"
            refuse(path, f"has tensor {shown(entry.key)} which {kind}; write it again")
        at = entry.end
    if at != size:
        refuse(path, f"has {size - at} bytes that belong to no tensor; write it again")


def read_json(path: Path, largest: int) -> Any:
    """A JSON file of at most `largest` bytes. Raises `InputError` when it cannot be read, or names a key twice."""
    with _opened(path) as file:
        raw = file.read(largest + 1)
    if len(raw) > largest:
        refuse(path, f"has more than {largest} bytes; that much is not read")
    return _json(path, raw)


def _json(path: Path, raw: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
            refuse(path, f"names {shown(twice)} twice; keep one of the two")
        return found

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        return refuse(path, f"is not sound JSON ({error}); write it again")


def _opened(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            refuse(path, "is not a file; name a safetensors file, an index of shards, or a folder")
        return path.open("rb")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        return refuse(path, f"cannot be read: {reason}")


def shown(value: Any) -> str:
    """A value from a file as it may stand in a message: printable, and not long."""
    try:
        text = ascii(value)
    except ValueError:  # an integer too long to be written out
        text = "a number beyond all sizes"
    return text if len(text) <= 120 else f"{text[:117]}..."


def refuse(path: Path, why: str) -> NoReturn:
    """Raise the `InputError` that says what is wrong with a file."""
    raise InputError(f"{path}: {why}") from None
