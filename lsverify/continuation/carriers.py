"""What carries a model's state, and under which argument the model takes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.cache_utils import Cache, DynamicCache

from lsverify.continuation import minimax, rwkv

# Model types that take no cache built from their config alone.
_OWN: dict[str, Callable[[Any], Cache]] = {
    "minimax": minimax.empty_cache,
    "rwkv": rwkv.empty_cache,
}


def empty_cache(config: Any) -> Cache:
    """The library's cache for a model of this config, or the one that stands for it."""
    own = _OWN.get(config.get_text_config(decoder=True).model_type)
    return own(config) if own else DynamicCache(config=config)


def state_arguments(model: nn.Module, cache: Cache) -> dict[str, Any]:
    """The arguments of `model`'s forward that make it continue from `cache` and leave the new state there.

    model is the causal language model itself, without a wrapper.
    """
    known = inspect.signature(model.forward).parameters
    if "state" in known and "cache" not in known:
        return {"state": rwkv.states(model, cache), "use_cache": True}
    return {"cache": cache, "use_cache": True}
