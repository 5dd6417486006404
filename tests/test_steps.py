import functools
from dataclasses import replace

import pytest
import torch

from lsverify import steps
from lsverify.objective import preset
from lsverify.paths import StepResult, full_autograd, longstraw
from lsverify.problems import ProblemSpec
from lsverify.steps import Step, hold, hold_equal, hold_log_probs

SPEC = ProblemSpec(prompt_lengths=(11, 5), group_sizes=(2,), response_lengths=(3, 1), seed=4)
STEP = Step(spec=SPEC, chunk=4)


@pytest.fixture(autouse=True)
def _fresh_references():
    yield
    steps._referee.cache_clear()


def claims(reference, policy):
    """LongStraw with one policy that claims the reference of another."""

    def path(model, problem, objective):
        return replace(longstraw(model, problem, objective, policy=policy), reference=reference)

    return path


def test_honest_paths_are_held_to_what_they_declare():
    for policy in ("exact", "detach", "tail:3", "window:4"):
        assert hold("llama", replace(STEP, policy=policy)).status == "proven"
    assert hold("llama", STEP, full_autograd).status == "proven"


def test_a_path_that_declares_nothing_is_held_to_full():
    def silent(model, problem, objective):
        full_autograd(model, problem, objective)

    assert hold("llama", STEP, silent).status == "proven"


@pytest.mark.parametrize(
    ("reference", "policy"),
    [("full", "detach"), ("exact", "window:9"), ("window:3", "window:4"), ("detach", "tail:2")],
)
def test_a_claim_that_is_not_true_is_refused_and_names_the_step(reference, policy):
    with pytest.raises(AssertionError, match=r"llama grpo exact seed 4 prompts \(11, 5\)"):
        hold("llama", STEP, claims(reference, policy))


def test_one_part_in_a_billion_is_refused():
    def scaled(model, problem, objective):
        result = longstraw(model, problem, objective)
        for parameter in model.parameters():
            parameter.grad *= 1 + 1e-9
        return result

    with pytest.raises(AssertionError, match=r"relative L2 1\.000e-09"):
        hold("llama", STEP, scaled)


def test_wrong_log_probs_are_refused():
    def shifted(model, problem, objective):
        result = longstraw(model, problem, objective)
        return replace(result, log_probs=tuple(logp + 1e-9 for logp in result.log_probs))

    with pytest.raises(AssertionError, match="log-probs differ"):
        hold("llama", STEP, shifted)
    with pytest.raises(AssertionError, match="5 log-probs, expected 4"):
        hold_log_probs([torch.ones(4)], [torch.ones(5)], "case")


def test_a_stopped_reference_whose_terms_do_not_sum_to_full_does_not_count(monkeypatch):
    monkeypatch.setattr("lsverify.references._sum", lambda response, state: response)
    with pytest.raises(AssertionError, match="two terms against full autograd"):
        hold("llama", replace(STEP, policy="detach"))


def test_small_errors_in_many_tensors_are_refused_as_a_whole():
    # Each tensor is let off by the floor that a share of the whole gradient sets; all together are too far.
    expected = {f"small.{i}": torch.full((1,), 1e-3, dtype=torch.float64) for i in range(4)}
    expected["large"] = torch.ones(1, dtype=torch.float64)
    actual = {name: g * (1 + 0.9e-12) for name, g in expected.items()}
    assert hold_equal(expected, actual, "case").status == "proven"
    actual = {name: g * (1 + 1.1e-12) for name, g in expected.items()}
    with pytest.raises(AssertionError, match="case: "):
        hold_equal(expected, actual, "case")


def test_a_step_is_decided_by_its_structure_and_seed():
    first = STEP.referee("llama").setting.problem.content_hash()
    steps._referee.cache_clear()
    assert STEP.referee("llama").setting.problem.content_hash() == first
    other = replace(STEP, spec=SPEC.model_copy(update={"seed": 5}))
    assert other.referee("llama").setting.problem.content_hash() != first


def test_steps_that_differ_in_policy_and_chunk_share_their_references():
    shared = STEP.referee("llama")
    assert replace(STEP, policy="tail:2", chunk=7).referee("llama") is shared
    assert replace(STEP, objective=preset("rloo")).referee("llama") is not shared


def test_the_mode_is_the_steps_own_even_where_models_are_shared():
    for training in (True, False, True):
        with replace(STEP, training=training).running("llama") as setting:
            assert setting.model.training is training


def test_a_step_says_what_it_is():
    text = str(Step(spec=SPEC.model_copy(update={"holes": True}), policy="tail:2", training=False))
    assert text == (
        "grpo tail:2 seed 4 prompts (11, 5) groups (2, 2) responses (3, 1) chunk 8 branches 1 "
        "distinct rewards eval() holes"
    )


def test_a_step_has_the_path_of_its_policy():
    path = replace(STEP, policy="window:3", chunk=2).path()
    assert isinstance(path, functools.partial)
    with STEP.running("llama") as setting:
        result = path(setting.model, setting.problem, setting.objective)
    assert isinstance(result, StepResult)
    assert result.reference == "window:3"
