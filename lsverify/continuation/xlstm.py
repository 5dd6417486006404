"""Matrix memories (xlstm): the model takes a cache class of its own, which it writes into.

Its code continues rightly, but copies each new state into the tensor it started from, so autograd finds a changed
operand. Here the places it copies into assign instead. Memory, normalizer and exponent are the recurrent states of
their layer, kept as they come (float32 at least) and read in the model's precision, the only one the code starts from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer


def empty_cache(config: Any) -> Cache:
    """One layer of three recurrent tensors for each of the model's layers."""
    return MatrixMemoryCache(config.num_hidden_layers)


class MatrixMemoryCache(Cache):
    """What the model's code reads and writes of its own cache class, in typed layers."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[LinearAttentionLayer(number_of_states=3) for _ in range(layers)])
        self.seqlen_offset = 0
        self.read_as = torch.float32

    @property
    def rnn_state(self) -> list[_Places]:
        return [_Places(layer.recurrent_states, self.read_as) for layer in self.layers]


@dataclass(frozen=True)
class _Places:
    """A layer's three states, None before the first token; an item of it can only be copied into."""

    held: dict[int, Tensor | None]
    read_as: torch.dtype

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[Tensor | None]:
        for index in range(len(self)):
            state = self.held[index]
            yield None if state is None else state.to(self.read_as)

    def __getitem__(self, index: int) -> _Place:
        return _Place(self.held, index)


@dataclass(frozen=True)
class _Place:
    held: dict[int, Tensor | None]
    index: int

    def copy_(self, value: Tensor) -> None:
        self.held[self.index] = value
