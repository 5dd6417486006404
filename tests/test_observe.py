from __future__ import annotations

import pytest
import torch

from lsverify import (
    NotShareable,
    StalePromptState,
    StepResult,
    Update,
    full_autograd,
    ladder,
    preset,
)
from lsverify.cases import QUICK
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig
from lsverify.observe import Run, checked, recorded, restore, timed, weighed, weights_of


@pytest.fixture(scope="module")
def step():
    """A model, a problem and an objective, in oracle precision."""
    setting = ladder._referee(CaseConfig(arch="llama", chunk=1, **QUICK)).setting
    with setting.computing():
        yield setting.model, setting.problem, setting.objective


def test_a_run_holds_result_gradients_log_probs_and_tokens(step):
    run = recorded(full_autograd, *step)
    assert run.error is None
    assert run.changes == []
    assert all(g is not None for g in run.gradients.values())
    assert run.tokens.total == run.tokens.grad == 35
    for seen, told in zip(run.trace.log_probs, run.result.log_probs, strict=True):
        torch.testing.assert_close(seen, told, rtol=1e-14, atol=0)
    assert run.seconds > 0
    assert run.live_bytes_peak is None


def test_a_run_leaves_no_gradient_behind(step):
    for kind in (recorded, timed, weighed):
        kind(full_autograd, *step)
        assert all(p.grad is None for p in step[0].parameters())


def test_gradients_left_from_before_are_not_the_paths(step):
    model = step[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found = []

    def path(model, problem, objective):
        found.extend(p.grad for p in model.parameters())

    run = recorded(path, *step)
    assert set(found) == {None}
    assert set(run.gradients.values()) == {None}


def test_instruments_change_no_value(step):
    runs = [kind(full_autograd, *step) for kind in (recorded, timed, weighed)]
    for name, gradient in runs[0].gradients.items():
        assert torch.equal(gradient, runs[1].gradients[name])
        assert torch.equal(gradient, runs[2].gradients[name])
    assert runs[1].tokens.total == 0
    assert runs[2].live_bytes_peak > 0


def test_weights_that_a_path_moves_are_noted_and_put_back(step):
    before = weights_of(step[0])

    def moves(model, problem, objective):
        with torch.no_grad():
            model.model.norm.weight[0] += 1
        model.eval()
        problem.responses[0].old_logp[0] -= 1
        raise ValueError

    try:
        run = recorded(moves, *step)
        assert any("model.norm.weight" in change for change in run.changes)
        assert any("training" in change for change in run.changes)
        assert isinstance(run.error, ValueError)
        after = weights_of(step[0])
        assert all(torch.equal(after[name], value) for name, value in before.items())
    finally:
        step[0].train()


def test_the_precision_of_log_probs_follows_the_temperature_asked_for(step):
    plain = recorded(full_autograd, *step).trace.log_probs
    warm = recorded(full_autograd, *step, temperature=2.0).trace.log_probs
    assert not torch.allclose(plain[0], warm[0])


@pytest.mark.parametrize("error", [StalePromptState("old"), NotShareable("no"), SystemExit(0)])
def test_errors_of_the_path_are_kept(step, error):
    def path(model, problem, objective):
        raise error

    assert recorded(path, *step).error is error


@pytest.mark.parametrize("error", [InputError("mend it"), KeyboardInterrupt()])
def test_errors_of_the_user_pass(step, error):
    def path(model, problem, objective):
        raise error

    with pytest.raises(type(error)):
        recorded(path, *step)


def test_no_run_has_no_tokens():
    assert Run().tokens.total == 0


def test_restore_leaves_unnamed_tensors_alone(step):
    model = step[0]
    before = weights_of(model)
    restore(model, {"model.norm.weight": torch.zeros(48, dtype=torch.float64)})
    assert not model.model.norm.weight.any()
    restore(model, before)
    assert torch.equal(model.model.norm.weight, before["model.norm.weight"])


@pytest.mark.parametrize(
    "result",
    [
        StepResult(loss=0.5),
        StepResult(loss=1),
        StepResult(loss=torch.tensor([0.5]), log_probs=[torch.zeros(2)], reference="detach"),
        StepResult(loss=0.0, objective=preset("dapo"), update=Update(kind="sgd", lr=1.0)),
    ],
)
def test_results_of_the_documented_form_are_taken(result):
    kept = checked(result)
    assert kept.loss == float(result.loss)
    assert kept.loss.__class__ is float
    for name in ("reference", "objective", "update", "over_ranks"):
        assert getattr(kept, name) == getattr(result, name)


def test_no_result_is_a_result():
    assert checked(None) is None


def test_what_is_kept_of_a_result_is_out_of_the_paths_reach():
    loss, rows = torch.tensor(0.5, requires_grad=True), [torch.zeros(2), torch.zeros(1)]
    kept = checked(StepResult(loss=loss, log_probs=rows))
    rows[0] += 1
    rows.pop()
    assert kept.loss == 0.5
    assert [row.tolist() for row in kept.log_probs] == [[0, 0], [0]]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (0.5, "it returned a float: return a StepResult or None"),
        ({"loss": 0.5}, "it returned a dict"),
        (StepResult(loss="0.5"), "StepResult.loss is a str"),
        (StepResult(loss=None), "StepResult.loss is a NoneType"),
        (StepResult(loss=torch.zeros(2)), "StepResult.loss is a Tensor"),
        (StepResult(loss=0.0, log_probs=(0.5,)), "StepResult.log_probs is a tuple"),
        (StepResult(loss=0.0, log_probs=torch.zeros(2)), "StepResult.log_probs is a Tensor"),
        (StepResult(loss=0.0, reference=3), "StepResult.reference is a int"),
        (StepResult(loss=0.0, objective="dapo"), "StepResult.objective is a str"),
        (StepResult(loss=0.0, update="sgd"), "StepResult.update is a str"),
        (StepResult(loss=0.0, over_ranks="max"), "StepResult.over_ranks is a str"),
    ],
)
def test_other_results_are_refused_by_field(result, told):
    with pytest.raises(TypeError, match=told):
        checked(result)


def test_live_bytes_repeat_to_the_byte(step):
    first, second = (weighed(full_autograd, *step).live_bytes_peak for _ in range(2))
    assert first == second
