"""Whether a prompt was shared shows in passes per token, at group sizes where totals cannot tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from judged import rung
from torch.utils.checkpoint import checkpoint

from lsverify import full_autograd, score
from lsverify.cache import by_path, new_cache, with_leaves
from lsverify.cases import QUICK
from lsverify.evidence import CaseConfig
from lsverify.faults.honest import Sharing, run_branch, run_prompt, sharing
from lsverify.ladder import judge
from lsverify.paths import full_score

SIZES = {**QUICK, "response_lengths": (3, 2, 4)}


def dense(model, problem, objective):
    return replace(full_autograd(model, problem, objective), reference="exact")


def prompt_again_for_every_response(model, problem, objective):
    def branch(model, problem, i, cache, boundary):
        with torch.no_grad():
            own = run_prompt(model, problem.prompt(i)[:boundary])
        return run_branch(model, problem, i, own, boundary)

    def nothing(model, tokens):
        return new_cache(model.config)

    return Sharing(claim="detach", prompt=nothing, branch=branch)(model, problem, objective)


def scored_by_the_dense_path(model, problem, objective):
    full_score(model, problem)
    return sharing(model, problem, objective)


def scored_twice(model, problem, objective):
    score(model, problem)
    score(model, problem)
    return sharing(model, problem, objective)


def branches_recomputed(model, problem, objective):
    def branch(model, problem, i, cache, boundary):
        state = by_path(cache)

        def run(*tensors):
            own = with_leaves(cache, dict(zip(state, tensors, strict=True)))
            return run_branch(model, problem, i, own, boundary)

        return checkpoint(run, *state.values(), use_reentrant=False)

    return Sharing(branch=branch)(model, problem, objective)


def executed(path, group_size):
    fields = {**SIZES, "group_size": group_size, "require": "execution"}
    return rung(
        judge(CaseConfig(arch="llama", candidate=f"{__name__}:{path}", **fields)), "execution"
    )


@pytest.mark.parametrize("group_size", [2, 3])
@pytest.mark.parametrize("path", ["dense", "prompt_again_for_every_response"])
def test_a_prompt_forwarded_once_per_response_is_not_shared(path, group_size):
    found = executed(path, group_size)
    assert found.status == "failed"
    assert "the shared path was not entered" in found.detail


@pytest.mark.parametrize(
    "path", ["sharing", "scored_by_the_dense_path", "scored_twice", "branches_recomputed"]
)
def test_scoring_and_recomputation_are_no_lack_of_sharing(path):
    assert executed(path, 2).status == "proven"
