"""Faults of the model library's own continuation: a branch runs its code as it is, without ours."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.continuation.carriers import state_arguments
from lsverify.faults.catalogue import Fault
from lsverify.faults.honest import Sharing
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.problems import Problem
from lsverify.prompt import unwrapped


def continued_by_the_library(
    model: nn.Module, problem: Problem, objective: Objective
) -> StepResult:
    """A chunk of several tokens goes on from a saved state in the library's own code, which restarts its scan."""

    def branch(model: nn.Module, problem: Problem, i: int, cache: Cache, boundary: int) -> Tensor:
        tokens = problem.tokens(i)[boundary:-1]
        positions = torch.arange(len(tokens)) + boundary
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            **state_arguments(unwrapped(model), cache, len(tokens)),
        )
        logits: Tensor = output.logits[0, -len(problem.responses[i].tokens) :]
        return logits

    return Sharing(claim="detach", branch=branch)(model, problem, objective)


FAULTS = (
    Fault(
        path=continued_by_the_library,
        report="UC-04",
        rung="execution",
        points_at=r"modified by an inplace operation",
        architectures=("jamba", "mamba", "falcon_mamba"),
    ),
)
