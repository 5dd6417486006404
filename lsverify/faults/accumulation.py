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


def a_gradient_of_zero_for_none(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Parameters without any gradient get one of zero, which decay and momentum then act on."""
    result = dense(model, problem, objective)
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return result


def norms_frozen(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Norms are taken for parameters that are not trained: their gradient is dropped."""
    result = dense(model, problem, objective)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.grad = None
    return result


def tied_gradient_of_the_head_alone(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Embedding and head are one tensor, and only what came through the head is kept."""
    embedding = _embedding(model)
    handle = embedding.register_forward_hook(lambda module, inputs, output: output.detach())
    try:
        return dense(model, problem, objective)
    finally:
        handle.remove()


def averaged_over_prompts(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Gradients of prompts are averaged where the objective adds them."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        (loss / len(problem.groups)).backward()

    return Dense(backward=backward)(model, problem, objective)


def bad_responses_not_differentiated(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Responses whose loss is positive are skipped as outliers; the loss that is told has them."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        if loss.item() < 0:
            loss.backward()

    return Dense(backward=backward)(model, problem, objective)


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
    Fault(
        path=a_gradient_of_zero_for_none,
        report="OT-02",
        rung="gradient",
        points_at=r"reference has none",
        architectures=("glm_moe_dsa", "deepseek_v32"),
    ),
    Fault(path=norms_frozen, report="MD-23", rung="gradient", points_at=r"norm"),
    Fault(
        path=tied_gradient_of_the_head_alone,
        report="DR-13",
        rung="gradient",
        points_at=r"embed",
        options={"tied": True},
    ),
    Fault(
        path=averaged_over_prompts,
        report="OT-12",
        rung="gradient",
        points_at=r"every gradient is 1/2 times the reference",
    ),
    Fault(path=bad_responses_not_differentiated, report="", rung="gradient", points_at=r"mismatch"),
)
