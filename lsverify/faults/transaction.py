"""Faults of the transaction: what a step leaves changed, does not do, or does in the wrong order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import dense
from lsverify.objective import Objective
from lsverify.paths import StepResult, Update, full_score
from lsverify.problems import Problem


def evaluation_mode_left_on(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A scoring function switches to eval() and nobody switches back."""
    model.eval()
    full_score(model, problem, temperature=objective.temperature)
    return dense(model, problem, objective)


@torch.no_grad()
def weights_drift_in_merge_and_unmerge(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Something is added to a weight and subtracted again, which rounds: the weight is no longer the same."""
    with torch.enable_grad():
        result = dense(model, problem, objective)
    weight = next(p for name, p in model.named_parameters() if "down_proj" in name)
    weight.add_(1e3).sub_(1e3)
    return result


def router_bias_updated(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Load balancing moves the router's bias during the step, outside of the optimizer."""
    result = dense(model, problem, objective)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 1e-3
    return result


@torch.no_grad()
def scored_and_never_trained(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The step runs on a path without backward: right log-probs, right loss, no gradient."""
    log_probs: list[Tensor] = []
    loss = 0.0
    from lsverify.objective import prepare
    from lsverify.paths import full_logits

    plan = prepare(objective, problem)
    for i in range(len(problem)):
        member = plan.member(i, full_logits(model, problem, i))
        loss += member.loss.item()
        log_probs.append(member.logp)
    return StepResult(loss=loss, log_probs=tuple(log_probs), reference="full")


def clipped_by_the_norm_of_a_shard(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The path steps by itself and clips by the norm of the parameters that one rank holds."""
    result = dense(model, problem, objective)
    update = Update(kind="sgd", lr=0.05, max_grad_norm=0.5)
    trained = [p for p in model.parameters() if p.grad is not None]
    shard = torch.nn.utils.get_total_norm([p.grad for p in trained[::2] if p.grad is not None])
    scale = min(1.0, 0.5 / (float(shard) + 1e-6))
    with torch.no_grad():
        for parameter in trained:
            assert parameter.grad is not None
            parameter.sub_(update.lr * scale * parameter.grad)
    return StepResult(loss=result.loss, log_probs=result.log_probs, reference="full", update=update)


def random_numbers_used_up(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The step draws from the global generator, so whatever is sampled after it is another sample."""
    torch.rand(1)
    return dense(model, problem, objective)


def a_weight_frozen_for_good(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A weight is frozen during scoring and stays so."""
    result = dense(model, problem, objective)
    next(model.parameters()).requires_grad_(False)
    return result


def backward_before_the_gradients_were_cleared(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A warm-up pass leaves its gradient, and the step adds to it."""
    dense(model, problem, objective)
    return dense(model, problem, objective)


def weights_moved_a_little(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A moving average writes into the weights during the step."""
    result = dense(model, problem, objective)
    with torch.no_grad():
        weight = next(p for name, p in model.named_parameters() if "norm" in name)
        weight.mul_(1 + 1e-9)
    return result


def loss_of_the_step_before(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The loss that is told is not that of the step, which the gradient is of."""
    result = dense(model, problem, objective)
    return StepResult(loss=result.loss * 0.9, log_probs=result.log_probs, reference="full")


def log_probs_told_of_another_pass(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The log-probs that are told are old ones, not those that the step computed."""
    result = dense(model, problem, objective)
    old = tuple(r.old_logp.nan_to_num(-1.0) for r in problem.responses)
    return StepResult(loss=result.loss, log_probs=old, reference="full")


FAULTS = (
    Fault(
        path=evaluation_mode_left_on,
        report="RO-07",
        rung="execution",
        points_at=r"training was True and is False",
        options={"training": True},
    ),
    Fault(
        path=weights_drift_in_merge_and_unmerge,
        report="PR-07",
        rung="execution",
        points_at=r"parameter \S*down_proj\S* changed",
    ),
    Fault(
        path=router_bias_updated,
        report="MD-17",
        rung="execution",
        points_at=r"buffer \S*e_score_correction_bias changed",
        architectures=("glm_moe_dsa",),
    ),
    Fault(
        path=scored_and_never_trained,
        report="ST-15",
        rung="execution",
        points_at=r"0 tokens under autograd .* not trained on",
    ),
    Fault(
        path=clipped_by_the_norm_of_a_shard,
        report="DR-11",
        rung="optimizer_delta",
        points_at=r"after 3 sgd steps",
    ),
    Fault(path=random_numbers_used_up, report="OT-06", rung="execution", points_at=r"random"),
    Fault(
        path=a_weight_frozen_for_good,
        report="OT-05",
        rung="execution",
        points_at=r"requires_grad|frozen",
    ),
    Fault(
        path=backward_before_the_gradients_were_cleared,
        report="OT-04",
        rung="gradient",
        points_at=r"every gradient is 2 times the reference",
    ),
    Fault(
        path=weights_moved_a_little,
        report="OT-10",
        rung="execution",
        points_at=r"parameter \S*norm\S* changed",
    ),
    Fault(
        path=loss_of_the_step_before,
        report="LN-02",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=log_probs_told_of_another_pass,
        report="PR-01",
        rung="forward",
        points_at=r"not the ones it computed",
    ),
)
