"""Full autograd under the library's gradient checkpointing: every layer's forward runs again during backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lsverify.objective import Objective
from lsverify.paths import StepResult, full_autograd
from lsverify.problems import Problem
from lsverify.prompt import unwrapped

# What the library sets on modules to switch checkpointing on; its own way to switch it off leaves some of it behind.
SWITCHES = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hooks",
    "_require_grads_hook",
)


def step(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Torch's checkpoint of today, which recomputes under saved-tensor hooks; claims `full`."""
    with checkpointing(model, use_reentrant=False):
        return full_autograd(model, problem, objective)


def reentrant(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The older one, an autograd function whose backward runs a backward of its own; claims `full`."""
    with checkpointing(model, use_reentrant=True):
        return full_autograd(model, problem, objective)


@contextmanager
def checkpointing(model: nn.Module, *, use_reentrant: bool) -> Iterator[None]:
    """Inside, layers of a model in train() are checkpointed; afterwards every switch is what it was, absent ones absent."""
    inner: Any = unwrapped(model)
    before = [
        (module, {name: vars(module)[name] for name in SWITCHES if name in vars(module)})
        for module in inner.modules()
    ]
    inner.activation_checkpointing_enable(
        activation_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    try:
        yield
    finally:
        inner.disable_input_require_grads()
        for module, switches in before:
            for name in SWITCHES:
                vars(module).pop(name, None)
            vars(module).update(switches)
