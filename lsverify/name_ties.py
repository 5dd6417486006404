"""Rules of a name map tied to one model and one file, and values carried along them.

The shards of a tensor are read, turned, split into parts, and the parts are joined over ranks. `name_round_trip` checks
that this is a bijection on elements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.name_maps import PLACEHOLDERS, NameMap, Rule
from lsverify.tensor_files import TensorFiles, shown

Shapes = Mapping[str, tuple[int, ...]]


class Source(NamedTuple):
    """A shard: `first` is the name of the first of its replicas; `adds` is False for those that add nothing to a sum."""

    name: str
    first: str
    adds: bool


Read = Callable[[Source], Tensor]


@dataclass(frozen=True)
class Part:
    """One part of their tensor: piece `piece` of parameter `name`, of this shape (without experts)."""

    name: str
    piece: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Tie:
    """One rule with its placeholders filled in. `padding`: their entries along the axis after ours have ended."""

    owner: NameMap
    rule: Rule
    bound: Mapping[str, Any]
    ours: tuple[str, ...]
    shapes: Shapes
    groups: int
    by_rank: bool
    padding: int = 0

    def pull(self, read: Read, *, zero_padding: bool = True) -> dict[str, Tensor]:
        """Our parameters by name, from their shards. Raises `InputError` when replicas differ or padding is not zero."""
        if self.rule.padded:
            ((name, padded),) = self._joined(self._gathered(read, {})).items()
            kept = padded.shape[self.rule.axis] - self.padding
            ours, rest = padded.split([kept, self.padding], dim=self.rule.axis)
            if zero_padding and not rest.is_meta and bool(rest.any()):
                raise InputError(
                    f"map: {name} has {self.padding} entries of padding that are not zero; mask their logits in the loss"
                )
            return {name: ours}
        if not self.rule.experts:
            return self._joined(self._gathered(read, {}))
        count = self.shapes[self.ours[0]][0]
        each = [self._joined(self._gathered(read, self._of_expert(e, count))) for e in range(count)]
        return {name: torch.stack([one[name] for one in each]) for name in self.ours}

    @cached_property
    def expected(self) -> dict[Source, tuple[int, ...]]:
        """Their shards, with the shapes that they must have. Raises `InputError` where ours do not divide like that."""
        axis, parts = self.rule.axis, self._parts()
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        cut = math.prod(
            count for rank, count in self.owner.ranks.items() if self.rule.shards.get(rank) == "cat"
        )
        for part in parts:
            uneven = self.groups > 1 and (self.groups % cut or part.shape[axis] % self.groups)
            if uneven or part.shape[axis] % cut:
                raise InputError(
                    f"map: {part.name} has {part.shape[axis]} along axis {axis}, which do not divide into {self.groups} "
                    f"groups over {cut} shards; set other [ranks] or groups"
                )
        shape[axis] //= cut
        if self.rule.transpose:
            shape[-2:] = shape[:-3:-1]
        found: dict[Source, tuple[int, ...]] = {}

        def note(source: Source) -> Tensor:
            found[source] = tuple(shape)
            return torch.empty(shape, device="meta")

        self.pull(note)
        return found

    def _of_expert(self, expert: int, experts: int) -> dict[str, int]:
        filled = {"expert": expert, "local_expert": expert}
        for rank, joined in self.rule.shards.items():
            if joined == "own":
                own = experts // self.owner.ranks[rank]
                if own * self.owner.ranks[rank] != experts:
                    raise InputError(
                        f"map: {experts} experts do not divide by {self.owner.ranks[rank]} {rank} ranks"
                    )
                filled |= {rank: expert // own, "local_expert": expert % own}
        return filled

    def _parts(self) -> list[Part]:
        parts = []
        for name in self.ours:
            shape = list(self.shapes[name][1:] if self.rule.experts else self.shapes[name])
            if self.rule.axis >= len(shape) or (self.rule.transpose and len(shape) < 2):
                raise InputError(
                    f"map: {name} has shape {tuple(shape)}, which has no axis {self.rule.axis} or cannot be transposed"
                )
            if shape[self.rule.axis] % self.rule.pieces:
                raise InputError(
                    f"map: {name} of {tuple(shape)} has no {self.rule.pieces} equal pieces"
                )
            shape[self.rule.axis] += self.padding
            shape[self.rule.axis] //= self.rule.pieces
            parts += [Part(name, piece, tuple(shape)) for piece in range(self.rule.pieces)]
        return parts

    def _gathered(self, read: Read, filled: Mapping[str, int]) -> list[Tensor]:
        """The parts, joined over all ranks that `filled` leaves open."""
        rank = next((rank for rank in self.owner.ranks if rank not in filled), None)
        if rank is None:
            return self._split(self._read(read, filled))
        shards = [
            self._gathered(read, {**filled, rank: number})
            for number in range(self.owner.ranks[rank])
        ]
        return [self._join(rank, list(each)) for each in zip(*shards, strict=True)]

    def _read(self, read: Read, filled: Mapping[str, int]) -> Tensor:
        joins = {rank: self.rule.shards.get(rank, "equal") for rank in self.owner.ranks}
        first = {
            rank: 0 if joins.get(rank) in ("sum", "mean", "equal") else number
            for rank, number in filled.items()
        }
        adds = not any(joins.get(rank) == "sum" and number for rank, number in filled.items())
        tensor = read(Source(self._name(filled), self._name(first), adds))
        return tensor.transpose(-1, -2) if self.rule.transpose else tensor

    def first_name(self) -> str:
        """The name of the shard of rank 0 of each kind."""
        return self._name(dict.fromkeys(self.owner.ranks, 0))

    def _name(self, filled: Mapping[str, int]) -> str:
        prefix = self.owner.prefix if self.by_rank or "/" not in self.owner.prefix else ""
        return (prefix + self.rule.theirs).format(**{**self.bound, **filled})

    def _split(self, shard: Tensor) -> list[Tensor]:
        """The parts of one shard: groups of [first, second, ..] along the axis."""
        axis, parts = self.rule.axis, self._parts()
        whole = sum(part.shape[axis] for part in parts)
        groups = max(self.groups * shard.shape[axis] // whole, 1)
        sizes = [part.shape[axis] * shard.shape[axis] // whole // groups for part in parts]
        grouped = shard.unflatten(axis, (groups, -1)).split(sizes, dim=axis + 1)
        return [part.flatten(axis, axis + 1) for part in grouped]

    def _join(self, rank: str, shards: list[Tensor]) -> Tensor:
        how = self.rule.shards.get(rank, "equal")
        if how == "cat":
            return torch.cat(shards, dim=self.rule.axis)
        if how in ("sum", "mean"):
            total = torch.stack([shard.double() for shard in shards]).sum(0)
            return total / len(shards) if how == "mean" else total
        for number, shard in enumerate(shards[1:], start=1):
            if not shard.is_meta and not torch.equal(shard, shards[0]):
                raise InputError(
                    f"map: the shards of {', '.join(self.ours)} on {rank} 0 and {rank} {number} differ and the map says "
                    "that they are equal; reduce them first, or map them as cat, sum or mean"
                )
        return shards[0]

    def _joined(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        pieces = self.rule.pieces
        return {
            name: torch.cat(list(parts[i * pieces : (i + 1) * pieces]), dim=self.rule.axis)
            for i, name in enumerate(self.ours)
        }


def tie(owner: NameMap, shapes: Shapes, config: object, files: TensorFiles) -> list[Tie]:
    """The map's rules tied to this model's parameters and the file's tensors; parameters of which nothing is there have none.

    shapes: parameter name -> shape. config: the model's, for sizes that rules name. Raises `InputError` when no rule
    applies, a tensor is missing, left over or of another shape.
    """
    found: dict[str, list[Tie]] = {}
    for rule in owner.rule:
        for bound, ours in _matches(rule, shapes):
            one = Tie(owner, rule, bound, ours, shapes, _groups(rule, config), files.by_rank)
            if rule.padded:
                one = replace(one, padding=_padding(one, files))
            for name in ours:
                found.setdefault(name, []).append(one)
    if not found:
        raise InputError(
            f"map: none of its {len(owner.rule)} rules matches a parameter, such as {next(iter(shapes), '(none)')}; "
            "write `ours` as this model names them"
        )
    ties: list[Tie] = []
    for name in shapes:
        if name not in found or any(name in each.ours for each in ties):
            continue
        if any(s.name in files.entries for each in found[name] for s in each.expected):
            ties.append(_chosen(name, found[name], files))
    if not ties:
        example = next(iter(next(iter(found.values()))[0].expected)).name
        raise InputError(
            f"{files.path}: has no tensor that the map names, such as {shown(example)}; give the map of this stack"
        )
    used = _require_fitting(ties, files)
    for name in files.entries:
        if name not in used and not owner.ignores(name):
            raise InputError(
                f"{files.path}: tensor {shown(name)} is used by no rule of the map; add a rule, or ignore it"
            )
    return ties


def _padding(one: Tie, files: TensorFiles) -> int:
    """Entries along the axis that the file has beyond ours; 0 where it has fewer, which is then a wrong shape."""
    rule, ranks = one.rule, one.owner.ranks
    first = files.entries.get(one.first_name())
    if first is None or rule.axis >= len(first.shape):
        return 0
    shape = first.shape[:-2] + first.shape[:-3:-1] if rule.transpose else first.shape
    cut = math.prod(count for rank, count in ranks.items() if rule.shards.get(rank) == "cat")
    return max(shape[rule.axis] * cut - one.shapes[one.ours[0]][rule.axis], 0)


def _chosen(name: str, candidates: Sequence[Tie], files: TensorFiles) -> Tie:
    for each in candidates:
        if all(source.name in files.entries for source in each.expected):
            return each
    # Of alternatives the one that is there in part is the one that was meant.
    meant = max(candidates, key=lambda t: sum(s.name in files.entries for s in t.expected))
    missing = next(s.name for s in meant.expected if s.name not in files.entries)
    raise InputError(
        f"{files.path}: tensor {shown(missing)} is missing, which the map needs for {name}"
    )


def _require_fitting(ties: Sequence[Tie], files: TensorFiles) -> set[str]:
    """Names used. Raises `InputError` for a tensor that has not the shape that its rule gives it, or is used twice."""
    owners: dict[str, Tie] = {}
    for each in ties:
        for (name, _, _), shape in each.expected.items():
            if owners.setdefault(name, each) is not each:
                raise InputError(f"map: tensor {shown(name)} is used by two rules; keep one")
            entry = files.entries[name]
            if entry.shape != shape:
                raise InputError(
                    f"{files.path}: tensor {shown(name)} has shape {list(entry.shape)}; the map makes "
                    f"{', '.join(each.ours)} of {list(shape)}"
                )
    return set(owners)


def _matches(rule: Rule, shapes: Shapes) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """For each parameter that the first of `ours` names, if all of them are there: placeholders and names."""
    first = _regex(rule.ours[0])
    for name in shapes:
        if match := first.fullmatch(name):
            bound = {key: _bound(key, text) for key, text in match.groupdict().items()}
            ours = tuple(pattern.format(**bound) for pattern in rule.ours)
            if all(each in shapes for each in ours):
                yield bound, ours


def _bound(key: str, text: str) -> Any:
    """A layer as a number, so that their names may pad it to a width."""
    return int(text) if key == "layer" else text


def _regex(pattern: str) -> re.Pattern[str]:
    """What the pattern matches; a placeholder that comes again stands for the same."""
    text, seen = "", set()
    for literal, name, _, _ in Formatter().parse(pattern):
        text += re.escape(literal)
        if name is not None:
            text += f"(?P={name})" if name in seen else f"(?P<{name}>{PLACEHOLDERS[name]})"
            seen.add(name)
    return re.compile(text)


def _groups(rule: Rule, config: object) -> int:
    if isinstance(rule.groups, int):
        return rule.groups
    found = getattr(config, rule.groups, None)
    if not isinstance(found, int) or found < 1:
        raise InputError(f"map: groups {rule.groups!r} is not a size of this model's config")
    return found
