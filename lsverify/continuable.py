"""Whether a model can be continued from a state at all: tried on a short sequence, before anything is judged.

A path that shares a prompt needs a causal model that keeps its state in the cache it is given and goes on from there
as if it had seen the prompt. `require_continuable` tries just that, at oracle precision, and says in one line where a
model fails: the argument its forward pass has not, or the layer and the kind of state that differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.cache import by_path, leaves_of, state_of, with_leaves
from lsverify.errors import InputError
from lsverify.pretrained import dropouts
from lsverify.prompt import capture, continue_from, keep_logits

LENGTH, BOUNDARY, CHUNK = 23, 17, 6
# In float64 under promotion the same values come out of another length to a few 1e-15.
LIMIT = 1e-10
Values = dict[str, Tensor]


def require_continuable(model: nn.Module, *, name: str, vocabulary: int) -> None:
    """Try to continue `model` from a state. Raises `InputError`, one line that begins with `name`, where it fails.

    The model should be at oracle precision, inside `lsverify.precision.computing`; parameters keep no gradient.
    """
    tokens = torch.randint(vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(0))
    _refuse_dropout(model, name)
    with torch.no_grad():
        whole = _uncached(model, tokens, name)
        before = torch.get_rng_state()
        _uncached(model, tokens, name)  # some build modules in their first pass
        if not torch.equal(before, torch.get_rng_state()):
            raise InputError(
                f"{name}: its forward pass draws random numbers, which responses that share a prompt cannot have each "
                "for itself; train it with full autograd"
            )
        _refuse_what_sees_ahead(model, tokens, whole, name)
        for chunk in (CHUNK, 1):
            _refuse_wrong_continuation(model, tokens, whole, chunk, name)
    _refuse_cut_graph(model, tokens, name)


def _refuse_dropout(model: Any, name: str) -> None:
    left = dropouts(model.config, model)
    if left:
        first, rate = next(iter(left.items()))
        raise InputError(
            f"{name}: {first}={rate:g} stays at its default; one shared prompt cannot have dropout"
        )


def _uncached(model: nn.Module, tokens: Tensor, name: str) -> Values:
    """Every decoder layer's values [T, H], and `logits` [T, V], of one uncached pass."""
    try:
        found = _values(model, tokens[None])
    except Exception as error:
        raise InputError(f"{name}: a plain forward pass fails: {_said(error)}") from error
    logits = found.get("logits")
    if logits is None or logits.shape[0] != len(tokens) or logits.dim() != 2:
        shape = None if logits is None else tuple(logits.shape)
        raise InputError(
            f"{name}: its forward pass returns logits of shape {shape} for {len(tokens)} tokens, not one row each"
        )
    if not all(bool(value.isfinite().all()) for value in found.values()):
        first = next(layer for layer, value in found.items() if not bool(value.isfinite().all()))
        raise InputError(f"{name}: {first} gives values that are not finite")
    return found


def _refuse_what_sees_ahead(model: nn.Module, tokens: Tensor, whole: Values, name: str) -> None:
    """Hold the prompt's values to those before another response, and to those of the prompt alone."""
    other = tokens.clone()
    other[BOUNDARY:] = tokens[BOUNDARY:].flip(0).roll(1)
    for text, why in (
        (other, "it is not causal: {} changes at the first {} tokens with what follows them"),
        (
            tokens[:BOUNDARY],
            "{} changes at the first {} tokens with the number that follow (ties in a choice, or a table for the "
            "total length)",
        ),
    ):
        for layer, value in _uncached(model, text, name).items():
            if not _close(value[:BOUNDARY], whole[layer][:BOUNDARY]):
                raise InputError(
                    f"{name}: {why.format(layer, BOUNDARY)}, so responses cannot share a prompt; train it with full "
                    "autograd"
                )


