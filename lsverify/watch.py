"""A step watched from outside: which tokens were forwarded, and when gradients ran back.

Nothing here asks the path under test what it did. Counts come from hooks on the input embedding, on the modules
that lead to it and on the decoder layers; backward passes from gradients as they arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lsverify.errors import InputError

Source = Literal["ids", "embeds", "lookup"]


@dataclass(kw_only=True)
class Forward:
    """Tokens that entered the model in one call.

    `source` says how: "ids" (the backbone looked them up), "embeds" (the backbone was given `inputs_embeds`) or
    "lookup" (the embedding was called outside the backbone, by a caller that drives the layers itself).
    """

    tokens: int  # b * T, padding included
    padding: int  # of these, hidden by a two-dimensional attention mask
    shape: tuple[int, ...]  # [b, T]
    grad_enabled: bool
    source: Source
    input_ids: Tensor | None = None  # [b, T], a copy
    position_ids: Tensor | None = None  # as passed, a copy; None when left to the model
    attention_mask: Tensor | None = None  # [b, past + T], a copy; None if not two-dimensional


@dataclass(kw_only=True)
class Backward:
    """One pass of the autograd engine.

    `forwards`: places in `Watch.events` of the forwards whose graph it entered. `accumulated`: parameters that it
    added a gradient to; 0 for a pass that returns its gradients instead.
    """

    forwards: set[int] = field(default_factory=set)
    accumulated: int = 0


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens forwarded: `total = no_grad + grad`; `padding` is the part of `total` that a mask hides."""

    total: int = 0
    no_grad: int = 0
    grad: int = 0
    padding: int = 0

    def plus(self, tokens: int, *, grad_enabled: bool, padding: int = 0) -> Tokens:
        """These and `tokens` more."""
        return Tokens(
            total=self.total + tokens,
            no_grad=self.no_grad + (0 if grad_enabled else tokens),
            grad=self.grad + (tokens if grad_enabled else 0),
            padding=self.padding + padding,
        )


