from __future__ import annotations

import functools

import pytest
import torch

from lsverify import StepResult, longstraw, preset
from lsverify.cases import QUICK
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.observe import weights_of
from lsverify.referee import Claim, Referee, claim_of, computed, floor_dtype
from lsverify.setting import make_setting

GRPO = preset("grpo")


@pytest.fixture(scope="module")
def judge():
    judge = Referee(make_setting(CaseConfig(arch="llama", **QUICK)))
    with judge.setting.computing():
        yield judge


def claim(spec):
    return claim_of(CaseConfig(arch="llama"), StepResult(loss=0.0, reference=spec), GRPO)


@pytest.mark.parametrize(
    ("named", "declared", "label", "shares"),
    [
        (None, None, "full", False),
        (None, "full", "full", False),
        (None, "exact", "full", True),
        (None, "detach", "stopped at B", True),
        ("window:2", "detach", "stopped at B-2", True),
    ],
)
def test_the_claim_is_what_the_user_names_else_what_the_path_declares(
    named, declared, label, shares
):
    config = CaseConfig(arch="llama", policy=named)
    found = claim_of(config, StepResult(loss=0.0, reference=declared), GRPO)
    assert (found.label, found.shares) == (label, shares)
    assert found.objective == GRPO


def test_without_a_result_the_claim_is_full():
    assert claim_of(CaseConfig(arch="llama"), None, GRPO).label == "full"


def test_an_objective_that_is_declared_is_the_claims():
    result = StepResult(loss=0.0, objective=preset("dapo"))
    assert claim_of(CaseConfig(arch="llama"), result, GRPO).objective.name == "dapo"


def test_a_declared_reference_that_is_no_policy_is_refused():
    with pytest.raises(InputError, match="policy 'most of it' is not known"):
        claim("most of it")


def test_the_terms_of_a_stopped_reference_sum_to_full(judge):
    full = judge.oracle(claim("full")).gradients
    for spec in ("detach", "window:3", "tail:2"):
        total = judge.total(claim(spec))
        for name, expected in full.items():
            assert (total[name] - expected).norm() <= 1e-12 * expected.norm()
        # The head sees response positions only: its gradient has no state term. The embedding's has.
        response = judge.oracle(claim(spec)).gradients
        torch.testing.assert_close(response["lm_head.weight"], full["lm_head.weight"])
        apart = response["model.embed_tokens.weight"] - full["model.embed_tokens.weight"]
        assert apart.norm() > 0.1 * full["model.embed_tokens.weight"].norm()


def test_full_has_no_terms_to_sum(judge):
    for spec in ("full", "exact", "window:99"):
        assert judge.total(claim(spec)) is None


def test_a_reference_is_computed_once(judge):
    assert judge.oracle(claim("detach")) is judge.oracle(claim("detach"))
    assert judge.oracle(claim("detach")) is judge.oracle(claim("tail:1"))
    assert judge.native(claim("detach")) is judge.oracle(claim("detach"))


def test_references_at_other_weights_leave_the_model_and_the_memory_alone(judge):
    before = weights_of(judge.setting.model)
    kept = dict(judge._memo)
    moved = {name: value + 0.01 for name, value in before.items()}
    there = judge.gradient_at(moved, claim("detach"), judge.setting.second)
    here = judge.gradient_at(before, claim("detach"), judge.setting.second)
    assert not torch.equal(there["lm_head.weight"], here["lm_head.weight"])
    after = weights_of(judge.setting.model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert judge._memo == kept


def test_a_failure_at_other_weights_restores_them_too(judge):
    before = weights_of(judge.setting.model)
    moved = {name: value + 0.01 for name, value in before.items()}
    with pytest.raises(AttributeError):
        judge.gradient_at(moved, claim("detach"), None)
    after = weights_of(judge.setting.model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_full_autograd_is_timed_weighed_and_recorded(judge):
    assert judge.full_timed.seconds > 0
    assert judge.full_live_bytes > 0
    assert judge.full_run.tokens.total == 35
    assert judge.full_run.trace.complete()


def test_full_autograd_that_fails_is_our_own_fault(judge, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr("lsverify.referee.full_autograd", broken)
    with pytest.raises(ZeroDivisionError):
        _ = Referee(judge.setting).full_timed


def test_a_shareable_model_is_tested_once(judge, monkeypatch):
    judge.require_shareable()
    monkeypatch.setattr("lsverify.referee.check_shareable", pytest.fail)
    judge.require_shareable()


def test_the_reference_for_another_objective_is_another(judge):
    dapo = Claim(label="full", policy=None, objective=preset("dapo"))
    grpo = judge.oracle(claim("full"))
    assert not torch.equal(
        judge.oracle(dapo).gradients["lm_head.weight"], grpo.gradients["lm_head.weight"]
    )
    same = computed(judge.setting.model, claim("full"), judge.setting.problem)
    assert torch.equal(same.gradients["lm_head.weight"], grpo.gradients["lm_head.weight"])


def test_limits_are_a_constant_at_oracle_precision_and_measured_elsewhere(judge):
    assert judge.limits(claim("full")).of("lm_head.weight").value == 1e-12
    rough = Referee(make_setting(CaseConfig(arch="llama", dtype="float32", **QUICK)))
    with rough.setting.computing():
        limit = rough.limits(claim("detach")).of("lm_head.weight")
        assert 1e-8 < limit.value < 1e-5
        assert "8 x the float32 floor" in limit.source
        assert rough.native(claim("detach")).gradients["lm_head.weight"].dtype == torch.float32
        path = functools.partial(longstraw, policy="detach")
        path(rough.setting.model, rough.setting.problem, GRPO)
        found = {n: p.grad for n, p in rough.setting.model.named_parameters()}
        assert rough.compared(claim("detach"), found).passed
        assert not rough.compared(claim("full"), found).passed


def test_embedding_rows_seen_and_unseen_are_told_apart(judge):
    labels = {part.label for part in judge.slices["model.embed_tokens.weight"]}
    assert labels == {"seen", "unseen"}


def test_the_floor_of_a_precision_is_that_of_its_coarsest_rounding():
    assert floor_dtype("float64") == torch.float64
    assert floor_dtype("float32") == torch.float32
    assert floor_dtype("bfloat16") == floor_dtype("bfloat16-autocast") == torch.bfloat16
