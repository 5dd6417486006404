from __future__ import annotations

import pytest
import torch
from small_steps import GRPO, distance, gradients, problem_for

import lsverify.paths
from lsverify.errors import InputError, StalePromptState
from lsverify.models import build
from lsverify.paths import longstraw
from lsverify.precision import computing
from lsverify.references import stopped_reference, take_gradients
from lsverify.stale import StaleStates
from lsverify.watch import Watch

SHAPE = {"prompt_lengths": (9, 5), "group_sizes": (2, 1), "response_lengths": (3, 1)}


@pytest.fixture
def model():
    """A model of the test's own, whose weights it may move."""
    model = build("qwen3_5", seed=0)
    with computing(model, "float64"):
        yield model


@torch.no_grad()
def step(model):
    """An optimizer step, as far as a state can tell."""
    for parameter in model.parameters():
        parameter.mul_(1.01)


def captured(model, problem, states, policy="stale:3"):
    """How many tokens a step forwards without autograd: those of the prompts that it captures."""
    with Watch(model) as watch:
        longstraw(model, problem, GRPO, policy=policy, states=states)
    take_gradients(model)
    return watch.tokens().no_grad


def test_a_capture_serves_just_its_steps(model):
    problem, states = problem_for(model, **SHAPE), StaleStates(3)
    found = []
    for _ in range(5):
        found.append(captured(model, problem, states))
        step(model)
    assert found == [12, 0, 0, 12, 0]


def test_calls_at_the_same_weights_are_one_step(model):
    problem, states = problem_for(model, **SHAPE), StaleStates(2)
    assert [captured(model, problem, states, "stale:2") for _ in range(4)] == [12, 0, 0, 0]
    step(model)
    assert captured(model, problem, states, "stale:2") == 0
    step(model)
    assert captured(model, problem, states, "stale:2") == 12


def test_a_later_step_has_the_gradient_of_two_parameter_copies(model):
    problem, states = problem_for(model, **SHAPE), StaleStates(4)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    longstraw(model, problem, GRPO, policy="stale:4", states=states)
    step(model)
    expected = stopped_reference(
        model, problem, GRPO, lambda length: length - 1, captured=lambda member: old
    ).response
    found = gradients(longstraw, model, problem, policy="stale:4", states=states)
    assert distance(found, expected.gradients) <= 1e-12
    fresh = gradients(longstraw, model, problem, policy="detach")
    assert distance(found, fresh) > 1e-4


def test_without_kept_states_each_step_is_the_first(oracle):
    model = oracle("llama")
    problem = problem_for(model, **SHAPE)
    detach = gradients(longstraw, model, problem, policy="detach")
    assert distance(gradients(longstraw, model, problem, policy="stale:5"), detach) == 0.0


def test_weights_that_change_within_a_step_are_refused_for_an_old_state_too(model, monkeypatch):
    problem, states = problem_for(model, **SHAPE), StaleStates(3)
    longstraw(model, problem, GRPO, policy="stale:3", states=states)
    step(model)
    replay = lsverify.paths._replay

    def replay_and_step(*args):
        done = replay(*args)
        step(model)
        return done

    monkeypatch.setattr(lsverify.paths, "_replay", replay_and_step)
    with pytest.raises(StalePromptState, match="a step must not change them"):
        longstraw(model, problem, GRPO, policy="stale:3", states=states)


def test_states_that_have_served_are_dropped(model):
    states = StaleStates(1)
    for seed in range(3):
        captured(model, problem_for(model, **SHAPE, seed=seed), states, "stale:1")
        step(model)
        assert len(states._states) == 2


@pytest.mark.parametrize(
    ("arch", "policy", "told"),
    [
        ("llama", "kinds:recurrent", "state has no kind 'recurrent', it has attention"),
        ("qwen3_5", "kinds:sliding", "it has attention, conv, recurrent"),
        ("llama", "layers:1,7", r"layer 7 has no state, the layers that have are \[0, 1, 2, 3\]"),
    ],
)
def test_a_choice_of_what_the_model_has_not_is_refused(oracle, arch, policy, told):
    model = oracle(arch)
    with pytest.raises(InputError, match=told):
        longstraw(model, problem_for(model, **SHAPE), GRPO, policy=policy)
    take_gradients(model)


def test_roulette_asks_for_a_seed(oracle):
    model = oracle("llama")
    problem = problem_for(model, **SHAPE)
    object.__setattr__(problem, "seed", None)
    with pytest.raises(InputError, match="give the problem a seed of its own"):
        longstraw(model, problem, GRPO, policy="roulette:0.5")
    take_gradients(model)
