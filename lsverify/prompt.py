"""The shared prompt: captured once without autograd, tagged, refused when it no longer fits.

`capture` runs the prompt's first B tokens in chunks and keeps the boundary state, plus each chunk's incoming state
as far back as a sweep will go. `PromptState.branch` hands a response its own leaf copy of the boundary state;
`PromptState.check` raises `StalePromptState` when weights, adapter, tokens or boundary have moved on.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import Prefix, Slot, map_state, new_cache, prefix_or_tensor, state_of
from lsverify.decisions import DecisionDigest
from lsverify.errors import InputError, StalePromptState


def continue_from(
    model: nn.Module, tokens: Tensor, cache: Cache, start: int, keep: int
) -> tuple[Tensor, Cache]:
    """Continue a sequence from a state: the one primitive that capture, replay and sweep share.

    tokens [T] int64 are the next tokens, the first of them at position `start`. Returns the logits of the last
    `keep` tokens, [keep, V], and the cache, which now holds the state after all T tokens.
    """
    positions = torch.arange(start, start + len(tokens), device=tokens.device)
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        cache=cache,
        use_cache=True,
        **keep_logits(model, keep),
    )
    return output.logits[0, -keep:], cache


def keep_logits(model: nn.Module, keep: int) -> dict[str, int]:
    """The argument that spares logits nobody reads, where the model's forward has it."""
    known = "logits_to_keep" in inspect.signature(unwrapped(model).forward).parameters
    return {"logits_to_keep": keep} if known else {}


def unwrapped(model: nn.Module) -> Any:
    """The causal language model inside an adapter wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What a captured state was computed from. `tokens` is a content hash; lengths are in tokens."""

    weights: str
    adapter: str
    tokens: str
    prompt_length: int
    boundary: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Captured tokens [start, end): what is needed to run them once more and to check that it came out the same."""

    start: int
    tokens: Tensor
    shell: Cache
    decisions: str

    def incoming(self, outgoing: dict[str, Tensor]) -> Cache:
        """The state before this chunk, cut from the state after it where it merely grew."""
        return map_state(
            self.shell, lambda slot, kept: kept.of(outgoing[slot.path]) if isinstance(kept, Prefix) else kept
        )


@dataclass(frozen=True, kw_only=True)
class InventoryRow:
    """One tensor of a prompt's state; `bytes` counts its elements, whether or not storage is shared."""

    layer: int | None
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PromptState:
    """The state of x[1..B] without a graph, with the chunks that a sweep will recompute (last one last)."""

    tags: Tags
    cache: Cache
    chunks: tuple[Chunk, ...]

    @cached_property
    def tensors(self) -> dict[Slot, Tensor]:
        return state_of(self.cache)

    def branch(self, leaves: dict[str, Tensor]) -> Cache:
        """A response's own copy of the boundary state, in which `leaves` stand for the tensors at their paths."""
        return map_state(self.cache, lambda slot, tensor: leaves.get(slot.path, tensor))

    def leaves(self) -> dict[str, Tensor]:
        """Leaf copies of every differentiable tensor of the state; their `.grad` collects d loss / d z.

        An indexer's keys are left out: they choose positions and carry no gradient.
        """
        return {
            slot.path: tensor.detach().requires_grad_()
            for slot, tensor in self.tensors.items()
            if slot.kind != "index"
        }

    def check(self, model: nn.Module, prompt: Tensor, boundary: int) -> None:
        """Raise `StalePromptState`, naming what changed, unless this state belongs to just this use."""
        now, then = asdict(tags_of(model, prompt, boundary)), asdict(self.tags)
        moved = [f"{name} was {then[name]} and is {now[name]}" for name in then if then[name] != now[name]]
        if moved:
            raise StalePromptState(f"prompt state does not fit: {'; '.join(moved)}; capture again")

    def inventory(self) -> list[InventoryRow]:
        """Every tensor of the state by layer and kind; sizes come from shapes."""
        return [
            InventoryRow(
                layer=slot.layer,
                kind=slot.kind,
                name=slot.path,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                bytes=tensor.numel() * tensor.element_size(),
            )
            for slot, tensor in self.tensors.items()
        ]


@torch.no_grad()
def capture(
    model: nn.Module, prompt: Tensor, *, boundary: int, chunk: int, keep_from: int
) -> PromptState:
    """Evaluate prompt[:boundary] without autograd, `chunk` tokens at a time.

    prompt [P] int64. Incoming states are kept for the chunks that begin at `keep_from` or later, and one chunk begins
    exactly there (`keep_from = boundary` keeps none). Raises `InputError` for a chunk below 1.
    """
    if chunk < 1:
        raise InputError(f"chunk {chunk} is not allowed: use 1 or more tokens")
    cache = new_cache(unwrapped(model).config)
    chunks: list[Chunk] = []
    for start, end in _pieces(boundary, chunk, keep_from):
        before = map_state(cache, lambda _, tensor: tensor)
        with DecisionDigest() as decisions:
            continue_from(model, prompt[start:end], cache, start, keep=1)
        if start >= keep_from:
            after = {slot.path: tensor for slot, tensor in state_of(cache).items()}
            shell = map_state(before, lambda slot, t, after=after: prefix_or_tensor(t, after.get(slot.path)))
            chunks.append(
                Chunk(
                    start=start, tokens=prompt[start:end], shell=shell, decisions=decisions.hexdigest()
                )
            )
    return PromptState(tags=tags_of(model, prompt, boundary), cache=cache, chunks=tuple(chunks))


def _pieces(boundary: int, chunk: int, cut: int) -> Iterator[tuple[int, int]]:
    """Consecutive [start, end) that cover [0, boundary), at most `chunk` long, one of them starting at `cut`."""
    start = 0
    while start < boundary:
        end = min(start + chunk, boundary)
        end = cut if start < cut < end else end
        yield start, end
        start = end


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
    layers = [m for m in model.modules() if hasattr(m, "active_adapters") and hasattr(m, "disable_adapters")]
    if not layers:
        return "none"
    if all(layer.disable_adapters for layer in layers):
        return "off"
    return "+".join(sorted({name for layer in layers for name in layer.active_adapters}))


def token_hash(tokens: Tensor) -> str:
    """sha256 over the token ids (first 12 hex digits)."""
    ids: Sequence[int] = tokens.tolist()
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:12]
