"""Full autograd through `torch.compile`: every decoder layer's forward runs as compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import config, lookup_backend
from torch._dynamo.mutation_guard import install_generation_tagging_init

from lsverify.errors import InputError
from lsverify.objective import Objective
from lsverify.paths import StepResult, full_autograd
from lsverify.problems import Problem
from lsverify.watch import decoder_layers, way_to_embedding

# Layers share the code of their forward, and each is compiled for itself, for every precision that was asked for; beyond
# torch's own limit of 8 versions the code runs as it is.
MOST_VERSIONS = 512


class Counting:
    """A backend of torch, by name, that counts how often its compiled code runs."""

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, 0

    def __call__(self, graph: Any, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        """Compile a graph of torch operations."""
        compiled = lookup_backend(self.name)(graph, inputs, **options)

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

        return run


AOT_EAGER, INDUCTOR = Counting("aot_eager"), Counting("inductor")


def step(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Traced, differentiated ahead of time, and run by torch's own kernels; claims `full`."""
    return _through(AOT_EAGER, model, problem, objective)


def inductor(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The same as generated C++; claims `full`. Raises `InputError` without a compiler for it."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise InputError(
            "compiled:inductor needs a C++ compiler and there is none: install g++, name one in CXX, or judge compiled:step"
        ) from None
    return _through(INDUCTOR, model, problem, objective)


def _through(
    backend: Counting, model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    before = backend.runs
    with compiling(model, backend):
        result = full_autograd(model, problem, objective)
    if backend.runs == before:
        raise RuntimeError(f"no code that {backend.name} compiled was run")
    return result


@contextmanager
def compiling(model: nn.Module, backend: Callable[..., Any]) -> Iterator[None]:
    """Inside, each decoder layer's forward is compiled for any length when it is first called, and then reused."""
    layers = [layer for _, layer in decoder_layers(way_to_embedding(model)[1][-1])]
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True)
    try:
        with config.patch(recompile_limit=MOST_VERSIONS):
            yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


# Torch does so at its first compilation: it replaces `nn.Module.__init__`.
install_generation_tagging_init()
