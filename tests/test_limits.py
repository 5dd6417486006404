import math

import pytest
import torch
from gradient_mappings import copy, gradients, noisy, thirds

from lsverify.compare import Limits, compare, measured_limits, message
from lsverify.errors import InputError
from lsverify.limits import Limit


@pytest.mark.parametrize(
    "bad", [{"relative": 1.0}, {"relative": -1e-9}, {"relative_floor": math.nan}]
)
def test_limits_outside_their_range_are_refused(bad):
    with pytest.raises(InputError, match=rf"Limits\.{next(iter(bad))} is .* allowed is"):
        Limits(**bad)


def test_limit_zero_asks_for_equality():
    e = gradients()
    assert compare(e, copy(e), limits=Limits(relative=0.0)).status == "proven"
    assert compare(e, noisy(e, 1e-16), limits=Limits(relative=0.0)).status == "failed"


def measured(oracle, reference, **overrides):
    options = {"factor": 10, "cap": 1e-3, "dtype": torch.float32} | overrides
    return measured_limits(oracle, reference, **options)


def test_measured_limits_pass_the_same_noise_and_refuse_a_fault_above_it():
    oracle = gradients()
    limits = measured(oracle, noisy(oracle, 1e-5, seed=1))
    other = noisy(oracle, 1e-5, seed=2)
    found = compare(oracle, other, limits=limits)
    assert found.status == "proven"
    assert "10 x the float32 floor" in found.tensors[0].limit_source
    other["lm_head.weight"] = other["lm_head.weight"] * 1.001
    assert compare(oracle, other, limits=limits).status == "failed"


def test_a_measured_limit_is_at_least_a_few_eps():
    oracle = gradients()
    limits = measured(oracle, copy(oracle))
    limit = limits.of("lm_head.weight")
    assert limit.value == 4 * torch.finfo(torch.float32).eps
    assert limit.source.startswith("4 eps of float32")
    assert limits.of("never measured").source.endswith("nothing was measured for it")


def test_a_floor_above_the_cap_is_inconsistent_and_never_a_wider_limit():
    oracle = gradients()
    reference = noisy(oracle, 1e-6)
    reference["lm_head.weight"] = -reference["lm_head.weight"]
    limits = measured(oracle, reference)
    assert limits.inconsistent == {"lm_head.weight": pytest.approx(2.0, rel=1e-3)}
    assert limits.of("lm_head.weight").value == 1e-3
    found = compare(oracle, noisy(oracle, 1e-6, seed=2), limits=limits)
    assert (found.status, found.passed) == ("reference_inconsistent", False)
    assert "lm_head.weight: the reference's own floor 2.000e+00 is above the cap" in message(found)


def test_the_cap_bounds_the_floor_itself_and_not_the_factor_on_it():
    oracle = gradients()
    assert measured(oracle, noisy(oracle, 5e-4)).inconsistent == {}
    above = measured(oracle, noisy(oracle, 2e-3))
    assert set(above.inconsistent) == set(oracle)
    assert max(limit.value for limit in above.per_tensor.values()) == 1e-3


def test_a_name_that_the_oracle_does_not_know_is_inconsistent():
    oracle = gradients()
    assert measured(oracle, copy(oracle) | {"new": None}).inconsistent == {"new": math.inf}


