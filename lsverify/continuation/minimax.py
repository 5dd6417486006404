"""Lightning attention (minimax): its model takes only a cache class of its own.

That class keeps the sums of keys times values in a list beside the layers, which knows neither layer kinds nor copies.
This one is of that class, so the model takes it, and holds each sum as the recurrent state of its layer. The library's
code continues from it rightly, one token at a time within a chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache


def empty_cache(config: Any) -> Cache:
    """A cache that a model of this config takes, empty, with one typed layer for each of its layers."""
    made: Cache = _cache_class()()
    made.layers = DynamicCache(config=config).layers
    return made


@cache
def _cache_class() -> type:
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class LightningCache(MiniMaxCache):
        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
            return state

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            self.layers[layer_idx].update_recurrent_state(linear_cache)

    return LightningCache
