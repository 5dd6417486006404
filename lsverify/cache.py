"""Caches as values: continuing from a cache never changes the state it started from.

The library's cache layers for attention concatenate, so they already behave as values. Its linear-attention layers
write in place, which cuts gradients and lets one sibling's tokens leak into the next. `new_cache` mends these, and
`map_state` copies a whole cache while mapping a function over every tensor it holds: clone, detach and leaf are
one line each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache as memoize
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from lsverify.continuation.carriers import empty_cache

KINDS = ("attention", "sliding", "latent", "index", "conv", "recurrent")


@dataclass(frozen=True)
class Slot:
    """Where a tensor of the state lives: its path in the cache, its layer (None: the whole model's), its kind."""

    path: str
    layer: int | None
    kind: str


@dataclass(frozen=True)
class Prefix:
    """Stands for the first `length` entries along `dim` of the tensor at the same path in a later state."""

    dim: int
    length: int

    def of(self, later: Tensor) -> Tensor:
        return later.narrow(self.dim, 0, self.length)


class _FreshOnRead(dict[int, Tensor | None]):
    """Hands out a fresh copy on every read and keeps that copy as the state.

    Decode kernels write their new state into the tensor they were handed. The write then lands in a copy that
    belongs to this continuation alone, with its history: it is differentiable and cannot reach the snapshot.
    """

    def __getitem__(self, index: int) -> Tensor | None:
        value = super().__getitem__(index)
        if isinstance(value, Tensor):
            value = value.clone()
            self[index] = value
        return value


class _Assigning(LinearAttentionLayer):
    """A linear-attention layer that assigns its new states where the library copies into the old ones."""

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        width = conv_kernel_size or self.conv_kernel_size[state_idx] or conv_states.shape[-1]
        if self.has_previous_state[state_idx]:
            full = torch.cat([self.conv_states[state_idx], conv_states], dim=-1)
        else:
            full = conv_states
            self.dtype, self.device = full.dtype, full.device
        missing = max(width - full.shape[-1], 0)
        self.conv_states[state_idx] = torch.nn.functional.pad(full, (missing, 0))[..., -width:]
        self.conv_kernel_size[state_idx] = width
        self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


@memoize
def _assigning(layer_class: type) -> type:
    return type(f"Assigning{layer_class.__name__}", (_Assigning, layer_class), {})


def new_cache(config: Any) -> Cache:
    """An empty cache for a model of this config; every layer of it is functional."""
    cache = empty_cache(config)
    latent = getattr(config.get_text_config(decoder=True), "kv_lora_rank", None) is not None
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, LinearAttentionLayer):
            library_class: type = type(layer)
            layer.__class__ = _assigning(library_class)
            layer.conv_states = _FreshOnRead(layer.conv_states)
            layer.recurrent_states = _FreshOnRead(layer.recurrent_states)
        elif latent:
            layer.holds_latents = True
    return cache


def map_state(cache: Cache, change: Callable[[Slot, Any], Any]) -> Cache:
    """A copy of the cache in which `change(slot, tensor)` stands for every tensor (or `Prefix`) it holds.

    Layer objects and containers are copied, so neither cache sees what the other goes on to do.
    """
    return _mapped(cache, "", None, None, change)


def state_of(cache: Cache) -> dict[Slot, Tensor]:
    """Every floating-point tensor of the state, by slot, in the order of the layers."""
    found: dict[Slot, Tensor] = {}

    def note(slot: Slot, tensor: Any) -> Any:
        if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
            found[slot] = tensor
        return tensor

    map_state(cache, note)
    return found


def by_path(cache: Cache) -> dict[str, Tensor]:
    """The same tensors by the path of their slot."""
    return {slot.path: tensor for slot, tensor in state_of(cache).items()}


def compact(cache: Cache) -> Cache:
    """The same state in tensors of their own size: a window that is a view keeps alive all that it was cut from."""

    def own(_: Slot, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor

    return map_state(cache, own)


def leaves_of(
    cache: Cache, chosen: Callable[[int | None, str], bool] = lambda layer, kind: True
) -> dict[str, Tensor]:
    """Leaf copies of the differentiable tensors of the state, by path; their `.grad` collects d loss / d z.

    `chosen(layer, kind)` says of which. An indexer's keys are left out: they choose positions and carry no gradient.
    """
    return {
        slot.path: tensor.detach().requires_grad_()
        for slot, tensor in state_of(cache).items()
        if slot.kind != "index" and chosen(slot.layer, slot.kind)
    }


def with_leaves(cache: Cache, leaves: Mapping[str, Tensor]) -> Cache:
    """A copy of the cache in which `leaves` stand for the tensors at their paths."""
    return map_state(cache, lambda slot, tensor: leaves.get(slot.path, tensor))


def _mapped(value: Any, path: str, layer: Any, index: int | None, change: Any) -> Any:
    if isinstance(value, Tensor | Prefix):
        return change(Slot(path, index, _kind(layer, path.rpartition("layers.")[2])), value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            dict.__setitem__(copied, key, _mapped(item, f"{path}.{key}", layer, index, change))
        return copied
    if isinstance(value, list | tuple):
        return type(value)(
            _mapped(item, f"{path}.{number}", *_place(item, layer, index, number), change)
            for number, item in enumerate(value)
        )
    if isinstance(value, Cache) or _is_layer(value):
        copied = copy.copy(value)
        for name, item in vars(value).items():
            where = f"{path}.{name}" if path else name
            copied.__dict__[name] = _mapped(item, where, layer, index, change)
        return copied
    return value


def _is_layer(value: Any) -> bool:
    return isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer)


def _place(item: Any, layer: Any, index: int | None, number: int) -> tuple[Any, int | None]:
    return (item, number) if index is None and _is_layer(item) else (layer, index)


def _kind(layer: Any, field: str) -> str:
    if "indexer" in field:
        return "index"
    if "conv_states" in field:
        return "conv"
    if "recurrent_states" in field:
        return "recurrent"
    if isinstance(layer, DynamicIndexedLayer) or getattr(layer, "holds_latents", False):
        return "latent"
    return "sliding" if getattr(layer, "is_sliding", False) else "attention"


def prefix_or_tensor(earlier: Tensor, later: Tensor | None) -> Prefix | Tensor:
    """How to keep `earlier`: by its length when `later` merely grew from it along one axis, else itself."""
    if later is None or earlier.dim() != later.dim():
        return earlier
    grown = [d for d in range(earlier.dim()) if earlier.shape[d] != later.shape[d]]
    if len(grown) != 1 or earlier.shape[grown[0]] > later.shape[grown[0]]:
        return earlier
    prefix = Prefix(grown[0], earlier.shape[grown[0]])
    return prefix if torch.equal(prefix.of(later), earlier) else earlier
