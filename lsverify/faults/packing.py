"""Faults of packed and padded rows: siblings that see each other, positions and labels that cross an edge."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Dense
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem

TOKEN = r"response \d+ token|not the ones it computed|decisions"


def packed_siblings_see_each_other(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Siblings lie behind one another in a row and only a causal mask is applied: later ones read earlier ones."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        before = [
            problem.responses[j].tokens
            for j in range(i)
            if problem.group_of[j] == problem.group_of[i]
        ]
        prompt, own = problem.prompt(i), problem.responses[i].tokens
        row = torch.cat([prompt[:-1], *before, prompt[-1:], own[:-1]])
        first = len(prompt) - 1
        skipped = torch.arange(sum(map(len, before))) % max(first, 1)
        positions = torch.cat([torch.arange(first), skipped, first + torch.arange(len(own))])
        return _last(model, row, positions, len(own))

    return Dense(logits=logits)(model, problem, objective)


def positions_run_on(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Positions of a packed row are not set back: a sample is numbered from where the one before it ended."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row = problem.tokens(i)[:-1]
        return _last(model, row, torch.arange(len(row)) + 3 * i, len(problem.responses[i].tokens))

    return Dense(logits=logits)(model, problem, objective)


def positions_begin_at_one(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """Positions are counted from 1; only models that know absolute positions can tell."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row = problem.tokens(i)[:-1]
        return _last(model, row, torch.arange(len(row)) + 1, len(problem.responses[i].tokens))

    return Dense(logits=logits)(model, problem, objective)


def responses_one_position_late(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A gap of one position between prompt and response: relative distances are wrong for every architecture."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row, first = problem.tokens(i)[:-1], len(problem.prompt(i)) - 1
        positions = torch.arange(len(row))
        return _last(model, row, positions + (positions > first), len(problem.responses[i].tokens))

    return Dense(logits=logits)(model, problem, objective)


def prompt_cut_from_the_left(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A prompt that is over some limit loses its first tokens where the step trains."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row = problem.tokens(i)[2:-1]
        return _last(model, row, torch.arange(len(row)), len(problem.responses[i].tokens))

    return Dense(logits=logits)(model, problem, objective)


def one_prompt_for_all(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """All responses are scored behind the first prompt of the batch."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row = torch.cat([problem.prompt(0), problem.responses[i].tokens])[:-1]
        return _last(model, row, torch.arange(len(row)), len(problem.responses[i].tokens))

    return Dense(logits=logits)(model, problem, objective)


def responses_of_the_next_row(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """Labels are rolled over the packed stream: the last token of a row takes the next row's first as its label."""
    changed = [
        {"tokens": torch.cat([r.tokens[:-1], problem.responses[(i + 1) % len(problem)].tokens[:1]])}
        for i, r in enumerate(problem.responses)
    ]
    return Dense()(model, problem.replace_responses(changed), objective)


def logits_of_the_row_before(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """One length of kept logits serves a ragged batch: rows are read from where the longest one begins."""

    def logits(model: nn.Module, problem: Problem, i: int) -> Tensor:
        row, length = problem.tokens(i)[:-1], len(problem.responses[i].tokens)
        longest = max(problem.response_lengths)
        kept = _last(model, row, torch.arange(len(row)), min(longest, len(row)))
        return kept[:length]

    return Dense(logits=logits)(model, problem, objective)


def _last(model: nn.Module, row: Tensor, positions: Tensor, length: int) -> Tensor:
    output = model(input_ids=row[None], position_ids=positions[None], use_cache=False)
    logits: Tensor = output.logits[0, -length:]
    return logits


FAULTS = (
    Fault(path=packed_siblings_see_each_other, report="BP-05", rung="forward", points_at=TOKEN),
    Fault(
        path=positions_run_on,
        report="MP-15",
        rung="forward",
        points_at=TOKEN,
        architectures=("gpt2",),
    ),
    Fault(
        path=positions_begin_at_one,
        report="BP-14",
        rung="forward",
        points_at=TOKEN,
        architectures=("gpt2",),
    ),
    Fault(path=responses_one_position_late, report="BP-12", rung="forward", points_at=TOKEN),
    Fault(path=prompt_cut_from_the_left, report="", rung="forward", points_at=TOKEN),
    Fault(path=one_prompt_for_all, report="", rung="forward", points_at=TOKEN),
    Fault(path=responses_of_the_next_row, report="BP-05", rung="forward", points_at=TOKEN),
    Fault(path=logits_of_the_row_before, report="BP-09", rung="forward", points_at=TOKEN),
)
