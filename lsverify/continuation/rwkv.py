"""Weighted key-value recurrences (rwkv): the model takes no cache but five tensors that hold every layer's state.

The library writes each layer's new state into its slice of those tensors. What other layers saved for the backward
pass are slices of the same tensors, and autograd finds them changed. Here each of the five is a stand-in that is read
and assigned by layer; behind it are the cache's layers: the last inputs of the two token shifts as conv states, the
recurrence's numerator, denominator and exponent as recurrent states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

# The exponent of a state that has seen nothing: its weight against any key is exactly zero.
_NOTHING = -1e38


def empty_cache(config: Any) -> Cache:
    """One layer with two token shifts and three recurrent tensors for each of the model's layers."""
    return Cache(
        layers=[LinearAttentionLayer(number_of_states=3) for _ in range(config.num_hidden_layers)]
    )


def states(model: Any, cache: Cache, length: int) -> list[_ByLayer]:
    """The model's `state=` argument for a pass over `length` tokens, in the library's order, backed by `cache`."""
    config: Any = model.config
    weight: Tensor = model.get_input_embeddings().weight
    inputs = weight.new_zeros(1, config.hidden_size)
    precise = torch.promote_types(weight.dtype, torch.float32)
    sums = weight.new_zeros(1, config.attention_hidden_size, dtype=precise)
    # A single token is mixed with its predecessor as it is read, [b, width] against [b, 1, width]: right for one row.
    single = length == 1
    return [
        _ByLayer(cache, "conv_states", 0, inputs, single),
        _ByLayer(cache, "conv_states", 1, inputs, single),
        _ByLayer(cache, "recurrent_states", 0, sums),
        _ByLayer(cache, "recurrent_states", 1, sums),
        _ByLayer(cache, "recurrent_states", 2, sums + _NOTHING),
    ]


@dataclass(frozen=True)
class _ByLayer:
    """A tensor [b, width, layers] as the library indexes it: `[:, :, layer]`, read or assigned.

    Read as [b, width], or with a dimension for time as [b, 1, width].
    """

    cache: Cache
    field: str
    index: int
    initial: Tensor
    with_time: bool = False

    def __getitem__(self, where: tuple[slice, slice, int]) -> Tensor:
        found = self._of(where[2])[self.index]
        state = self.initial if found is None else found
        return state[:, None] if self.with_time else state

    def __setitem__(self, where: tuple[slice, slice, int], value: Tensor) -> None:
        self._of(where[2])[self.index] = value

    def _of(self, layer: int) -> dict[int, Tensor | None]:
        held: dict[int, Tensor | None] = getattr(self.cache.layers[layer], self.field)
        return held
