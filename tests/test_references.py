from __future__ import annotations

import math

import pytest
import torch
from small_steps import GRPO, distance, gradients, problem_for
from torch import nn

from lsverify.cases import DEFAULT_ARCHS
from lsverify.models import TINY, build, tiny
from lsverify.objective import Scores, preset
from lsverify.paths import full_autograd, full_score
from lsverify.precision import computing
from lsverify.references import (
    Reference,
    Stopped,
    central_difference,
    full_reference,
    split_gradient,
    stopped_reference,
    take_gradients,
)

ARCHS = sorted(DEFAULT_ARCHS)
UNEVEN = {"prompt_lengths": (9, 5), "group_sizes": (2, 3), "response_lengths": (3, 1, 4, 1, 2)}


def before_the_last(count):
    """Where a prompt counts as constant: all but its last `count` tokens."""
    return lambda length: max(length - count, 0)


def dot(a, b):
    return sum(float((a[name] * b[name]).sum()) for name in a)


def norm(a):
    return math.sqrt(dot(a, a))


def unit(direction):
    size = norm(direction)
    return {name: along / size for name, along in direction.items()}


def reached(grads):
    return {name: g for name, g in grads.items() if g is not None}


# Taking gradients --------------------------------------------------------------------------------


def test_gradients_are_taken_out_of_the_model():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
    model[1].bias.requires_grad_(False)
    model[0].weight.grad = torch.ones(2, 2)
    model[1].bias.grad = torch.ones(1)
    taken = take_gradients(model)
    assert taken["0.weight"].tolist() == [[1, 1], [1, 1]]
    assert taken["1.weight"] is None
    assert "1.bias" not in taken
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_full_reference_does_not_add_to_what_is_there(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    expected = gradients(full_autograd, model, problem)
    full_autograd(model, problem, GRPO)
    found = full_reference(model, problem, GRPO)
    assert distance(found.gradients, expected) == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.loss == full_autograd(model, problem, GRPO).loss
    assert [len(row) for row in found.log_probs] == [3, 1]


# Response term and state term --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "count"),
    [("llama", 1), ("mistral", 1), ("mistral", 4), ("qwen3_5", 3), ("glm_moe_dsa", 4)],
)
def test_response_term_and_state_term_sum_to_the_full_gradient(oracle, arch, count):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    full = full_reference(model, problem, GRPO)
    found = stopped_reference(model, problem, GRPO, before_the_last(count))
    assert distance(found.total(), full.gradients) <= 1e-12
    assert distance(found.response.gradients, full.gradients) > 1e-2
    assert found.response.loss == pytest.approx(full.loss, rel=1e-12)
    for row, expected in zip(found.response.log_probs, full.log_probs, strict=True):
        assert torch.allclose(row, expected, rtol=0, atol=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_stopped_leaves_no_state_term(oracle):
    model = oracle("llama")
    problem = problem_for(model, **UNEVEN)
    found = stopped_reference(model, problem, GRPO, lambda length: 0)
    assert reached(found.state) == {}
    expected = full_reference(model, problem, GRPO).gradients
    assert distance(found.response.gradients, expected) <= 1e-12
    assert distance(found.total(), expected) <= 1e-12


def test_each_prompt_is_stopped_at_its_own_place(oracle):
    model = oracle("llama")
    problem = problem_for(model, **UNEVEN)
    asked = []

    def stop(length):
        asked.append(length)
        return 0 if length == 5 else 8

    found = stopped_reference(model, problem, GRPO, stop)
    assert asked == [9, 9, 5, 5, 5]
    both = stopped_reference(model, problem, GRPO, before_the_last(1))
    assert distance(found.response.gradients, both.response.gradients) > 1e-3


def test_tied_weights_are_one_parameter_in_both_terms():
    config = TINY["llama"]()
    config.tie_word_embeddings = True
    model = tiny(config, seed=0, dtype="float64")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with computing(model, "float64"):
        problem = problem_for(model)
        found = stopped_reference(model, problem, GRPO, before_the_last(1))
        assert "lm_head.weight" not in found.response.gradients
        assert distance(found.total(), full_reference(model, problem, GRPO).gradients) <= 1e-12


def test_adapters_have_both_terms():
    model = build("llama", seed=0, lora=True)
    with computing(model, "float64"):
        problem = problem_for(model)
        found = stopped_reference(model, problem, GRPO, before_the_last(1))
        assert reached(found.state)
        assert distance(found.total(), full_reference(model, problem, GRPO).gradients) <= 1e-12


def test_scores_that_the_problem_lacks_are_handed_in(oracle):
    model, objective = oracle("llama"), preset("grpo", beta=0.5, kl="k3")
    problem = problem_for(model, reference=False)
    rows = tuple(row + 0.1 for row in full_score(model, problem))
    found = stopped_reference(model, problem, objective, before_the_last(1), Scores(ref_logp=rows))
    given = problem.replace_logps(ref=rows)
    expected = stopped_reference(model, given, objective, before_the_last(1))
    assert distance(found.response.gradients, expected.response.gradients) == 0


def test_a_parameter_that_only_one_term_reaches_is_in_the_sum():
    one, two = torch.ones(1), torch.full((1,), 2.0)
    response = Reference(
        gradients={"a": one, "b": None, "c": two, "d": None}, loss=0.0, log_probs=()
    )
    total = Stopped(response=response, state={"a": two, "b": one, "c": None, "d": None}).total()
    assert {name: None if g is None else g.item() for name, g in total.items()} == {
        "a": 3.0,
        "b": 1.0,
        "c": 2.0,
        "d": None,
    }


# The witness without a cache ---------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_a_witness_without_a_cache_agrees_where_modules_work_token_by_token(oracle, arch, count):
    model = oracle(arch)
    problem = problem_for(model, **UNEVEN)
    witness = split_gradient(model, problem, GRPO, before_the_last(count))
    found = stopped_reference(model, problem, GRPO, before_the_last(count))
    assert distance(witness.response.gradients, found.response.gradients) <= 1e-12
    if count == 9:
        assert reached(witness.state) == {}
        return
    for name, g in witness.state.items():
        expected = found.state[name]
        if expected is None:  # what no state depends on: the last block after its keys and values
            assert not g.any()
        else:
            assert (g - expected).norm() <= 1e-12 * norm(reached(found.state))


def test_the_witness_puts_forwards_and_parameters_back(oracle):
    model = build("llama", seed=0)
    problem = problem_for(model)
    before = {name: id(p) for name, p in model.named_parameters()}
    split_gradient(model, problem, GRPO, before_the_last(1))
    assert not [name for name, m in model.named_modules() if "forward" in vars(m)]
    assert {name: id(p) for name, p in model.named_parameters()} == before
    mine = model.lm_head.forward = model.lm_head.forward
    with pytest.raises(TypeError, match="indices must be integers"):
        split_gradient(model, problem, GRPO, lambda length: "here")
    assert vars(model.lm_head)["forward"] is mine
    assert {name: id(p) for name, p in model.named_parameters()} == before


# Central differences -----------------------------------------------------------------------------


def directions(model, grads):
    generator = torch.Generator().manual_seed(0)
    noise = {
        name: torch.randn(g.shape, generator=generator, dtype=g.dtype)
        for name, g in reached(grads).items()
    }
    return {"gradient": unit(reached(grads)), "random": unit(noise)}


@pytest.mark.parametrize("arch", ARCHS)
def test_the_full_gradient_is_the_slope_of_the_loss(oracle, arch):
    model = oracle(arch)
    problem = problem_for(model)
    grads = full_reference(model, problem, GRPO).gradients
    for direction in directions(model, grads).values():
        slope, error = central_difference(model, problem, GRPO, direction)
        expected = dot(direction, {name: grads[name] for name in direction})
        assert error <= 1e-6 * norm(reached(grads))
        assert abs(slope - expected) <= 10 * error + 1e-9


def test_a_gradient_without_its_state_term_is_not_the_slope(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    found = stopped_reference(model, problem, GRPO, before_the_last(1))
    direction = unit(reached(found.state))
    slope, error = central_difference(model, problem, GRPO, direction)
    expected = dot(direction, {name: found.response.gradients[name] for name in direction})
    assert abs(slope - expected) > 1e6 * error


def test_the_weights_are_restored_to_the_bit(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    direction = {name: torch.full_like(p, 1e-3) for name, p in before.items()}
    central_difference(model, problem, GRPO, direction)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    direction["model.norm.weight"] = torch.ones(7)
    with pytest.raises(RuntimeError, match="size"):
        central_difference(model, problem, GRPO, direction)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_any_shrinking_steps_extrapolate_to_the_same_slope(oracle):
    model = oracle("llama")
    problem = problem_for(model)
    grads = full_reference(model, problem, GRPO).gradients
    direction = directions(model, grads)["gradient"]
    halved, error = central_difference(model, problem, GRPO, direction, (4e-3, 2e-3, 1e-3))
    thirds, _ = central_difference(model, problem, GRPO, direction, (9e-3, 3e-3, 1e-3))
    uneven, _ = central_difference(model, problem, GRPO, direction, (5e-3, 3e-3, 1e-3))
    plain, unknown = central_difference(model, problem, GRPO, direction, (9e-3,))
    expected = norm(reached(grads))
    assert abs(plain - expected) > 100 * abs(thirds - expected)
    for slope in (halved, thirds, uneven):
        assert abs(slope - expected) <= 1e-8 * expected
    assert error < 1e-6
    assert unknown == math.inf
