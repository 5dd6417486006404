"""Faults of accumulation: right numbers, added up in the wrong number, place or precision."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense, dense
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem


def only_the_last_response_survives(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Gradients are cleared before every response."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        model.zero_grad(set_to_none=True)
        loss.backward()

    return Dense(backward=backward)(model, problem, objective)


def prompt_row_counted_twice(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The embedding row of a live prompt token gets its gradient from the branch and from the prompt's pass."""
    result = dense(model, problem, objective)
    row = int(problem.prompt(0)[-1])
    gradient = _embedding(model).weight.grad
    assert gradient is not None
    gradient[row] *= 2
    return result


def head_gradient_in_the_embedding(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Head and embedding are taken for one tied tensor: the head's gradient is added to the embedding's."""
    result = dense(model, problem, objective)
    head, embedding = model.get_output_embeddings(), _embedding(model)  # type: ignore[operator]
    embedding.weight.grad += head.weight.grad
    return result


def accumulated_in_float32(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Each response's gradient is added to buffers of a lower precision."""
    sums: dict[str, Tensor] = {}

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] = sums.get(name, torch.zeros(())) + parameter.grad.float()
                parameter.grad = None

    result = Dense(backward=backward)(model, problem, objective)
    for name, parameter in model.named_parameters():
        parameter.grad = sums[name].to(parameter.dtype) if name in sums else None
    return result


_BUFFERS: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


def earlier_steps_still_in_the_buffers(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Gradients live in buffers of the path's own, which nothing clears between steps."""
    result, buffers = dense(model, problem, objective), _BUFFERS.setdefault(model, {})
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            buffers[name] = buffers.get(name, torch.zeros_like(parameter.grad)).add_(parameter.grad)
            parameter.grad = buffers[name]
    return result


_NOISE = torch.Generator()


def noise_in_the_gradient(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """An atomic addition somewhere sums in another order each time: no two runs agree."""
    result = dense(model, problem, objective)
    for parameter in model.parameters():
        if parameter.grad is not None:
            noise = torch.rand(parameter.shape, generator=_NOISE, dtype=parameter.dtype)
            parameter.grad *= 1 + 1e-6 * noise
    return result


def _embedding(model: nn.Module) -> nn.Embedding:
    found: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
    return found


FAULTS = (
    Fault(
        path=only_the_last_response_survives,
        report="OT-01",
        rung="gradient",
        points_at=r"mismatch",
    ),
    Fault(
        path=prompt_row_counted_twice,
        report="LN-11",
        rung="gradient",
        points_at=r"embed_tokens.weight\[seen\][\s\S]*only embedding differ",
    ),
    Fault(
        path=head_gradient_in_the_embedding,
        report="DR-13",
        rung="gradient",
        points_at=r"embed_tokens.weight\[unseen\][\s\S]*only embedding differ",
    ),
    Fault(
        path=accumulated_in_float32,
        report="PR-05",
        rung="gradient",
        points_at=r"mismatch",
    ),
    Fault(
        path=earlier_steps_still_in_the_buffers,
        report="OT-04",
        rung="gradient",
        points_at=r"two runs of the path disagree",
    ),
    Fault(
        path=noise_in_the_gradient,
        report="",
        rung="gradient",
        points_at=r"two runs of the path disagree",
    ),
)
