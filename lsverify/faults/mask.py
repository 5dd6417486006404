"""Faults of masks: padding that is attended to, holes that are counted, tokens that are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective, Plan, monolithic, prepare, token_logp
from lsverify.paths import StepResult, full_logits
from lsverify.problems import Problem


def holes_are_counted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The objective counts every token of a response, those of a tool included."""
    return _counting(lambda mask: mask | True, model, problem, objective)


def last_n_instead_of_the_mask(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """The mask becomes a count, and the count is read as the last so many tokens."""

    def suffix(mask: Tensor) -> Tensor:
        return mask.sort().values

    return _counting(suffix, model, problem, objective)


def ending_token_masked(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Padding and end share an id, and masking the one drops the other: no response's last token counts."""

    def without_end(mask: Tensor) -> Tensor:
        short = mask.clone()
        short[-1] = len(mask) == 1
        return short

    return _counting(without_end, model, problem, objective)


def _counting(change, model: nn.Module, problem: Problem, objective: Objective) -> StepResult:  # type: ignore[no-untyped-def]
    def plan(objective: Objective, problem: Problem) -> Plan:
        masks = [{"mask": change(response.mask)} for response in problem.responses]
        return prepare(objective, problem.replace_responses(masks))

    return Dense(prepare=plan)(model, problem, objective)


def padding_attended(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """A left-padded batch goes through the model without its attention mask."""
    batch = problem.padded("left")
    output = model(input_ids=batch.input_ids, use_cache=False)
    rows = [
        output.logits[i, int(start) - 1 : int(start) - 1 + length]
        for i, (start, length) in enumerate(
            zip(batch.response_start, problem.response_lengths, strict=True)
        )
    ]
    loss = monolithic(objective, problem, rows, None)
    loss.backward()
    log_probs = [
        token_logp(row, response.tokens, objective.temperature).detach()
        for row, response in zip(rows, problem.responses, strict=True)
    ]
    return StepResult(loss=loss.detach().item(), log_probs=tuple(log_probs), reference="full")


def masked_nan_times_zero(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The mask multiplies what has been computed, and at a masked slot that is not a number."""
    holes = [
        {"old_logp": torch.where(response.mask, response.old_logp, torch.nan)}
        for response in problem.responses
    ]
    advantages = prepare(objective, problem).advantages
    low, high = 1 - objective.epsilon_low, 1 + objective.epsilon_high
    total = 0.0
    for i, response in enumerate(problem.replace_responses(holes).responses):
        logp = token_logp(full_logits(model, problem, i), response.tokens, objective.temperature)
        ratio = (logp - response.old_logp).exp()
        surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(low, high) * advantages[i])
        loss = -(surrogate * response.mask).sum() / response.mask.sum() / len(problem)
        loss.backward()
        total += loss.item()
    return StepResult(loss=total, reference="full")


FAULTS = (
    Fault(
        path=holes_are_counted,
        report="MP-13",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=last_n_instead_of_the_mask,
        report="BP-08",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=ending_token_masked,
        report="MP-07",
        rung="forward",
        points_at=r"loss is \S+ instead of",
    ),
    Fault(
        path=masked_nan_times_zero,
        report="MP-09",
        rung="forward",
        points_at=r"loss is nan instead of",
    ),
    Fault(
        path=padding_attended,
        report="MP-04",
        rung="forward",
        points_at=r"response \d+ token",
    ),
)
