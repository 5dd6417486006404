"""Faults of precision: one product, norm or sum computed in less than the rest of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense, dense
from lsverify.objective import Objective
from lsverify.paths import StepResult, full_logits
from lsverify.problems import Problem

TOKEN = r"response \d+ token|decisions|not the ones it computed"


def head_in_bfloat16(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The product with the head comes out in bfloat16 under a model that computes in more."""
    with _rounded(model, lambda name: "lm_head" in name, torch.bfloat16):
        return dense(model, problem, objective)


def norms_in_bfloat16(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A fused norm returns bfloat16."""
    with _rounded(model, lambda name: name.endswith("layernorm"), torch.bfloat16):
        return dense(model, problem, objective)


def logits_in_bfloat16(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Logits are rounded to bfloat16 before the log-softmax."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        found = full_logits(model, problem, i)
        return found.bfloat16().to(found.dtype)

    return Dense(logits=logits)(model, problem, objective)


def loss_in_float32(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The log-softmax and all behind it run in float32 though the model gives more."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        return full_logits(model, problem, i).float()

    return Dense(logits=logits)(model, problem, objective)


def residuals_rounded_in_one_layer(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """One layer hands on its hidden states in bfloat16."""
    with _rounded(model, lambda name: name.endswith("layers.1.mlp"), torch.bfloat16):
        return dense(model, problem, objective)


def gradients_rounded_in_one_layer(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Forward is exact; on the way back one layer's cotangents are rounded to float32."""

    layers = [m for name, m in model.named_modules() if name.endswith("layers.1.mlp")]
    handles = [
        m.register_full_backward_pre_hook(lambda m, out: tuple(g.float().to(g.dtype) for g in out))
        for m in layers
    ]
    try:
        return dense(model, problem, objective)
    finally:
        for handle in handles:
            handle.remove()


def master_weights_rounded(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Gradients are those at weights that were rounded to float32 and are not the model's."""
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.float())
        return dense(model, problem, objective)
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[name])


@contextmanager
def _rounded(model: nn.Module, chosen: Callable[[str], bool], dtype: torch.dtype) -> Iterator[None]:
    """Outputs of the chosen modules go through a lower precision, forward and back."""

    def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].to(dtype).to(output[0].dtype), *output[1:])
        return output.to(dtype).to(output.dtype)

    handles = [m.register_forward_hook(hook) for name, m in model.named_modules() if chosen(name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


FAULTS = (
    Fault(path=head_in_bfloat16, report="PR-02", rung="forward", points_at=TOKEN),
    Fault(path=norms_in_bfloat16, report="PR-03", rung="forward", points_at=TOKEN),
    Fault(path=logits_in_bfloat16, report="PR-02", rung="forward", points_at=TOKEN),
    Fault(path=loss_in_float32, report="PR-01", rung="forward", points_at=TOKEN),
    Fault(path=residuals_rounded_in_one_layer, report="PR-03", rung="forward", points_at=TOKEN),
    Fault(
        path=gradients_rounded_in_one_layer, report="PR-05", rung="gradient", points_at=r"mismatch"
    ),
    Fault(path=master_weights_rounded, report="PR-07", rung="forward", points_at=TOKEN),
)