def test_a_certain_failure_is_not_excused_by_an_inconsistent_reference():
    oracle = gradients()
    reference = noisy(oracle, 1e-6)
    reference["lm_head.weight"] = -reference["lm_head.weight"]
    limits = measured(oracle, reference)
    candidate = noisy(oracle, 1e-6, seed=2)
    assert (
        compare(
            oracle, candidate | {"lm_head.weight": oracle["lm_head.weight"] * 3}, limits=limits
        ).status
        == "reference_inconsistent"
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert compare(oracle, candidate | {name: oracle[name] * 3}, limits=limits).status == "failed"


@pytest.mark.parametrize("value", [None, torch.zeros(2), torch.full((12, 8), math.nan)])
def test_a_reference_that_differs_from_the_oracle_in_structure_is_inconsistent(value):
    oracle = gradients()
    reference = copy(oracle) | {"lm_head.weight": value}
    assert measured(oracle, reference).inconsistent == {"lm_head.weight": math.inf}
    del reference["lm_head.weight"]
    assert measured(oracle, reference).inconsistent == {"lm_head.weight": math.inf}


def test_a_true_zero_gradient_does_not_make_the_precision_inconsistent():
    oracle = gradients()
    name = "model.layers.0.self_attn.k_proj.weight"
    oracle[name] = oracle[name] * 1e-19
    reference = noisy(oracle, 1e-8)
    limits = measured(oracle, reference)
    assert limits.inconsistent == {}
    assert compare(oracle, noisy(oracle, 1e-8, seed=2), limits=limits).status == "proven"


def test_a_lucky_draw_of_few_elements_does_not_shrink_the_limit():
    oracle = gradients() | {"scalar": torch.ones(1, dtype=torch.float64)}
    reference = noisy(oracle, 1e-5) | {"scalar": torch.ones(1, dtype=torch.float64)}
    assert measured(oracle, reference).of("scalar").value == pytest.approx(1e-4, rel=0.2)


def test_slices_are_measured_apart():
    oracle = {"w": torch.ones(300, dtype=torch.float64)}
    reference = {"w": oracle["w"].clone()}
    reference["w"][:100] += 1e-5
    limits = measured(oracle, reference, slices={"w": thirds(100)})
    assert limits.of("w", "q").value == pytest.approx(1e-4)
    assert limits.of("w", "k").source.startswith("4 eps")
    assert limits.of("w", "unheard of") == limits.of("w")


@pytest.mark.parametrize(
    "bad", [{"factor": 0.5}, {"cap": 1.0}, {"cap": 1e-9}, {"dtype": torch.int64}, {"cap": math.nan}]
)
def test_measured_limits_refuse_what_makes_no_limit(bad):
    with pytest.raises(InputError):
        measured({}, {}, **bad)


def test_a_tensor_that_differs_only_as_a_whole_is_still_reported():
    e = {"w": torch.ones(300, dtype=torch.float64)}
    limits = Limits(
        relative=0.5,
        per_tensor={"w": Limit(1e-9, "tight")}
        | dict.fromkeys(("w[q]", "w[k]", "w[v]"), Limit(0.5, "loose")),
    )
    found = compare(e, {"w": e["w"] * 1.1}, limits=limits, slices={"w": thirds(100)})
    assert (found.status, found.worst_slice) == ("failed", None)
    assert "  w: relative L2 1.000e-01" in message(found)


def test_an_error_that_the_precision_makes_by_itself_passes_nowhere_and_accuses_nobody():
    oracle = gradients()
    limits = measured_limits(oracle, noisy(oracle, 2e-3), factor=8.0, cap=1e-2, dtype=torch.float32)
    assert limits.inconsistent == {}
    assert all(limit.value == 1e-2 for limit in limits.per_tensor.values())
    for size, status in ((5e-3, "proven"), (1.3e-2, "reference_inconsistent"), (4e-2, "failed")):
        assert compare(oracle, noisy(oracle, size), limits=limits).status == status


def test_where_the_cap_cuts_the_limit_the_reference_in_the_same_precision_may_stand_in():
    oracle = gradients()
    native = noisy(oracle, 0.2)
    limits = measured(oracle, native)
    assert limits.inconsistent
    rounded = noisy(native, 1e-4)
    assert compare(oracle, rounded, limits=limits).status == "proven"
    # Neither near the one nor near the other, and not beyond what the precision does by itself.
    other = noisy(native, 0.05)
    assert compare(oracle, other, limits=limits).status == "reference_inconsistent"
    wrong = {name: 5 * g for name, g in native.items()}
    assert compare(oracle, wrong, limits=limits).status == "failed"


def test_the_native_reference_excuses_nothing_that_can_be_measured():
    oracle = gradients()
    native = noisy(oracle, 1e-5)
    limits = measured(oracle, native)
    assert not limits.noise
    wrong = noisy(native, 5e-4)
    assert compare(oracle, wrong, limits=limits).status == "failed"


def test_the_floor_is_the_largest_over_the_orders_of_a_computation():
    oracle = gradients()
    lucky, usual = noisy(oracle, 1e-7, seed=1), noisy(oracle, 1e-5, seed=2)
    other = noisy(oracle, 2e-5, seed=3)
    assert compare(oracle, other, limits=measured(oracle, lucky)).status == "failed"
    options = {"factor": 10, "cap": 1e-3, "dtype": torch.float32}
    both = measured_limits(oracle, lucky, usual, **options)
    assert compare(oracle, other, limits=both).status == "proven"
    assert both.per_tensor == measured_limits(oracle, usual, lucky, **options).per_tensor
