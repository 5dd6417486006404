"""Precision: oracle float64, float32, and bfloat16 as users train.

Model code casts to float32 on purpose (norms, softmax, routers), which leaves a floor near 1e-7 even when every weight
is float64. `oracle` turns each request for float32 made inside the model's forward pass into float64; the floor falls to
1e-15. Nothing outside a forward pass is touched: a candidate's own casts stay the candidate's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.modeling_layers import GradientCheckpointingLayer

from lsverify.errors import InputError

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bfloat16-autocast": torch.float32,
}


def promoting() -> AbstractContextManager[Any]:
    """Inside, requests for float32 are read as requests for float64, as in a model that computes in float64."""
    return _Promoting()


def weight_dtype(name: str) -> torch.dtype:
    """The dtype of the weights under a precision. Raises `InputError` for an unknown name."""
    if name not in DTYPES:
        raise InputError(f"dtype {name!r} is not known: use one of {', '.join(DTYPES)}")
    return DTYPES[name]


class _Promoting(TorchFunctionMode):
    """Reads every request for float32 as one for float64."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            return args[0].to(torch.float64)
        if func is torch.full and _defaults_to_float32(args, kwargs or {}):
            kwargs = {**(kwargs or {}), "dtype": torch.float64}
        # A model makes a million calls, few of them with a dtype: what has none is passed on as it is.
        if _asks_for_float32(args):
            args = tuple(_promoted(arg) for arg in args)
        if not kwargs:
            return func(*args)
        return func(*args, **{name: _promoted(value) for name, value in kwargs.items()})


def _asks_for_float32(args: Sequence[Any]) -> bool:
    for arg in args:
        if arg is torch.float32:
            return True
    return False


def _defaults_to_float32(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `torch.full` is left to choose a dtype for a float: the lowest float64 does not fit its choice."""
    value = args[1] if len(args) > 1 else kwargs.get("fill_value")
    return isinstance(value, float) and kwargs.get("dtype") is None


def _promoted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def computing(model: nn.Module, dtype: str) -> Iterator[None]:
    """Inside, `model`'s forward passes run in the named precision; outside a forward pass nothing changes.

    float64 promotes the model code's own float32 casts; bfloat16-autocast runs float32 weights under autocast; the
    others leave the model as it is.
    """
    mode = _Once(_mode(model, dtype))
    entrances = {id(m): m for m in (model, _backbone(model), *_layers(model)) if m is not None}
    before = {key: vars(module).get("forward") for key, module in entrances.items()}
    for module in entrances.values():
        module.forward = _Within(mode, module)
    try:
        yield
    finally:
        for key, module in entrances.items():
            del module.forward
            if (earlier := before[key]) is not None:
                module.forward = earlier


def _mode(model: nn.Module, dtype: str) -> Callable[[], AbstractContextManager[Any]]:
    weight_dtype(dtype)
    if dtype == "float64":
        return _Promoting
    if dtype == "bfloat16-autocast":
        device = next(model.parameters()).device.type
        return lambda: torch.autocast(device, torch.bfloat16, cache_enabled=False)
    return nullcontext


def _backbone(model: nn.Module) -> nn.Module | None:
    inner: Any = model
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return getattr(inner, getattr(inner, "base_model_prefix", ""), None)


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers, which a path may drive itself, and what is in them.

    A checkpoint recomputes a layer during backward by its class's function, past any wrapper of the layer's own.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            yield module
            yield from module.children()


class _Once:
    """Enters a mode at the outermost of nested calls only: stacked modes would do the same work several times."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        self._mode, self._inside = mode, False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside = True
        try:
            with self._mode():
                yield
        finally:
            self._inside = False


class _Within:
    """A module's forward inside a mode. It goes along when the module is copied: the copy runs on its own weights."""

    def __init__(self, mode: Callable[[], AbstractContextManager[Any]], module: nn.Module) -> None:
        self._mode, self._module = mode, module
        self._own: Any = vars(module).get("forward")
        functools.update_wrapper(self, self._forward)

    @property
    def _forward(self) -> Any:
        return self._own or functools.partial(type(self._module).forward, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._mode():
            return self._forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Within:
        copied = _Within.__new__(_Within)
        copied._mode = self._mode
        copied._module = memo.get(id(self._module), self._module)
        copied._own = copy.deepcopy(self._own, memo)
        functools.update_wrapper(copied, type(copied._module).forward)
        return copied


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Torch's thread count inside the context; None leaves it. Tiny tensors lose time to threads that wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Torch's deterministic algorithms, for as long as the context lasts.

    Memory that is not yet written is not filled: that costs time and belongs to no step.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
