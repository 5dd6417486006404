"""Faults of reduction over ranks, played on one: a share of a gradient that is lost, doubled or somebody else's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import LOSS, Fault
from lsverify.faults.honest import Dense, dense
from lsverify.objective import Objective, Plan, prepare
from lsverify.paths import StepResult
from lsverify.problems import Problem

MISMATCH = r"mismatch"
NORM = r"norm"
EXPERTS = r"expert"
MOE = ("glm_moe_dsa", "mixtral", "qwen3_moe")


def _changed(
    change: Callable[[str, Tensor], Tensor | None],
    model: nn.Module,
    problem: Problem,
    objective: Objective,
) -> StepResult:
    """An honest step of which every gradient is then changed by its name."""
    result = dense(model, problem, objective)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad = change(name, parameter.grad)
    return result


def norms_not_reduced(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Gradients of replicated norms are not summed over tensor-parallel ranks: each holds its half."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient / 2 if "norm" in name else gradient

    return _changed(change, model, problem, objective)


def attention_scaled_by_the_ring(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Context parallelism scales what goes through attention by the size of the ring."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return 2 * gradient if "attn" in name else gradient

    return _changed(change, model, problem, objective)


def tail_of_a_shard_lost(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A flat buffer is cut into even shards, and what is left over belongs to nobody."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        cut = gradient.clone()
        cut.view(-1)[-1] = 0
        return cut

    return _changed(change, model, problem, objective)


def padding_of_a_shard_shifts(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The padding of a flat buffer is on the wrong side: every element is its neighbour's."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        if not name.endswith("down_proj.weight"):
            return gradient
        return gradient.flatten().roll(1).view_as(gradient)

    return _changed(change, model, problem, objective)


def experts_of_another_rank(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Gradients of experts come back in the order of another rank."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient.roll(1, 0) if "experts" in name and gradient.dim() == 3 else gradient

    return _changed(change, model, problem, objective)


def experts_averaged_over_all_ranks(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Gradients of experts are averaged over ranks that do not own them."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient / 4 if "experts" in name else gradient

    return _changed(change, model, problem, objective)


def routers_partial_sum(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The router's gradient is that of the experts that one rank holds."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        if not name.endswith("gate.weight"):
            return gradient
        half = gradient.clone()
        half[len(half) // 2 :] = 0
        return half

    return _changed(change, model, problem, objective)


def gradients_sent_in_bfloat16(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Gradients are reduced in bfloat16."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient.bfloat16().to(gradient.dtype)

    return _changed(change, model, problem, objective)


def small_gradients_not_sent(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Only the larger half of every gradient is sent, to save bandwidth."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        edge = gradient.abs().flatten().median()
        return torch.where(gradient.abs() >= edge, gradient, 0.0)

    return _changed(change, model, problem, objective)


def one_layer_left_out_of_its_bucket(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A layer that joined late is in no bucket: its gradient is that of one rank."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient / 2 if "layers.1." in name else gradient

    return _changed(change, model, problem, objective)


def head_reduced_twice(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The head is in two buckets."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return 2 * gradient if "lm_head" in name else gradient

    return _changed(change, model, problem, objective)


def adapters_not_reduced(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Adapters were added after the model was sharded, and nobody reduces them."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient / 2 if "lora_B" in name else gradient

    return _changed(change, model, problem, objective)


def clipped_in_silence(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Gradients are clipped by a norm of one before anybody sees them."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient / 10

    return _changed(change, model, problem, objective)


def signs_only(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The optimizer of some rank left the signs of the gradient in its place."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        return gradient.sign()

    return _changed(change, model, problem, objective)


def rows_of_a_tensor_parallel_shard_swapped(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Two ranks' halves of a projection are put together in the wrong order."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        if not name.endswith(("o_proj.weight", "out_proj.weight")):
            return gradient
        left, right = gradient.chunk(2, dim=1)
        return torch.cat([right, left], dim=1)

    return _changed(change, model, problem, objective)


def nothing_for_unseen_rows(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Rows of the embedding that no token of this rank touched are dropped, those of the head too."""

    def change(name: str, gradient: Tensor) -> Tensor | None:
        if "lm_head" not in name:
            return gradient
        cut = gradient.clone()
        cut[len(cut) // 2 :] = 0
        return cut

    return _changed(change, model, problem, objective)


def mean_of_the_ranks_means(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Two ranks divide by their own tokens and the gradients are averaged: the shorter rank's tokens weigh more."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        half = {"aggregation": "local_tokens", "micro_batch": -(-len(problem) // 2)}
        return prepare(objective.model_copy(update=half), problem)

    return Dense(prepare=plan)(model, problem, objective)


def a_response_of_a_rank_twice(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Ranks with fewer rows repeat one so that all have as many, and count it."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        (2 * loss if i == 0 else loss).backward()

    return Dense(backward=backward)(model, problem, objective)


def one_response_lost(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The rest of an uneven division is trained by nobody."""

    def backward(model: nn.Module, i: int, loss: Tensor) -> None:
        if i > 0:
            loss.backward()

    return Dense(backward=backward)(model, problem, objective)


FAULTS = (
    Fault(path=norms_not_reduced, report="DR-04", rung="gradient", points_at=NORM),
    Fault(
        path=attention_scaled_by_the_ring,
        report="DR-01",
        rung="gradient",
        points_at=MISMATCH,
        architectures=("llama", "mistral", "glm_moe_dsa"),
    ),
    Fault(path=tail_of_a_shard_lost, report="DR-13", rung="gradient", points_at=MISMATCH),
    Fault(
        path=padding_of_a_shard_shifts,
        report="DR-13",
        rung="gradient",
        points_at=r"down_proj",
        architectures=("llama", "mistral", "qwen3_5"),
    ),
    Fault(
        path=experts_of_another_rank,
        report="MD-04",
        rung="gradient",
        points_at=EXPERTS,
        architectures=MOE,
    ),
    Fault(
        path=experts_averaged_over_all_ranks,
        report="DR-03",
        rung="gradient",
        points_at=EXPERTS,
        architectures=MOE,
    ),
    Fault(
        path=routers_partial_sum,
        report="MD-05",
        rung="gradient",
        points_at=r"gate.weight",
        architectures=MOE,
    ),
    Fault(path=gradients_sent_in_bfloat16, report="PR-05", rung="gradient", points_at=MISMATCH),
    Fault(path=small_gradients_not_sent, report="", rung="gradient", points_at=MISMATCH),
    Fault(
        path=one_layer_left_out_of_its_bucket,
        report="DR-08",
        rung="gradient",
        points_at=r"only layer 1 differs",
    ),
    Fault(path=head_reduced_twice, report="DR-13", rung="gradient", points_at=r"lm_head"),
    Fault(
        path=adapters_not_reduced,
        report="DR-08",
        rung="gradient",
        points_at=r"lora_B",
        options={"lora": True},
    ),
    Fault(
        path=clipped_in_silence,
        report="DR-11",
        rung="gradient",
        points_at=r"every gradient is 1/10 times the reference",
    ),
    Fault(path=signs_only, report="", rung="gradient", points_at=MISMATCH),
    Fault(
        path=rows_of_a_tensor_parallel_shard_swapped,
        report="DR-02",
        rung="gradient",
        points_at=r"o(ut)?_proj",
    ),
    Fault(path=nothing_for_unseen_rows, report="", rung="gradient", points_at=r"lm_head"),
    Fault(
        path=mean_of_the_ranks_means,
        report="DR-10",
        rung="forward",
        points_at=LOSS,
        options={"objective": "dapo"},
    ),
    Fault(path=a_response_of_a_rank_twice, report="", rung="gradient", points_at=MISMATCH),
    Fault(path=one_response_lost, report="DR-05", rung="gradient", points_at=MISMATCH),
)
