"""A library mixer's own forward, with another function under a name that it calls.

A mixer's projections, norms, splits and layouts are right as they are; one function it calls is not. Putting another
in that one place keeps everything else the library's own, adapters on its linear layers included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

# The functions for one token in the library's convolutions and delta nets.
_DECODE_STEPS = (
    "causal_conv1d_update",
    "torch_recurrent_gated_delta_rule",
    "recurrent_kimi_delta_attention",
)


def calls(module: nn.Module, name: str) -> bool:
    """Whether the module's library forward calls a function by this name."""
    return _calls(type(module).forward, name)


@cache
def _calls(forward: Callable[..., Any], name: str) -> bool:
    forward = inspect.unwrap(forward)
    return (
        isinstance(forward, FunctionType)
        and name in forward.__code__.co_names
        and name in forward.__globals__
    )


def function(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that the module's forward finds under `name`."""
    found: Callable[..., Any] = inspect.unwrap(type(module).forward).__globals__[name]
    return found


def references(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """The library's plain versions of the decode steps that the module's forward calls.

    Where the packages are installed the library puts fused kernels in their place, and those have no backward pass: a
    branch of one token would lose its gradient.
    """
    return {
        name: inspect.unwrap(function(module, name))
        for name in _DECODE_STEPS
        if calls(module, name)
    }


def forward_with(
    module: nn.Module, stand_ins: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The module's library forward, bound to it, in which `stand_ins` are found instead of the functions so named."""
    plain = inspect.unwrap(type(module).forward)
    assert isinstance(plain, FunctionType)
    rebound = FunctionType(
        plain.__code__,
        {**plain.__globals__, **stand_ins},
        plain.__name__,
        plain.__defaults__,
        plain.__closure__,
    )
    rebound.__kwdefaults__ = plain.__kwdefaults__
    bound: Callable[..., Any] = rebound.__get__(module)
    return bound


def argument(module: nn.Module, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a call of the module's forward passes as `name`, by position or by name; None if nothing."""
    signature = inspect.signature(inspect.unwrap(type(module).forward))
    return signature.bind(module, *args, **kwargs).arguments.get(name)
