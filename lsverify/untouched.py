"""What a step may not change: weights, buffers, modes, hooks and random state, compared to the bit.

`.grad` is what a step is for: it is not looked at, except that it must be None before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lsverify.errors import InputError

ABSENT = "absent"
CONTAINERS = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}


class Untouched:
    """A snapshot of `model` and of the process's random state and switches, taken on construction.

    The snapshot copies every parameter, buffer and tensor attribute to the CPU, once where they are shared. Take and
    compare it outside of contexts that install hooks of their own, such as Watch.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._scratch = scratch(model)
        self._tensors = dict(_tensors(model))
        copies = {id(t): t.detach().to("cpu", copy=True) for t in self._tensors.values()}
        self._values = {name: copies[id(tensor)] for name, tensor in self._tensors.items()}
        self._random = _random_state()
        self._settings = dict(_settings(model))
        # Kept alive, so that what replaces one of them cannot be given its address.
        self._alive = [(module, dict(vars(module))) for module in model.modules()]

    def changes(self) -> list[str]:
        """One line for each thing that differs from the snapshot; empty when nothing does."""
        return [*self._changed_tensors(), *self._changed_random_state(), *self._changed_settings()]

    def _changed_tensors(self) -> Iterator[str]:
        now = dict(_tensors(self._model))
        for name in (*self._tensors, *(now.keys() - self._tensors.keys())):
            if name in self._scratch:
                continue
            if name not in self._tensors:
                yield f"{name} was added"
            elif name not in now:
                yield f"{name} was removed"
            else:
                if now[name] is not self._tensors[name]:
                    yield f"{name} was replaced by another tensor object"
                difference = _difference(self._values[name], now[name].detach().cpu())
                if difference:
                    yield f"{name} changed: {difference}"

    def _changed_random_state(self) -> Iterator[str]:
        for name, state in _random_state().items():
            before = self._random.get(name)
            if before is not None and before != state:
                yield f"random state of {name} was advanced or reseeded"

    def _changed_settings(self) -> Iterator[str]:
        now = dict(_settings(self._model))
        alike: dict[tuple[str, str, str], list[str]] = {}
        for name in (*self._settings, *(now.keys() - self._settings.keys())):
            before, after = self._settings.get(name, ABSENT), now.get(name, ABSENT)
            if before != after and f"tensor {name}" not in self._scratch:
                alike.setdefault((name.rpartition(".")[2], before, after), []).append(name)
        for (_, before, after), names in alike.items():
            more = f" (and {len(names) - 1} more alike)" if len(names) > 1 else ""
            yield f"{names[0]} was {before} and is {after}{more}"


# By model, so that it is asked once.
_SCRATCH: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def scratch(model: nn.Module) -> frozenset[str]:
    """Tensor attributes that the model's own forward pass leaves behind, whoever calls it: recurrent_gemma keeps its states so.

    Found by a pass over two tokens, after which they are as before. Parameters and buffers are never among them.
    """
    if model not in _SCRATCH:
        held = [(module, dict(vars(module))) for module in model.modules()]
        before = {name: (id(t), t.detach().clone()) for name, t in _attributes(model)}
        positions = torch.arange(2, device=next(model.parameters()).device)[None]
        with torch.no_grad():
            model(input_ids=positions.new_zeros(1, 2), position_ids=positions, use_cache=False)
        now = dict(_attributes(model))
        _SCRATCH[model] = frozenset(
            name
            for name in before.keys() | now.keys()
            if name not in before
            or name not in now
            or id(now[name]) != before[name][0]
            or _difference(before[name][1], now[name])
        )
        for module, attributes in held:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
    return _SCRATCH[model]


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor) for name, tensor in _tensors(model) if name.startswith("tensor "))


def require_no_gradients(model: nn.Module) -> None:
    """A step is judged by what it leaves in `.grad`: all must be None before. Raises InputError."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InputError(
                f"{name}.grad is not None before the step: every .grad must be None, "
                "call model.zero_grad(set_to_none=True) first"
            )


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, buffers and plain tensor attributes by kind and name, shared ones under each of their names."""
    for path, module in model.named_modules(remove_duplicate=False):
        held = {"parameter": module._parameters, "buffer": module._buffers, "tensor": vars(module)}
        for kind, group in held.items():
            for name, value in group.items():
                if isinstance(value, Tensor):
                    yield f"{kind} {_join(path, name)}", value


def _settings(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Everything else that steers a forward or backward pass, as text by name."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"module {path or 'root'}", f"{type(module).__name__} {id(module):#x}"
        for name, value in vars(module).items():
            if name not in CONTAINERS and not isinstance(value, Tensor):
                yield _join(path, name), _described(name, value)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield f"{name}.requires_grad", str(parameter.requires_grad)
        yield f"{name} hooks", str(len(parameter._backward_hooks or ()))
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        yield f"{name} post-accumulate hooks", str(len(after or ()))
    for name, hooks in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and name.endswith("_hooks"):
            yield f"torch.nn {name}", str(len(hooks))
    yield "torch default dtype", str(torch.get_default_dtype())
    yield "torch grad mode", str(torch.is_grad_enabled())
    yield "torch inference mode", str(torch.is_inference_mode_enabled())
    yield "torch deterministic algorithms", str(torch.are_deterministic_algorithms_enabled())
    yield "torch float32 matmul precision", torch.get_float32_matmul_precision()
    yield "torch autocast", str([torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")])


def _described(name: str, value: Any) -> str:
    """A value that differs when the attribute was set anew or a container of it grew; deeper changes stay unseen."""
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    if "hooks" in name and isinstance(value, dict):
        return f"{len(value)} hooks {sorted(value)}" if value else "0 hooks"
    size = f" of {len(value)}" if isinstance(value, dict | list | tuple | set) else ""
    return f"{type(value).__name__}{size} {id(value):#x}"


def _random_state() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": random.getstate(),
    }
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, keys.tobytes(), rest)
    if torch.cuda.is_initialized():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda:{index}"] = state.numpy().tobytes()
    return states


def _difference(before: Tensor, after: Tensor) -> str:
    """Empty when both are equal to the bit, else where they first part."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"{before.dtype} {list(before.shape)} became {after.dtype} {list(after.shape)}"
    if torch.equal(_bits(before), _bits(after)):
        return ""
    unequal = (_bits(before) != _bits(after)).any(-1)
    first = int(unequal.nonzero()[0])
    old, new = before.reshape(-1)[first].item(), after.reshape(-1)[first].item()
    place = [int(i) for i in torch.unravel_index(torch.tensor(first), before.shape)]
    return f"{int(unequal.sum())} of {before.numel()} elements, first at {place} from {old!r} to {new!r}"


def _bits(tensor: Tensor) -> Tensor:
    """[numel, bytes per element] uint8."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
