"""Faults of masks: padding that is attended to, holes that are counted, tokens that are not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import LOSS, STEPS, Fault
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


def first_token_not_counted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The first token of a response falls into the shift between labels and logits."""
    return _counting(lambda mask: _with(mask, 0, len(mask) == 1), model, problem, objective)


def mask_one_token_late(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The mask is that of the next token, by another convention for where a row begins."""
    return _counting(lambda mask: mask.roll(1), model, problem, objective)


def masked_after_the_first_hole(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Everything behind a tool's output is dropped with it."""
    return _counting(lambda mask: mask & (mask.long().cumprod(0) > 0), model, problem, objective)


def _with(mask: Tensor, at: int, value: bool) -> Tensor:
    changed = mask.clone()
    changed[at] = value
    return changed


def truncated_responses_counted(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Truncated responses leave one of two masks and stay in the other, which is the one that trains."""

    def plan(objective: Objective, problem: Problem) -> Plan:
        return prepare(objective.model_copy(update={"mask_truncated": False}), problem)

    return Dense(prepare=plan)(model, problem, objective)


def all_responses_end_with_the_first_end(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A token id that also ends responses is taken for the end wherever it is seen."""
    end = int(problem.responses[0].tokens[0])

    def plan(objective: Objective, problem: Problem) -> Plan:
        masks = [
            {"mask": r.mask & ((r.tokens == end).long().cumsum(0) - (r.tokens == end).long() == 0)}
            for r in problem.responses
        ]
        return prepare(objective, problem.replace_responses(masks))

    return Dense(prepare=plan)(model, problem, objective)


def centred_before_the_mask(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Log-ratios are centred over the response before the mask is applied: masked tokens move the others."""

    class Centred(Plan):
        def _log_ratio(self, i: int, logp: Tensor) -> Tensor:
            own = super()._log_ratio(i, logp)
            return own - own.mean() * len(own) / len(self.tokens[i])

    def plan(objective: Objective, problem: Problem) -> Plan:
        return Centred(**vars(prepare(objective, problem)))

    return Dense(prepare=plan)(model, problem, objective)


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
    Fault(path=first_token_not_counted, report="BP-03", rung="forward", points_at=LOSS),
    Fault(path=mask_one_token_late, report="BP-04", rung="forward", points_at=LOSS),
    Fault(path=masked_after_the_first_hole, report="MP-06", rung="forward", points_at=LOSS),
    Fault(
        path=truncated_responses_counted,
        report="MP-13",
        rung="optimizer_delta",
        points_at=STEPS,
        options={"objective": "grpo,mask_truncated=true"},
    ),
    Fault(
        path=all_responses_end_with_the_first_end, report="MP-06", rung="forward", points_at=LOSS
    ),
    Fault(path=centred_before_the_mask, report="MP-11", rung="forward", points_at=LOSS),
)