class Watch:
    """Records every forward and backward of `model`, in order, while the context is open.

    model: a causal language model of transformers, plain or wrapped by peft, or any module with an embedding.
    `events` is the record and `tokens()` its sum. `layer_tokens` counts what each decoder layer saw: layers driven
    by hand and recomputation inside a checkpoint show there and not in `events`.

    `on_forward` is called with each forward as it begins, inside of everything else that runs.
    Not seen: a backward pass that crosses no layer boundary and accumulates into no parameter, and layers inside of
    compiled code, which would be compiled anew for each count.
    Raises InputError for a model without an input embedding.
    """

    def __init__(
        self, model: nn.Module, *, on_forward: Callable[[Forward], None] | None = None
    ) -> None:
        self.events: list[Forward | Backward] = []
        self.layer_tokens: dict[str, Tokens] = {}
        self._model = model
        self._on_forward = on_forward
        self._embedding, self._parents = way_to_embedding(model)
        self._calls: list[tuple[nn.Module, dict[str, Any]]] = []
        self._passes: dict[int, Backward] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        keep = self._handles.append
        for parent in self._parents:
            keep(parent.register_forward_pre_hook(self._enter, with_kwargs=True))
            keep(parent.register_forward_hook(self._leave, always_call=True))
        keep(self._embedding.register_forward_pre_hook(self._look_up, with_kwargs=True))
        keep(self._embedding.register_forward_hook(self._watch_output))
        for name, layer in decoder_layers(self._parents[-1]):
            self.layer_tokens[name] = Tokens()
            # Its first child, because a checkpoint recomputes a layer without calling the layer's own hooks.
            first = next(layer.children(), layer)
            keep(first.register_forward_pre_hook(partial(self._count, name), with_kwargs=True))
            keep(layer.register_forward_hook(self._watch_output))
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                keep(parameter.register_post_accumulate_grad_hook(self._accumulated))
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Watch:
        """A copy of a watched model is watched too."""
        return self

    def __exit__(self, *exception: object) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._calls.clear()
        self._passes.clear()

    @property
    def forwards(self) -> list[Forward]:
        """The forwards, in order."""
        return [event for event in self.events if isinstance(event, Forward)]

    @property
    def backwards(self) -> list[Backward]:
        """The backward passes, in order of their first gradient."""
        return [event for event in self.events if isinstance(event, Backward)]

    def tokens(self) -> Tokens:
        """Tokens forwarded, over all forwards."""
        count = Tokens()
        for event in self.forwards:
            count = count.plus(event.tokens, grad_enabled=event.grad_enabled, padding=event.padding)
        return count

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append((module, arguments_by_name(module, args, kwargs)))
        embeds = self._argument("inputs_embeds")
        if module is self._parents[-1] and isinstance(embeds, Tensor):
            event = self._forward(tuple(embeds.shape[:-1]), "embeds")
            last = self.events[-1] if self.events else None
            if isinstance(last, Forward) and last.source == "lookup" and last.shape == event.shape:
                # These embeddings are what that lookup returned: the tokens are not counted twice.
                event.input_ids = last.input_ids
                self.events.pop()
            self._record(event)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._calls.pop()
        self._watch_output(module, args, output)

    def _look_up(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else next(iter(kwargs.values()))
        inside = bool(self._calls) and self._calls[-1][0] is self._parents[-1]
        event = self._forward(tuple(ids.shape), "ids" if inside else "lookup")
        event.input_ids = _copy(ids)
        self._record(event)

    def _record(self, event: Forward) -> None:
        self.events.append(event)
        if self._on_forward is not None:
            self._on_forward(event)

    def _forward(self, shape: tuple[int, ...], source: Source) -> Forward:
        mask, position_ids = self._argument("attention_mask"), self._argument("position_ids")
        plain = isinstance(mask, Tensor) and mask.dim() == 2
        return Forward(
            tokens=prod(shape),
            padding=int((mask[:, -shape[-1] :] == 0).sum()) if plain else 0,
            shape=shape,
            grad_enabled=torch.is_grad_enabled(),
            source=source,
            position_ids=_copy(position_ids) if isinstance(position_ids, Tensor) else None,
            attention_mask=_copy(mask) if plain else None,
        )

    def _argument(self, name: str) -> Any:
        """What the innermost open call that was given `name` was given."""
        given = (arguments.get(name) for _, arguments in reversed(self._calls))
        return next((value for value in given if value is not None), None)

    def _count(
        self, layer: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if torch.compiler.is_compiling():
            return
        hidden = next(_tensors([*args, kwargs.get("hidden_states"), kwargs]), None)
        if hidden is not None:
            self.layer_tokens[layer] = self.layer_tokens[layer].plus(
                hidden.shape[:-1].numel(), grad_enabled=torch.is_grad_enabled()
            )

    def _watch_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _running_pass() is not None:
            return  # a recomputation: the outputs of the first forward are watched already
        place = len(self.events) - 1
        while place >= 0 and not isinstance(self.events[place], Forward):
            place -= 1
        for tensor in _tensors(output) if place >= 0 else ():
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(partial(self._gradient_arrives, place)))

    def _gradient_arrives(self, place: int, gradient: Tensor) -> None:
        self._current_pass().forwards.add(place)

    def _accumulated(self, parameter: Tensor) -> None:
        self._current_pass().accumulated += 1

    def _current_pass(self) -> Backward:
        running = _running_pass()
        assert running is not None
        if running not in self._passes:
            self._passes[running] = Backward()
            self.events.append(self._passes[running])
        return self._passes[running]


def way_to_embedding(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The input embedding and the modules that contain it, outermost first."""
    find = getattr(model, "get_input_embeddings", None)
    embedding = find() if callable(find) else None
    for name, module in model.named_modules():
        if module is embedding if embedding is not None else isinstance(module, nn.Embedding):
            parts = name.split(".")[:-1]
            return module, [
                model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) + 1)
            ]
    raise InputError(
        f"{type(model).__name__} has no input embedding to count tokens at: "
        "define get_input_embeddings() or contain an nn.Embedding"
    )


def decoder_layers(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The longest list of modules directly on the backbone, by name."""
    lists = [
        (name, child)
        for name, child in backbone.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    name, layers = max(lists, key=lambda item: len(item[1]), default=("", nn.ModuleList()))
    for index, layer in enumerate(layers):
        yield f"{name}.{index}", layer


def arguments_by_name(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    positional = dict(zip(signature(module.forward).parameters, args, strict=False)) if args else {}
    return {**positional, **kwargs}


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of a module's output; caches and other objects are not entered."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)


def _copy(tensor: Tensor) -> Tensor:
    with _disable_current_modes():  # a memory tracker open at the same time does not count the copy
        return tensor.detach().to("cpu", copy=True)


def _running_pass() -> int | None:
    """A number for the pass that the autograd engine is in, None outside of one."""
    running = torch._C._current_graph_task_id()
    return None if running == -1 else running
