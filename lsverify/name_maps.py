"""Name maps: how another stack's tensors become this model's parameters, element by element.

A map is a TOML file of rules (docs/files.md). Each rule ties one tensor of the other stack, given in shards over its
ranks, to one or more parameters; `name_ties` carries values along them. Here maps are read and refused.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from string import Formatter
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from lsverify.errors import InputError
from lsverify.tensor_files import refuse, shown

MAPS = Path(__file__).parent / "maps"
LARGEST_MAP = 2**20
Join = Literal["cat", "sum", "mean", "equal", "own"]
# Placeholders of `ours`, and what they stand for.
PLACEHOLDERS = {"layer": r"\d+", "name": r".+"}


class Rule(BaseModel):
    """One rule. `ours` and `theirs` are patterns with {layer} and {name}; `theirs` may also have ranks and {expert}.

    ours: the parameters that their tensor holds, in its order along `axis`.
    pieces: each of ours is itself this many equal pieces along `axis`, sharded apart (gate and up in one tensor).
    groups: their rows come in so many groups of [first, second, ..]; a number, or the name of a size in the config.
    transpose: their last two axes are the other way round.
    experts: their tensors, one for each expert, are stacked along a first axis of ours.
    padded: their axis may be longer than ours, with zeros at its end (a vocabulary rounded up).
    shards: how shards over a rank are joined: cat along `axis`, sum, mean, equal (replicas, the default), or own (each
        rank has its own experts).
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    ours: Annotated[list[str], Field(min_length=1)]
    theirs: str
    axis: Annotated[int, Field(ge=0, le=15)] = 0
    pieces: PositiveInt = 1
    groups: PositiveInt | str = 1
    transpose: bool = False
    experts: bool = False
    padded: bool = False
    shards: dict[str, Join] = Field(default_factory=dict)


class NameMap(BaseModel):
    """A map's rules. Of several rules for one parameter the first whose tensors are in the file is used.

    prefix: put before each of their names; in a folder of files, one a rank, it names the file: "tp{tp}/".
    ranks: how many ranks there are of each kind. ignore: names, with * and ?, that are no gradients.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prefix: str = ""
    ranks: dict[str, PositiveInt] = Field(default_factory=dict)
    ignore: list[str] = Field(default_factory=list)
    rule: Annotated[list[Rule], Field(min_length=1)]

    def ignores(self, name: str) -> bool:
        """Whether a tensor's name, with or without that of its file, is one that is no gradient."""
        both = (name, name.partition("/")[2])
        return any(fnmatch.fnmatchcase(n, pattern) for pattern in self.ignore for n in both)


def read_map(spec: str) -> NameMap:
    """A map by file name, or a shipped one by name with its ranks: `megatron_core:tp=2,ep=2`.

    Raises `InputError`, one line, for a file that is no map.
    """
    name, _, ranks = spec.partition(":")
    shipped = MAPS / f"{name}.toml"
    path = shipped if name.isidentifier() and shipped.is_file() else Path(spec)
    found = _parsed(path)
    if path == shipped and ranks:
        found = found.model_copy(update={"ranks": found.ranks | _counts(spec, ranks, found)})
    return found


def _parsed(path: Path) -> NameMap:
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_MAP + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        have = ", ".join(sorted(each.stem for each in MAPS.glob("*.toml")))
        refuse(path, f"cannot be read as a name map ({reason}); give a TOML file, or one of {have}")
    if len(raw) > LARGEST_MAP:
        refuse(path, f"has more than {LARGEST_MAP} bytes, too many for a name map")
    try:
        found = NameMap.model_validate(tomllib.loads(raw.decode("utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        refuse(path, f"is no name map at {where}: {first['msg']}, got {shown(first['input'])}")
    except (ValueError, RecursionError) as error:
        refuse(path, f"is not sound TOML: {error}")
    for number, rule in enumerate(found.rule):
        _require_sound(path, f"rule {number}", rule, found)
    return found


def _require_sound(path: Path, where: str, rule: Rule, owner: NameMap) -> None:
    first = _placeholders(path, where, rule.ours[0], tuple(PLACEHOLDERS))
    for pattern in rule.ours[1:]:
        _placeholders(path, where, pattern, first)
    experts = ("expert", "local_expert") if rule.experts else ()
    _placeholders(path, where, rule.theirs, (*first, *owner.ranks, *experts))
    _placeholders(path, "prefix", owner.prefix, tuple(owner.ranks))
    if unknown := sorted(rule.shards.keys() - owner.ranks.keys()):
        refuse(path, f"has shards over {unknown[0]!r} in {where}, which [ranks] does not count")
    if rule.pieces * len(rule.ours) == 1 and rule.groups != 1:
        refuse(
            path, f"has groups in {where}, which holds one part only; name ours in order, or pieces"
        )
    if rule.padded and (rule.pieces * len(rule.ours) > 1 or rule.experts):
        refuse(path, f"has padded in {where}, which is for one parameter in one piece")
    if "own" in rule.shards.values() and not rule.experts:
        refuse(path, f"has own in {where}, which is for experts = true")


def _placeholders(path: Path, where: str, pattern: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Those of a pattern. Raises `InputError` for one that is not known there, or is formatted by more than a width."""
    try:
        fields = [part for part in Formatter().parse(pattern) if part[1] is not None]
    except ValueError as error:
        refuse(path, f"has pattern {shown(pattern)} in {where}, which cannot be filled in: {error}")
    for _, name, width, conversion in fields:
        sound = name in known and conversion is None and re.fullmatch(r"(0?[1-9])?", width or "")
        if not sound or (width and name == "name"):
            refuse(
                path,
                f"has pattern {shown(pattern)} in {where}, where {shown(name)} cannot be filled in; there are "
                f"{', '.join(known) or 'no placeholders'}, with a width such as {{tp:02}} for numbers",
            )
    return tuple(name for _, name, _, _ in fields if name is not None)


def _counts(spec: str, text: str, owner: NameMap) -> dict[str, int]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, _, count in pairs:
        if name not in owner.ranks or not count.isdecimal() or not 1 <= int(count) <= 4096:
            raise InputError(
                f"map {spec!r}: {name}={count} is not a number of ranks; use {' and '.join(owner.ranks)}, 1 or more each"
            )
    return {name: int(count) for name, _, count in pairs}
