"""What carries a model's state, under which argument the model takes it, and whether it left its state there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, LinearAttentionCacheLayerMixin

from lsverify.continuation import minimax, rwkv, xlstm
from lsverify.errors import InputError

# Model types that take no cache built from their config alone.
_OWN: dict[str, Callable[[Any], Cache]] = {
    "minimax": minimax.empty_cache,
    "rwkv": rwkv.empty_cache,
    "xlstm": xlstm.empty_cache,
}


def empty_cache(config: Any) -> Cache:
    """The library's cache for a model of this config, or the one that stands for it."""
    own = _OWN.get(config.get_text_config(decoder=True).model_type)
    return own(config) if own else DynamicCache(config=config)


def state_arguments(model: Any, cache: Cache, length: int) -> dict[str, Any]:
    """The arguments with which `model`'s forward goes on for `length` tokens from `cache` and leaves its state there.

    model is the causal language model itself, without a wrapper. Raises `InputError` for one that takes no state.
    """
    known = inspect.signature(model.forward).parameters
    if "state" in known and "cache" not in known:
        return {"state": rwkv.states(model, cache, length), "use_cache": True}
    named = inspect.Parameter.VAR_KEYWORD
    if "cache" not in known and all(parameter.kind is not named for parameter in known.values()):
        raise InputError(
            f"{type(model).__name__} takes no cache, so nothing can continue from its prompt's state: "
            "train it with full autograd"
        )
    if isinstance(cache, xlstm.MatrixMemoryCache):
        cache.read_as = model.get_input_embeddings().weight.dtype
    return {"cache": cache, "use_cache": True}


def require_state(model: nn.Module, cache: Cache) -> None:
    """Raise `InputError`, naming the layer, if a pass over tokens left a part of the model's state out of `cache`.

    A model may take a cache and keep its state elsewhere; what is not in the cache would be missing from the prompt.
    """
    held = [_holds_a_tensor(layer) for layer in cache.layers]
    forgotten = [
        number
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin) and not held[number]
    ]
    if any(held) and not forgotten:
        return
    where = f"the recurrent state of layer {forgotten[0]}" if forgotten else "any state"
    raise InputError(
        f"{type(model).__name__} does not leave {where} in its cache, so no response can continue from its prompt: "
        "train it with full autograd"
    )


def _holds_a_tensor(layer: Any) -> bool:
    fields = [*vars(layer).values()]
    inner = [value for field in fields if isinstance(field, dict) for value in field.values()]
    return any(
        isinstance(value, Tensor) and value.is_floating_point() and value.numel()
        for value in (*fields, *inner)
    )
