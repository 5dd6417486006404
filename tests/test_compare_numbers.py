"""Every number and word of a comparison, on gradients small enough to know them by hand."""

from __future__ import annotations

import math

import pytest
import torch
from gradient_mappings import gradients, noisy

from lsverify.compare import Limits, compare, rolled
from lsverify.errors import InputError
from lsverify.limits import Limit
from lsverify.slices import Slice

LIMITS = Limits()
W = "model.layers.2.mlp.up_proj.weight"


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_finding(expected, actual):
    (found,) = compare(expected, actual, limits=LIMITS).findings
    return found.detail


@pytest.mark.parametrize(
    ("expected", "actual", "detail"),
    [
        ({"w": f64(1)}, {}, "missing: the reference has it"),
        ({"w": f64(1)}, {"w": None}, "no gradient (None) where the reference has one"),
        ({"w": None}, {"w": f64(1, 0)}, "a gradient where the reference has none (None)"),
        (
            {"w": None},
            {"w": f64(0, 0)},
            "an exactly zero gradient where the reference has none (None)",
        ),
        ({"w": f64(1, 2)}, {"w": f64(1)}, "shape (1,), expected (2,)"),
        (
            {"w": f64(1)},
            {"w": torch.ones(1, dtype=torch.int64)},
            "dtype torch.int64, expected like torch.float64",
        ),
        (
            {"w": f64(1, math.nan)},
            {"w": f64(1, 1)},
            "reference: 1 of 2 values are not finite, first at (1,): nan",
        ),
        (
            {"w": f64(1, 1)},
            {"w": f64(1, math.inf)},
            "1 of 2 values are not finite, first at (1,): inf",
        ),
        ({}, {"w": f64(1)}, "extra: the reference does not know it"),
    ],
)
def test_a_finding_says_what_differs(expected, actual, detail):
    assert one_finding(expected, actual) == detail


def test_complex_and_integer_are_classes_of_their_own():
    found = compare({"w": torch.tensor([1 + 0j])}, {"w": torch.tensor([1])}, limits=LIMITS)
    assert [each.kind for each in found.findings] == ["dtype"]


def test_what_is_silent_on_both_sides_hides_nothing_behind_it():
    e = {"silent": None, "w": f64(1)}
    found = compare(e, {"silent": None, "w": f64(2)}, limits=LIMITS)
    assert (found.status, found.unverified) == ("failed", ("silent",))
    assert compare(e, {"silent": None, "w": None}, limits=LIMITS).unverified == ("silent",)
    assert compare(e, {"silent": f64(1), "w": f64(1)}, limits=LIMITS).unverified == ()
    assert compare(
        {"w": f64(1), "no": f64()}, {"w": f64(1), "no": f64()}, limits=LIMITS
    ).unverified == ("no",)


def test_what_one_side_lacks_counts_as_zero_there():
    e, a = {"w": f64(4), "gone": f64(3)}, {"w": f64(4)}
    lost = compare(e, a, limits=LIMITS)
    assert (lost.rel_l2, lost.cosine, lost.norm_ratio) == (3 / 5, 16 / 20, 4 / 5)
    gained = compare(a, e, limits=LIMITS)
    assert (gained.rel_l2, gained.cosine, gained.norm_ratio) == (3 / 4, 16 / 20, 5 / 4)


def test_a_reference_without_anything_left_has_lost_all_and_nothing_named_is_nothing_compared():
    assert compare({"w": f64(2)}, {}, limits=LIMITS).rel_l2 == 1.0
    assert compare({"w": None}, {}, limits=LIMITS).rel_l2 is None


def test_all_numbers_of_the_whole():
    e, a = {W: f64(3, 0), "b": f64(4)}, {W: f64(3, 1), "b": f64(4)}
    found = compare(
        e, a, limits=Limits(relative=0.1, source="by hand", relative_floor=1e-3, cap=0.5)
    )
    assert (found.limit, found.limit_source, found.relative_floor, found.cap) == (
        0.1,
        "by hand",
        1e-3,
        0.5,
    )
    assert (found.reference_norm, found.elements) == (5.0, 3)
    assert found.rel_l2 == 1 / 5
    assert found.one_minus_cosine == pytest.approx(1 - 25 / (5 * math.sqrt(26)))
    assert found.per_layer.keys() == {2}
    assert found.per_layer[2]["rel_l2"] == 1 / 3
    assert found.per_kind["up"]["rel_l2"] == 1 / 3
    assert sum(kind["rel_l2"] == 0 for kind in found.per_kind.values()) == len(found.per_kind) - 1


def test_all_numbers_of_a_tensor():
    limits = Limits(per_tensor={W: Limit(0.1, "measured")})
    found = compare({W: f64(3, 4)}, {W: f64(3, 2)}, limits=limits).tensors[0]
    assert (found.name, found.layer, found.shape, found.elements) == (W, 2, (2,), 2)
    assert (found.rel_l2, found.cosine) == (2 / 5, pytest.approx(17 / (5 * math.sqrt(13))))
    assert found.one_minus_cosine == pytest.approx(1 - 17 / (5 * math.sqrt(13)))
    assert found.norm_ratio == pytest.approx(math.sqrt(13) / 5)
    assert (found.limit, found.limit_source, found.allowance) == (0.1, "measured", 0.5)
    assert (found.worst.index, found.worst.expected, found.worst.actual) == ((1,), 4, 2)
    assert found.worst.difference == -2
    assert found.native_error is None


def test_no_share_without_a_mismatch_and_no_worst_without_an_element():
    found = compare({"w": f64(1), "no": f64()}, {"w": f64(1), "no": f64()}, limits=LIMITS)
    by_name = {each.name: each for each in found.tensors}
    assert by_name["w"].share_over is None
    assert by_name["no"].worst is None


