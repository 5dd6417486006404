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
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

# The exponent of a state that has seen nothing: its weight against any key is exactly zero.
_NOTHING = -1e38


def empty_cache(config: Any) -> Cache:
    """One layer with two token shifts and three recurrent tensors for each of the model's layers."""
    return Cache(
        layers=[LinearAttentionLayer(number_of_states=3) for _ in range(config.num_hidden_layers)]
    )


def states(model: nn.Module, cache: Cache) -> list[_ByLayer]:
    """The model's `state=` argument, in the library's order, backed by `cache`."""
    config: Any = model.config
    weight: Tensor = model.get_input_embeddings().weight
    inputs = weight.new_zeros(1, config.hidden_size)
    sums = weight.new_zeros(1, config.attention_hidden_size, dtype=torch.promote_types(weight.dtype, torch.float32))
    shifts = [_ByLayer(cache, "conv_states", index, inputs) for index in (0, 1)]
    return [
        *shifts,
        _ByLayer(cache, "recurrent_states", 0, sums),
        _ByLayer(cache, "recurrent_states", 1, sums),
        _ByLayer(cache, "recurrent_states", 2, sums + _NOTHING),
    ]


@dataclass(frozen=True)
class _ByLayer:
    """A tensor [b, width, layers] as the library indexes it: `[:, :, layer]`, read or assigned."""

    cache: Cache
    field: str
    index: int
    initial: Tensor

    def __getitem__(self, where: tuple[slice, slice, int]) -> Tensor:
        found = self._of(where[2])[self.index]
        return self.initial if found is None else found

    def __setitem__(self, where: tuple[slice, slice, int], value: Tensor) -> None:
        self._of(where[2])[self.index] = value

    def _of(self, layer: int) -> dict[int, Tensor | None]:
        held: dict[int, Tensor | None] = getattr(self.cache.layers[layer], self.field)
        return held
