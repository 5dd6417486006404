import math
from fractions import Fraction

import pytest
import torch
from gradient_mappings import gradients

from lsverify.norms import Norms, distance, norm


def exact_one_minus_cosine(e, a):
    dot = sum(Fraction(x) * Fraction(y) for x, y in zip(e, a, strict=True))
    ee, aa = sum(Fraction(x) ** 2 for x in e), sum(Fraction(x) ** 2 for x in a)
    squared = dot * dot / (ee * aa)
    sine_squared = float(1 - squared)
    return sine_squared / (1 + math.sqrt(1 - sine_squared)) if dot > 0 else 2.0


@pytest.mark.parametrize("size", [1e-1, 1e-4, 1e-8, 1e-12])
def test_one_minus_cosine_keeps_its_digits_near_one(size):
    generator = torch.Generator().manual_seed(3)
    e = torch.randn(40, generator=generator, dtype=torch.float64)
    a = e + size * torch.randn(40, generator=generator, dtype=torch.float64)
    found = distance(a, e).one_minus_cosine
    assert found == pytest.approx(exact_one_minus_cosine(e.tolist(), a.tolist()), rel=1e-3)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 3.0, 1e3])
def test_a_scaled_tensor_has_cosine_one(factor):
    e = gradients()["lm_head.weight"]
    numbers = distance(factor * e, e)
    assert numbers.cosine == pytest.approx(1, abs=1e-12)
    assert numbers.norm_ratio == pytest.approx(factor)
    assert distance(-factor * e, e).cosine == pytest.approx(-1, abs=1e-12)


def test_numbers_are_defined_where_a_norm_is_zero():
    assert Norms(0.0, 0.0, 0.0).numbers() == {
        "rel_l2": 0.0,
        "cosine": 1.0,
        "one_minus_cosine": 0.0,
        "norm_ratio": 1.0,
    }
    gone = Norms(2.0, 2.0, 0.0)
    assert (gone.rel_l2, gone.cosine, gone.norm_ratio) == (1.0, None, 0.0)
    appeared = Norms(2.0, 0.0, 2.0)
    assert (appeared.rel_l2, appeared.cosine, appeared.norm_ratio) == (None, None, None)
    overflown = Norms(math.inf, 1.0, 1.0)
    assert (overflown.rel_l2, overflown.cosine) == (None, None)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1.0, 1e200, 1e300])
def test_norms_hold_at_the_edges_of_the_range(scale):
    assert norm(torch.tensor([3.0, 4.0], dtype=torch.float64) * scale) == pytest.approx(5 * scale)
