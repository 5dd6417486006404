from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lsverify.optimizers import PROBES, ClosedForm, TorchStep
from lsverify.paths import Update

SHAPES = {"a": (3, 4), "b": (5,), "c": ()}


class Named(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)


def gradients(seed, without=()):
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {name: None if name in without else g for name, g in drawn.items()}


def two_ways(update, steps):
    """Weights after `steps` (a list of gradient mappings) in closed form, and by torch."""
    model = Named()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    closed, theirs = ClosedForm(update), TorchStep(model, update)
    for step in steps:
        weights = closed.step(weights, step)
        for name, gradient in step.items():
            getattr(model, name).grad = None if gradient is None else gradient.clone()
        theirs.step()
        assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model.frozen.detach(), torch.ones(2, dtype=torch.float64))
    return weights, {name: getattr(model, name).detach() for name in weights}


@pytest.mark.parametrize(
    ("kind", "decay", "clip"),
    list(itertools.product(["sgd", "adamw"], [0.0, 0.1], [None, 0.5, 100.0])),
)
def test_closed_form_equals_torch_over_three_steps(kind, decay, clip):
    update = Update(kind=kind, lr=0.03, weight_decay=decay, max_grad_norm=clip, betas=(0.8, 0.95))
    ours, theirs = two_ways(update, [gradients(seed) for seed in range(3)])
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("update", PROBES, ids=lambda update: update.kind)
def test_a_gradient_that_is_none_in_some_steps_is_counted_by_parameter(update):
    steps = [gradients(0, without="a"), gradients(1), gradients(2, without="bc"), gradients(3)]
    ours, theirs = two_ways(update, steps)
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-14, atol=1e-15)


def test_a_parameter_without_gradient_is_not_decayed():
    update = Update(kind="adamw", lr=0.1, weight_decay=0.5)
    before = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    after = ClosedForm(update).step(before, gradients(0, without="b"))
    assert torch.equal(after["b"], before["b"])
    assert not torch.equal(after["a"], before["a"])


def test_no_gradient_at_all_moves_nothing():
    before = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    after = ClosedForm(PROBES[0]).step(before, gradients(0, without="abc"))
    assert all(torch.equal(after[name], before[name]) for name in SHAPES)


def test_clipping_uses_the_norm_of_all_gradients_together():
    before = {"a": torch.zeros(1, dtype=torch.float64), "b": torch.zeros(1, dtype=torch.float64)}
    step = {
        "a": torch.tensor([3.0], dtype=torch.float64),
        "b": torch.tensor([4.0], dtype=torch.float64),
    }
    after = ClosedForm(Update(kind="sgd", lr=1.0, max_grad_norm=1.0)).step(before, step)
    scale = 1.0 / (5.0 + 1e-6)
    assert after["a"].item() == pytest.approx(-3 * scale, rel=1e-15)
    assert after["b"].item() == pytest.approx(-4 * scale, rel=1e-15)


def test_weights_and_gradients_given_are_left_alone():
    update = Update(kind="adamw", lr=0.1, weight_decay=0.5, max_grad_norm=0.1)
    weights = {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    step = gradients(0)
    copies = {name: g.clone() for name, g in step.items()}
    ClosedForm(update).step(weights, step)
    assert all(torch.equal(value, torch.ones_like(value)) for value in weights.values())
    assert all(torch.equal(step[name], copies[name]) for name in SHAPES)


def test_the_probes_clip():
    norm = torch.cat([g.flatten() for g in gradients(0).values()]).norm().item()
    assert {probe.kind for probe in PROBES} == {"sgd", "adamw"}
    assert all(probe.max_grad_norm < norm for probe in PROBES)


def test_moments_carry_an_optimizer_over_to_another():
    update = Update(kind="adamw", lr=0.1)
    models = [Named(), Named(), Named()]
    whole, before, after = (TorchStep(model, update) for model in models)
    moved(models[0], whole, 0, 1)
    moved(models[1], before, 0)
    models[2].load_state_dict(models[1].state_dict())
    after.resume(before.moments())
    assert {name.rpartition("/")[2] for name in before.moments()} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    moved(models[2], after, 1)
    moved(models[1], TorchStep(models[1], update), 1)
    for name in SHAPES:
        assert torch.equal(getattr(models[2], name), getattr(models[0], name))
        assert not torch.equal(getattr(models[1], name), getattr(models[0], name))


def moved(model, optimizer, *seeds):
    for seed in seeds:
        for name, gradient in gradients(seed).items():
            getattr(model, name).grad = gradient
        optimizer.step()
