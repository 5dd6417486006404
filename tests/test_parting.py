import pytest
import torch
from judged import QUICK

from lsverify.evidence import CaseConfig
from lsverify.ladder import judge
from lsverify.paths import full_autograd
from lsverify.rungs.parting import first_layer
from lsverify.trace import Place

HERE = Place("p", -1, 3)
THERE = Place("p", 1, 5)


def bent_after(layer):
    """A path whose layer of this number gives values that are a little off."""

    def path(model, problem, objective):
        handle = model.model.layers[layer].mlp.register_forward_hook(lambda m, a, out: 1.01 * out)
        try:
            return full_autograd(model, problem, objective)
        finally:
            handle.remove()

    return path


def in_layer_0(model, problem, objective):
    return bent_after(0)(model, problem, objective)


def in_layer_2(model, problem, objective):
    return bent_after(2)(model, problem, objective)


def in_the_head(model, problem, objective):
    handle = model.lm_head.register_forward_hook(lambda m, a, out: 1.01 * out)
    try:
        return full_autograd(model, problem, objective)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("in_layer_0", "values part first in layers.0, at position 0 (the prompt)"),
        ("in_layer_2", "values part first in layers.2, at position 0 (the prompt)"),
        ("in_the_head", "every layer's values agree"),
    ],
)
def test_a_failure_says_where_values_part(name, told):
    case = judge(
        CaseConfig(arch="llama", candidate=f"test_parting:{name}", require="forward", **QUICK)
    )
    (rung,) = (rung for rung in case.rungs if rung.name == "forward")
    assert rung.status == "failed"
    assert told in rung.detail


def test_the_first_layer_is_the_models_first_and_not_the_dictionarys_smallest():
    expected = {("layers.2", HERE): torch.ones(4), ("layers.10", HERE): torch.ones(4)}
    actual = {("layers.2", HERE): torch.ones(4), ("layers.10", HERE): 2 * torch.ones(4)}
    assert "layers.10, at position 3 (the prompt)" in first_layer(expected, actual, 1e-9)


def test_a_token_that_only_one_side_has_is_passed_over_and_nan_parts():
    expected = {("layers.0", HERE): torch.ones(4), ("layers.0", THERE): torch.ones(4)}
    actual = {("layers.0", THERE): torch.full((4,), torch.nan)}
    assert "position 5 (response 1)" in first_layer(expected, actual, 1e-9)


def test_values_that_could_not_be_told_are_not_said_to_agree():
    value = torch.ones(2)
    expected = {("layers.0", HERE): value, ("layers.0", THERE): value}
    told = first_layer(expected, {("layers.0", HERE): value}, limit=1e-9)
    assert told == "every layer's values agree at the 1 of 2 places where they could be told"
