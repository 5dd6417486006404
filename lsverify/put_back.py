"""What a path may leave changed beside weights, put back: modules, configs, switches, random state, functions.

`untouched` notes what a step changed. References are computed after the step in the same process: with the path's
changes still in place the two would agree, and so would whatever is judged next.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class PutBack:
    """A snapshot of `model`'s modules and configs, of torch's switches, and of the functions that models are made of.

    `noted()` says what of the configs and functions has changed, one line each; modules, switches and random state are
    for `Untouched` to note. `put_back()` restores it all. Values of tensors are not part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs = dict(_configs_of(model))
        holders = [*model.modules(), *self._configs.values()]
        self._attributes = [(holder, dict(vars(holder))) for holder in holders]
        every = [value for _, held in self._attributes for value in held.values()]
        every += [value for name, value in vars(nn.modules.module).items() if "_global_" in name]
        self._contents = [(v, _content(v)) for v in every if isinstance(v, dict | list | set)]
        self._described = {name: dict(_described(config)) for name, config in self._configs.items()}
        self._trainable = [(p, p.requires_grad) for p in model.parameters()]
        self._hooks = [(p, name, _hooks_of(p, name)) for p, _ in self._trainable for name in HOOKS]
        self._code = [(name, owner, dict(_callables(owner))) for name, owner in _code_of(model)]
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def noted(self) -> list[str]:
        """Config values that differ, and functions or classes that something else has taken the place of."""
        changes = [
            f"{name}.{key} was {before.get(key, 'absent')} and is {now.get(key, 'absent')}"
            for name, before in self._described.items()
            for now in [dict(_described(self._configs[name]))]
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        changes += [
            f"{owner_name}.{name} was replaced"
            for owner_name, owner, before in self._code
            for name, value in before.items()
            if vars(owner).get(name) is not value
        ]
        return changes

    def put_back(self) -> None:
        """Restore what the snapshot holds; containers stay the same objects."""
        for holder, held in self._attributes:
            vars(holder).clear()
            vars(holder).update(held)
        for value, content in self._contents:
            if _identities(_content(value)) != _identities(content):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)
        for parameter, trainable in self._trainable:
            parameter.requires_grad_(trainable)
        for parameter, name, hooks in self._hooks:
            if _hooks_of(parameter, name) != hooks:
                getattr(parameter, name).clear()
                getattr(parameter, name).update(hooks)
        for _, owner, before in self._code:
            for name, value in before.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        torch.use_deterministic_algorithms(self._deterministic)
        torch_state, python_state, numpy_state = self._random
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _hooks_of(parameter: Tensor, name: str) -> dict[int, Any]:
    return dict(getattr(parameter, name, None) or {})


def _content(value: Any) -> list[Any]:
    return [*value.items()] if isinstance(value, dict) else [*value]


def _identities(content: list[Any]) -> list[Any]:
    """Tensors are no good for `==`; the same objects are the same content."""
    return [tuple(map(id, each)) if type(each) is tuple else id(each) for each in content]


def _configs_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The configs that modules hold, and those inside of them, once each."""
    seen: set[int] = set()
    waiting = [("config", getattr(m, "config", None)) for m in model.modules()]
    while waiting:
        name, config = waiting.pop(0)
        if hasattr(config, "to_dict") and id(config) not in seen:
            seen.add(id(config))
            yield name if len(seen) == 1 else f"{name} ({len(seen)})", config
            waiting += [(f"{name}.{key}", value) for key, value in vars(config).items()]


def _described(config: Any) -> Iterator[tuple[str, str]]:
    return ((key, repr(v)) for key, v in vars(config).items() if not hasattr(v, "to_dict"))


def _code_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Where the functions of a forward pass live: torch, and the model's classes with the modules that define them."""
    yield "torch", torch
    yield "torch.nn.functional", torch.nn.functional
    yield "torch.Tensor", torch.Tensor
    classes = dict.fromkeys(c for m in model.modules() for c in type(m).__mro__ if c is not object)
    for found in classes:
        yield f"{found.__module__}.{found.__qualname__}", found
    for name in dict.fromkeys(found.__module__ for found in classes):
        if name in sys.modules:
            yield name, sys.modules[name]


def _callables(owner: Any) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        if callable(value) or isinstance(value, staticmethod | classmethod | property):
            yield name, value