def test_an_element_at_its_part_of_the_allowance_is_not_over_it():
    e, a = {"w": f64(1, 1, 1, 1)}, {"w": f64(4, 1.5, 1, 1)}
    found = compare(e, a, limits=Limits(relative=0.5))
    assert found.tensors[0].allowance == 1.0
    assert found.tensors[0].share_over == 1 / 4


def test_an_allowance_of_the_tensors_own_size_proves_nothing():
    e = {"w": f64(3), "v": f64(4)}
    found = compare(e, e, limits=Limits(relative=0.75, relative_floor=0.8))
    by_name = {each.name: each for each in found.tensors}
    assert (by_name["w"].allowance, by_name["w"].verdict) == (3.0, "below_floor")
    assert by_name["v"].verdict == "match"


def test_the_worst_comes_first_and_what_was_not_judged_last():
    e = {"silent": f64(0), "right": f64(1), "off": f64(1), "more": f64(1)}
    a = {"silent": f64(0), "right": f64(1), "off": f64(1.25), "more": f64(3)}
    found = compare(e, a, limits=Limits(relative=0.5))
    assert [each.name for each in found.tensors] == ["more", "off", "right", "silent"]
    assert found.worst_parameter == "more"
    passing = compare(e, a | {"more": f64(1)}, limits=Limits(relative=0.5))
    assert (passing.status, passing.worst_parameter) == ("proven", "off")
    assert [each.name for each in passing.tensors] == ["off", "more", "right", "silent"]


def test_of_a_tensor_and_a_slice_that_are_as_wrong_the_slice_is_named():
    parts = {"w": [Slice("all", (slice(0, 2),))]}
    found = compare({"w": f64(1, 1)}, {"w": f64(1, 2)}, limits=LIMITS, slices=parts)
    assert (found.worst_parameter, found.worst_slice) == ("w", "all")


def test_what_is_empty_stands_beside_zero_without_a_word():
    both = {"zero": f64(0), "empty": f64()}
    assert compare(both, both, limits=LIMITS).status == "proven_zero"


def test_none_and_what_is_not_finite_add_nothing_to_the_norm_of_the_reference():
    e = {"w": f64(3), "none": None, "nan": f64(math.nan), "inf": f64(math.inf)}
    assert compare(e, e, limits=LIMITS).reference_norm == 3.0


def test_the_negative_control_rolls_by_one_element():
    assert rolled({"w": f64(0, 1, 2, 3, 4, 5).view(2, 3)})["w"].tolist() == [[5, 0, 1], [2, 3, 4]]


def test_the_papers_limit_itself_passes_it():
    assert compare({"w": f64(100)}, {"w": f64(101)}, limits=LIMITS).paper_gate
    assert not compare({"w": f64(100)}, {"w": f64(101.001)}, limits=LIMITS).paper_gate


def test_a_fault_of_one_layer_is_placed_in_it():
    e = gradients()
    a = dict(e) | {W: noisy({W: e[W]}, 1e-3)[W]}
    found = compare(e, a, limits=LIMITS)
    assert [layer for layer, n in found.per_layer.items() if n["rel_l2"]] == [2]
    assert list(found.per_layer) == [0, 1, 2]


def test_the_reference_in_the_same_precision_stands_in_for_what_noise_names_and_for_nothing_else():
    halves = {"w": [Slice("a", (slice(0, 2),)), Slice("b", (slice(2, 4),))]}
    native = {"w": f64(1.5, 1.5, 1.5, 1.5)}
    limits = Limits(relative=0.25, native=native, noise={"w[b]": 2.0})
    found = compare(
        {"w": f64(1, 1, 1, 1)}, {"w": f64(1.5, 1.5, 1.5, 1.75)}, limits=limits, slices=halves
    )
    (whole,) = found.tensors
    a, b = whole.parts
    assert (whole.native_error, a.native_error, b.native_error) == (None, None, 0.25)
    assert (a.verdict, b.verdict, found.status) == ("mismatch", "match", "failed")


def test_a_native_reference_of_another_shape_stands_in_for_nothing():
    limits = Limits(relative=0.25, native={"w": f64(2, 2, 2)}, noise={"w": 2.0})
    assert compare({"w": f64(1)}, {"w": f64(2)}, limits=limits).tensors[0].native_error is None


def test_an_error_of_just_the_noise_accuses_nobody_and_passes_nowhere():
    limits = Limits(relative=0.25, noise={"w": 0.5})
    assert compare({"w": f64(1)}, {"w": f64(1.5)}, limits=limits).status == "reference_inconsistent"
    assert compare({"w": f64(1)}, {"w": f64(1.625)}, limits=limits).status == "failed"


def test_a_distance_of_just_the_allowance_to_the_native_reference_settles_it():
    limits = Limits(
        relative=0.25, native={"w": f64(1.5)}, noise={"w": 2.0}, inconsistent={"w": 0.5}
    )
    assert compare({"w": f64(1)}, {"w": f64(1.75)}, limits=limits).status == "proven"
    assert (
        compare({"w": f64(1)}, {"w": f64(1.875)}, limits=limits).status == "reference_inconsistent"
    )


def test_slices_that_leave_a_part_out_are_refused_in_one_line():
    line = "the slices of w cover 1 of its 2 elements: give slices that partition the tensor"
    with pytest.raises(InputError, match=f"^{line}$"):
        compare(
            {"w": f64(1, 1)},
            {"w": f64(1, 1)},
            limits=LIMITS,
            slices={"w": [Slice("a", (slice(1),))]},
        )
