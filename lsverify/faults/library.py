"""Faults of the model library's own continuation: a branch runs its code as it is, without ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.continuation.carriers import state_arguments
from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Sharing, run_branch
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem
from lsverify.prompt import unwrapped


def library_branch(
    model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int
) -> Tensor:
    """The logits [R_i, V] of response i as the library's own code continues."""
    tokens = problem.tokens(i)[boundary:-1]
    positions = torch.arange(len(tokens)) + boundary
    output = model(
        input_ids=tokens[None],
        position_ids=positions[None],
        **state_arguments(unwrapped(model), cache, len(tokens)),
    )
    logits: Tensor = output.logits[0, -len(problem.responses[i].tokens) :]
    return logits


def continued_by_the_library(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A chunk of several tokens goes on from a saved state in the library's own code, which restarts its scan."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        one = len(problem.responses[i].tokens) == 1
        return (run_branch if one else library_branch)(model, problem, i, cache, boundary)

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


def one_token_by_the_library(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A branch of one token takes the library's decoding code, which writes into the state that autograd has saved."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        one = len(problem.responses[i].tokens) == 1
        return (library_branch if one else run_branch)(model, problem, i, cache, boundary)

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


FAULTS = (
    Fault(
        path=continued_by_the_library,
        report="UC-04",
        rung="forward",
        points_at=r"values part first in \S*layers\.\d+, at position \d+",
        architectures=("mamba", "falcon_mamba"),
    ),
    Fault(
        path=one_token_by_the_library,
        report="UC-04",
        rung="execution",
        points_at=r"modified by an inplace operation",
        architectures=("jamba", "mamba", "falcon_mamba"),
        options={"response_lengths": (3, 1)},
    ),
)