def _refuse_wrong_continuation(
    model: nn.Module, tokens: Tensor, whole: Values, chunk: int, name: str
) -> None:
    """Capture a prompt in chunks and go on, by several tokens and by one, watching every layer."""
    steps = f"after {BOUNDARY} tokens taken {chunk} at a time"
    try:
        state = capture(model, tokens, boundary=BOUNDARY, chunk=chunk, keep_from=BOUNDARY)
    except Exception as error:
        raise InputError(
            f"{name}: a prompt cannot be captured {chunk} tokens at a time: {_said(error)}"
        ) from error
    if not state_of(state.cache):
        takes = "cache" in signature(model.forward).parameters
        raise InputError(
            f"{name}: it keeps no state in the cache it is given"
            f"{'' if takes else ' (its forward pass has no argument `cache`)'}, so nothing can be continued"
        )
    for end in (LENGTH, BOUNDARY + 1):
        try:
            with _layer_values(model) as found:
                logits, _ = continue_from(
                    model, tokens[BOUNDARY:end], state.branch({}), BOUNDARY, end - BOUNDARY
                )
        except Exception as error:
            raise InputError(
                f"{name}: it cannot be continued by {end - BOUNDARY} tokens {steps}: {_said(error)}"
            ) from error
        _compare(found | {"logits": logits}, whole, state.cache, end, f"{name}: {steps}")


def _compare(found: Values, whole: Values, cache: Any, end: int, what: str) -> None:
    for layer, value in found.items():
        if layer not in whole:
            continue
        expected = whole[layer][BOUNDARY:end]
        if value.shape != expected.shape or not _close(value, expected):
            number = layer.rpartition(".")[2]
            kinds = sorted({slot.kind for slot in state_of(cache) if str(slot.layer) == number})
            error = (
                f"by {float((value - expected).norm() / expected.norm()):.1e}"
                if value.shape == expected.shape
                else f"in shape, {tuple(value.shape)}"
            )
            state = f" (state: {', '.join(kinds)})" if kinds else ""
            raise InputError(
                f"{what}, {end - BOUNDARY} more differ {error} from an uncached pass, first in {layer}{state}: "
                "the library does not continue this type from a state; train it with full autograd"
            )


def _refuse_cut_graph(model: nn.Module, tokens: Tensor, name: str) -> None:
    """Run a branch backward: the state must receive a gradient, and nothing may have been overwritten."""
    state = capture(model, tokens, boundary=BOUNDARY, chunk=CHUNK, keep_from=BOUNDARY)
    leaves = leaves_of(state.cache)
    before = {path: tensor.clone() for path, tensor in by_path(state.cache).items()}
    try:
        for end in (LENGTH, BOUNDARY + 1):
            logits, _ = continue_from(
                model,
                tokens[BOUNDARY:end],
                with_leaves(state.cache, leaves),
                BOUNDARY,
                end - BOUNDARY,
            )
            logits.square().sum().backward()
    except Exception as error:
        raise InputError(
            f"{name}: no gradient comes back through the state: {_said(error)}"
        ) from error
    finally:
        model.zero_grad(set_to_none=True)
    for path, tensor in by_path(state.cache).items():
        if not torch.equal(tensor, before[path]):
            raise InputError(
                f"{name}: a branch overwrites {path} of the prompt's state, which its siblings share"
            )
    if all(leaf.grad is None for leaf in leaves.values()):
        raise InputError(f"{name}: no gradient comes back through the state it is continued from")


@contextmanager
def _layer_values(model: nn.Module) -> Iterator[Values]:
    """Collects every decoder layer's output [T, H], by name, of the passes inside the context."""
    found: Values = {}

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        # Some models carry several streams, in front of the batch: then only the logits are compared.
        if isinstance(hidden, Tensor) and hidden.dim() > 2 and hidden.shape[0] == 1:
            found[name] = hidden.detach()[0]

    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in _layers(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The decoder layers, by name: the longest list of modules among the outermost."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    name, layers = min(
        lists, key=lambda item: (item[0].count("."), -len(item[1])), default=("", nn.ModuleList())
    )
    return [(f"{name}.{index}", layer) for index, layer in enumerate(layers)]


def _values(model: nn.Module, tokens: Tensor) -> Values:
    positions = torch.arange(tokens.shape[1])[None]
    with _layer_values(model) as found:
        output = model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            **keep_logits(model, tokens.shape[1]),
        )
    found = {n: value for n, value in found.items() if len(value) == tokens.shape[1]}
    logits = getattr(output, "logits", None)
    return found | ({"logits": logits[0]} if isinstance(logits, Tensor) else {})


def _close(value: Tensor, expected: Tensor) -> bool:
    return bool((value - expected).norm() <= LIMIT * expected.norm())


def _said(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0][:200]}"
