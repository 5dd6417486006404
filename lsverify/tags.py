"""What a captured state was computed from: weights, adapter, tokens and lengths, cheap to compute and to compare."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.spans import Spans

# Elements from which on starting threads costs less than they save.
BIG = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What a captured state was computed from. `tokens` is a content hash, of spans too; lengths are in tokens."""

    weights: str
    adapter: str
    tokens: str
    prompt_length: int
    boundary: int


def tags_of(model: nn.Module, prompt: Tensor, boundary: int, spans: Spans = ()) -> Tags:
    return Tags(
        weights=weights_version(model),
        adapter=adapter_of(model),
        tokens=token_hash(prompt[:boundary], tuple(s for s in spans if s[0] < boundary)),
        prompt_length=len(prompt),
        boundary=boundary,
    )


@torch.no_grad()
def weights_version(model: nn.Module) -> str:
    """A digest of the content of every parameter and buffer: any update changes it, however it was written."""
    digest = hashlib.sha256()
    names, tensors = zip(*_weights(model), strict=True)
    for name, checksum in zip(names, _fingerprints(tensors), strict=True):
        digest.update(f"{name}:{checksum};".encode())
    return digest.hexdigest()[:12]


def _fingerprints(tensors: Sequence[Tensor]) -> Sequence[int]:
    """On big models by threads: a checksum waits for memory and lets others run, so half the time is gone."""
    if sum(tensor.numel() for tensor in tensors) < BIG:
        return [fingerprint(tensor) for tensor in tensors]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(fingerprint, tensors))


def fingerprint(tensor: Tensor) -> int:
    """A checksum of a tensor's bytes in their order; a contiguous tensor on the CPU is read in place.

    Not `torch.hash_tensor`, which combines elements by xor: it is blind to their order and to two equal changes.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


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
    on = [layer for layer in layers if not layer.disable_adapters]
    if not on:
        return "off"
    names = "+".join(sorted({name for layer in on for name in layer.active_adapters}))
    return names if len(on) == len(layers) else f"{names} in {len(on)} of {len(layers)} layers"


def token_hash(tokens: Tensor, spans: Spans = ()) -> str:
    """sha256 over the token ids, and the spans where there are any (first 12 hex digits)."""
    marked = f";{spans}" if spans else ""
    return hashlib.sha256((",".join(map(str, tokens.tolist())) + marked).encode()).hexdigest()[:12]
