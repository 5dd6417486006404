"""Continuing from a state where the library cannot, or does it wrongly.

`mended(model)` holds for one pass from a state, and only that: inside, the mixers whose library code restarts, or
writes into the state it was handed, run with the few functions they need replaced; afterwards every module is as it
was. Full autograd and candidates never run in it. What each family needs, and why, is in its own file; the faults are
reproduced in `tests/test_upstream.py` and described in `docs/upstream.md`.

A mixer is recognised by what it is made of, the scan its forward calls or the states it holds, not by its model's
name: types that share a mixer share its continuation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lsverify.continuation import decode_steps, mamba, mamba2, recurrent_gemma

# Each gives the forward with which a module continues, or None for a module that is none of its business; the first
# that gives one decides.
_MENDERS: tuple[Callable[[nn.Module, nn.Module], Callable[..., Any] | None], ...] = (
    mamba.mended_forward,
    mamba2.mended_forward,
    recurrent_gemma.mended_forward,
    decode_steps.mended_forward,
)


@contextmanager
def mended(model: nn.Module) -> Iterator[None]:
    """Inside, a forward pass of `model` from a state is the exact continuation of that state.

    Gradient checkpointing is off inside: the library's checkpointed layers set their cache aside, and a pass from a
    state is one chunk or one branch, the only graph alive. Its backward pass may run outside.
    """
    swapped: list[tuple[nn.Module, str, Any]] = []
    try:
        for module in model.modules():
            if vars(module).get("gradient_checkpointing"):
                _swap(swapped, module, "gradient_checkpointing", False)
            for forward_of in _MENDERS:
                if (forward := forward_of(module, model)) is not None:
                    _swap(swapped, module, "forward", forward)
                    break
        yield
    finally:
        for module, name, before in reversed(swapped):
            if before is _ABSENT:
                del vars(module)[name]
            else:
                vars(module)[name] = before


_ABSENT = object()


def _swap(swapped: list[tuple[nn.Module, str, Any]], module: nn.Module, name: str, to: Any) -> None:
    swapped.append((module, name, vars(module).get(name, _ABSENT)))
    vars(module)[name] = to
