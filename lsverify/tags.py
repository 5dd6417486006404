"""What a captured state was computed from: weights, adapter, tokens and lengths, cheap to compute and to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What a captured state was computed from. `tokens` is a content hash; lengths are in tokens."""

    weights: str
    adapter: str
    tokens: str
    prompt_length: int
    boundary: int


def tags_of(model: nn.Module, prompt: Tensor, boundary: int) -> Tags:
    return Tags(
        weights=weights_version(model),
        adapter=adapter_of(model),
        tokens=token_hash(prompt[:boundary]),
        prompt_length=len(prompt),
        boundary=boundary,
    )


@torch.no_grad()
def weights_version(model: nn.Module) -> str:
    """A digest of the content of every parameter and buffer: any update changes it, however it was written."""
    digest = hashlib.sha256()
    for name, tensor in _weights(model):
        digest.update(f"{name}:{torch.hash_tensor(tensor.detach()).item()};".encode())
    return digest.hexdigest()[:12]


def _weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def adapter_of(model: nn.Module) -> str:
    """Which adapters a forward pass would use now: their names, `off`, or `none` for a model without any."""
    # A model has methods of the same names; only an adapter's layer has the states themselves.
    layers: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "disable_adapters", None), bool)
    ]
    if not layers:
        return "none"
    if all(layer.disable_adapters for layer in layers):
        return "off"
    return "+".join(sorted({name for layer in layers for name in layer.active_adapters}))


def token_hash(tokens: Tensor) -> str:
    """sha256 over the token ids (first 12 hex digits)."""
    return hashlib.sha256(",".join(map(str, tokens.tolist())).encode()).hexdigest()[:12]
