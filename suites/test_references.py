"""`full` = itself in every batched form = central differences = decoding; `stopped` = `full` cut in two.

    serial = batched, padded left = batched, padded right         (loss, log-probs, gradient)
    gradient . direction = slope of the loss, measured            (along the gradient, the state term, at random)
    log-probs = those of decoding with the library's plain cache, one token at a time
    response term + state term = full, at any stop
    both terms = those of a witness that uses no cache            (attention models)
    train() = eval()

All else is compared with these references, so a fault here would be a false truth. Guards against wrong masks,
positions and padding, a graph cut inside a reference, a fault that the stopped reference shares with the path.
Chained with the gradient rung: a path's gradient is the slope of the loss, or of the loss with the prompt stopped.
"""

import math

import pytest
import torch
from transformers.cache_utils import DynamicCache

from lsverify.objective import preset, token_logp
from lsverify.paths import full_autograd
from lsverify.problems import ProblemSpec
from lsverify.references import (
    central_difference,
    full_reference,
    split_gradient,
    stopped_reference,
    take_gradients,
)
from lsverify.steps import Step, hold_equal, hold_log_probs

UNEVEN = Step(
    spec=ProblemSpec(
        prompt_lengths=(21, 1, 12),
        group_sizes=(3, 2, 1),
        response_lengths=(6, 1, 9, 4, 2),
        seed=5,
        holes=True,
    ),
    objective=preset("dapo", advantage="batch_std", beta=0.04),
)
SMALL = Step(
    spec=ProblemSpec(prompt_lengths=(14, 11), group_sizes=(2,), response_lengths=(3, 1, 4), seed=6),
    objective=preset("grpo", beta=0.04),
)
STOPS = {
    "nothing": lambda length: 0,
    "one token": lambda length: min(1, length - 1),
    "half": lambda length: length // 2,
    "B": lambda length: length - 1,
}
# The slope is extrapolated from steps of 1e-3 and less: its own error is some 1e-10 of it.
SLOPE = 1e-8


def test_serial_equals_batched(arch):
    with UNEVEN.running(arch) as setting:
        step = setting.model, setting.problem, setting.objective
        full = full_reference(*step)
        for side in ("left", "right"):
            batched, case = full_autograd(*step, batched=True, padding=side), f"{arch} {side}"
            same = hold_equal(full.gradients, take_gradients(setting.model), case)
            assert same.status == "proven"
            hold_log_probs(full.log_probs, batched.log_probs, case)
            assert math.isclose(batched.loss, full.loss, rel_tol=1e-12)


@pytest.mark.parametrize("along", ["gradient", "state term", "random"])
def test_gradient_is_the_slope_of_the_loss(arch, along):
    with SMALL.running(arch) as setting:
        step = setting.model, setting.problem, setting.objective
        full = full_reference(*step).gradients
        stopped = stopped_reference(*step, STOPS["B"])
        generator = torch.Generator().manual_seed(7)
        directions = {
            "gradient": full,
            "state term": stopped.state,
            "random": {
                name: torch.randn(g.shape, generator=generator, dtype=g.dtype)
                for name, g in full.items()
                if g is not None
            },
        }
        direction = unit(directions[along])
        slope, error = central_difference(*step, direction)
    assert error <= SLOPE * abs(slope)
    assert abs(dot(full, direction) - slope) <= SLOPE * abs(slope)
    # The same measurement refuses a gradient that lacks the state term.
    assert abs(dot(stopped.response.gradients, direction) - slope) > 1e-3 * abs(slope)


def unit(gradients):
    """The direction of a gradient, of length one over all parameters."""
    present = {name: g for name, g in gradients.items() if g is not None}
    length = math.sqrt(dot(present, present))
    return {name: g / length for name, g in present.items()}


def dot(gradients, direction):
    return sum(float((gradients[name] * d).sum()) for name, d in direction.items())


def test_log_probs_equal_decoding_token_by_token(arch):
    with UNEVEN.running(arch) as setting:
        full = full_reference(setting.model, setting.problem, setting.objective)
        decoded = [
            token_logp(decode(setting.model, setting.problem.tokens(i), len(each)), each.tokens)
            for i, each in enumerate(setting.problem.responses)
        ]
    hold_log_probs(full.log_probs, decoded, arch)


@torch.no_grad()
def decode(model, tokens, length):
    """Logits [length, V] of the last `length` tokens' predecessors, each token alone in its forward pass."""
    cache, logits = DynamicCache(config=model.config), []
    for position, token in enumerate(tokens[:-1]):
        output = model(
            input_ids=token.view(1, 1),
            position_ids=torch.tensor([[position]]),
            cache=cache,
            use_cache=True,
        )
        logits.append(output.logits[0, -1])
    return torch.stack(logits[-length:])


@pytest.mark.parametrize("stop", STOPS)
def test_stopped_terms_sum_to_full(arch, stop):
    with UNEVEN.running(arch) as setting:
        step = setting.model, setting.problem, setting.objective
        full = full_reference(*step)
        stopped = stopped_reference(*step, STOPS[stop])
    assert hold_equal(full.gradients, stopped.total(), f"{arch} {stop}").status == "proven"
    hold_log_probs(full.log_probs, stopped.response.log_probs, f"{arch} {stop}")


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_stopped_terms_equal_a_witness_without_cache(family, stop):
    with UNEVEN.running(family) as setting:
        step = setting.model, setting.problem, setting.objective
        stopped = stopped_reference(*step, STOPS[stop])
        witness = split_gradient(*step, STOPS[stop])
    case = f"{family} {stop}"
    response = hold_equal(witness.response.gradients, stopped.response.gradients, case)
    assert response.status == "proven"
    # What the prompt's state does not depend on has no gradient with a cache, and exactly zero without.
    reached = {name for name, g in stopped.state.items() if g is not None}
    assert bool(reached) == (stop != "nothing")
    for name in stopped.state.keys() - reached:
        assert witness.state[name] is None or not witness.state[name].any()
    if reached:
        expected, actual = ({n: s[n] for n in reached} for s in (witness.state, stopped.state))
        assert hold_equal(expected, actual, case).status == "proven"


def test_train_equals_eval(arch):
    found = []
    for training in (True, False):
        step = Step(spec=UNEVEN.spec, objective=UNEVEN.objective, training=training)
        with step.running(arch) as setting:
            assert setting.model.training is training
            found.append(full_reference(setting.model, setting.problem, setting.objective))
    trained, evaluated = found
    assert trained.loss == evaluated.loss
    for name, gradient in trained.gradients.items():
        other = evaluated.gradients[name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name
