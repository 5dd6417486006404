"""The check of a name map: each tie must be a bijection on elements, shown by a round trip of index-valued tensors.

Every element of the other stack's tensors carries its own number through the rule; each number must come out exactly
once, and carrying the numbers back must give the tensors that they came from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lsverify.errors import InputError
from lsverify.name_ties import Source, Tie


def require_bijection(one: Tie) -> None:
    """Raises `InputError` unless each element of their tensors comes out once, and goes back to where it was."""
    numbers = _numbered(one)
    out = _places(one, numbers)
    for name, tensor in out.items():
        if tuple(tensor.shape) != one.shapes[name]:
            raise InputError(
                f"map: it makes {name} of shape {list(tensor.shape)}, the model has {list(one.shapes[name])}"
            )
    total = sum(tensor.numel() for tensor in numbers.values())
    met = torch.cat([tensor.flatten() for tensor in out.values()]).long()
    counts = torch.bincount(met, minlength=total)
    if int((counts == 0).sum()) != _padding(one) or int(counts.max()) > 1 or _changed(one, out):
        raise InputError(
            f"map: the rule for {', '.join(one.ours)} is no bijection: {len(met)} elements are made of {total}, "
            "some twice or not at all; mend ours, pieces, groups or shards"
        )


def _padding(one: Tie) -> int:
    """How many of their elements are padding, which nothing is made of."""
    return (
        one.padding * math.prod(one.shapes[one.ours[0]]) // one.shapes[one.ours[0]][one.rule.axis]
    )


def _changed(one: Tie, out: Mapping[str, Tensor]) -> bool:
    """Whether what goes back and comes again is not the same."""
    back = push(one, out)
    again = one.pull(back.__getitem__)
    return any(not torch.equal(again[name], tensor) for name, tensor in out.items())


def push(one: Tie, ours: Mapping[str, Tensor]) -> dict[Source, Tensor]:
    """Our tensors as the other stack's shards: the inverse of `pull`. A sum has everything in its first shard."""
    numbers = _numbered(one)
    places = _places(one, numbers)
    flat = torch.zeros(sum(tensor.numel() for tensor in numbers.values()), dtype=torch.float64)
    for name, place in places.items():
        flat[place.flatten().long()] = ours[name].double().flatten()
    values = {
        name: flat[number.flatten().long()].view(number.shape) for name, number in numbers.items()
    }
    return {source: values[source.first] * float(source.adds) for source in one.expected}


def _numbered(one: Tie) -> dict[str, Tensor]:
    """By name the first of each kind of replica, each element with a number of its own; float64 is exact to 2**53."""
    numbers: dict[str, Tensor] = {}
    start = 0
    for source, shape in one.expected.items():
        if source.first not in numbers:
            count = math.prod(shape)
            flat = torch.arange(start, start + count, dtype=torch.float64)
            numbers[source.first] = flat.view(shape)
            start += count
    return numbers


def _places(one: Tie, numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each element of ours the number of the element that it is made of."""
    return one.pull(lambda source: numbers[source.first] * float(source.adds), zero_padding=False)
