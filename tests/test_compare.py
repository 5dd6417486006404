import json
import math

import pytest
import torch
from gradient_mappings import copy, gradients, noisy, thirds

from lsverify.compare import Limits, compare, message, rolled
from lsverify.errors import InputError
from lsverify.norms import norm
from lsverify.slices import Slice

LIMITS = Limits()


def result_of(comparison, name):
    (found,) = (t for t in comparison.tensors if t.name == name)
    return found


def test_equal_gradients_are_proven_with_every_tensor_counted():
    e = gradients()
    found = compare(e, copy(e), limits=LIMITS)
    assert (found.status, found.passed, found.rel_l2, found.cosine) == ("proven", True, 0.0, 1.0)
    assert found.counts["match"] == len(e)
    assert found.elements == sum(g.numel() for g in e.values())
    assert found.rolled_rel_l2 is None
    assert found.hints == []


def test_rounding_noise_passes_and_ten_limits_of_it_do_not():
    e = gradients()
    assert compare(e, noisy(e, 1e-14), limits=LIMITS).status == "proven"
    assert compare(e, noisy(e, 1e-11), limits=LIMITS).status == "failed"


def test_the_error_at_the_limit_passes_and_above_it_does_not():
    e = {"w": torch.tensor([1.0], dtype=torch.float64)}
    limits = Limits(relative=0.25)
    assert compare(e, {"w": torch.tensor([1.25])}, limits=limits).passed
    assert not compare(e, {"w": torch.tensor([1.2500001])}, limits=limits).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_everywhere_fails_with_no_number_that_looks_good(value):
    e = gradients()
    found = compare(e, {n: torch.full_like(g, value) for n, g in e.items()}, limits=LIMITS)
    assert (found.status, found.rel_l2, found.paper_gate) == ("failed", None, False)
    assert {f.kind for f in found.findings} == {"non_finite"}


def test_one_nan_in_one_tensor_is_located():
    e = gradients()
    a = copy(e)
    a["lm_head.weight"][3, 2] = math.nan
    found = compare(e, a, limits=LIMITS)
    assert found.status == "failed"
    assert found.worst_parameter == "lm_head.weight"
    assert "1 of 96 values are not finite, first at (3, 2): nan" in message(found)


def test_a_reference_that_is_not_finite_is_inconsistent():
    e = gradients()
    e["lm_head.weight"][0, 0] = math.inf
    found = compare(e, copy(e), limits=LIMITS)
    assert found.status == "reference_inconsistent"
    assert [f.kind for f in found.findings] == ["reference_non_finite"]


@pytest.mark.parametrize(
    "named", [{}, {"w": None}, {"w": torch.zeros(0)}, {"w": torch.zeros(0, 4), "v": None}]
)
def test_nothing_compared_is_vacuous(named):
    found = compare(named, dict(named), limits=LIMITS)
    assert (found.status, found.rel_l2, found.paper_gate) == ("vacuous", None, False)
    assert found.elements == 0


def test_zero_on_both_sides_is_proven_zero_and_on_one_side_fails():
    zero = {n: torch.zeros_like(g) for n, g in gradients().items()}
    found = compare(zero, copy(zero), limits=LIMITS)
    assert (found.status, found.rel_l2, found.cosine) == ("proven_zero", 0.0, 1.0)
    tiny = copy(zero)
    tiny["lm_head.weight"][0, 0] = 5e-324
    assert compare(zero, tiny, limits=LIMITS).status == "failed"
    assert compare(gradients(), zero, limits=LIMITS).status == "failed"


def test_none_and_zero_are_distinct_in_both_directions():
    e = gradients()
    none, name = dict(e), "model.layers.1.self_attn.k_proj.weight"
    none[name] = None
    zero = dict(e) | {name: torch.zeros_like(e[name])}

    lost = compare(zero, none, limits=LIMITS)
    assert [(f.name, f.kind) for f in lost.findings] == [(name, "no_gradient")]
    gained = compare(none, zero, limits=LIMITS)
    assert [(f.name, f.kind) for f in gained.findings] == [(name, "unexpected_gradient")]
    assert "an exactly zero gradient where the reference has none" in gained.findings[0].detail
    assert lost.status == gained.status == "failed"
    both = compare(none, dict(none), limits=LIMITS)
    assert both.status == "proven"
    assert both.unverified == (name,)


def test_a_missing_gradient_counts_as_zero_in_the_global_numbers():
    e = gradients()
    a = dict(e) | {"lm_head.weight": None}
    found = compare(e, a, limits=LIMITS)
    share = norm(e["lm_head.weight"]) / found.reference_norm
    assert found.rel_l2 == pytest.approx(share)
    assert (found.worst_parameter, found.worst_rel_l2) == ("lm_head.weight", 1.0)


def test_all_structural_findings_are_collected_and_values_still_compared():
    e = {n: torch.ones(2, 3) for n in ("missing", "none", "shape", "dtype", "nan", "wrong", "ok")}
    e["unexpected"] = None
    a = {n: g for n, g in e.items() if n != "missing"} | {
        "none": None,
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, 3, dtype=torch.int64),
        "nan": torch.full((2, 3), math.nan),
        "wrong": torch.full((2, 3), 2.0),
        "unexpected": torch.ones(1),
        "extra": torch.ones(1),
    }
    found = compare(e, a, limits=LIMITS)
    assert {f.name: f.kind for f in found.findings} == {
        "missing": "missing",
        "none": "no_gradient",
        "shape": "shape",
        "dtype": "dtype",
        "nan": "non_finite",
        "unexpected": "unexpected_gradient",
        "extra": "extra",
    }
    assert {t.name: t.verdict for t in found.tensors} == {"wrong": "mismatch", "ok": "match"}
    text = message(found)
    assert all(f"  {name}: " in text for name in ("missing", "shape", "extra", "wrong"))


def test_floating_dtypes_are_one_class_and_layouts_do_not_matter():
    e = {"w": torch.eye(4, dtype=torch.float64), "c": torch.tensor([1 + 2j])}
    a = {"w": torch.eye(4, dtype=torch.bfloat16).to_sparse(), "c": torch.tensor([1 + 2j])}
    assert compare(e, a, limits=LIMITS).status == "proven"
    turned = compare(e, a | {"c": torch.tensor([1 + 3j])}, limits=LIMITS)
    assert turned.worst_parameter == "c"


def test_an_infinite_allowance_passes_nothing():
    e = {"w": torch.full((2,), 1.5e308, dtype=torch.float64)}
    assert compare(e, {"w": -e["w"]}, limits=LIMITS).status == "failed"


def test_an_unexpected_gradient_counts_in_the_global_numbers():
    e = {"w": torch.tensor([3.0]), "frozen": None}
    found = compare(e, {"w": torch.tensor([3.0]), "frozen": torch.tensor([4.0])}, limits=LIMITS)
    assert (found.rel_l2, found.norm_ratio) == (4 / 3, 5 / 3)


def test_an_absent_side_that_is_none_or_not_finite_is_found_all_the_same():
    e = {"w": torch.ones(3), "frozen": None, "broken": torch.tensor([math.nan])}
    found = compare(e, {"w": torch.ones(3)}, limits=LIMITS)
    assert {f.name: f.kind for f in found.findings} == {"frozen": "missing", "broken": "missing"}
    assert (found.status, found.rel_l2, found.paper_gate) == ("failed", None, False)


def test_zero_beside_noise_is_vacuous_and_beside_a_match_is_proven():
    noise = {f"w{i}": torch.ones(4) for i in range(16)}
    loose = Limits(relative=0.5, relative_floor=0.99)
    zero = {"zero": torch.zeros(3)}
    assert compare(noise | zero, noise | zero, limits=loose).status == "vacuous"
    assert compare(noise | zero, noise | zero, limits=LIMITS).status == "proven"


def test_the_share_counts_elements_over_their_part_of_the_allowance():
    e = {"w": torch.ones(100, dtype=torch.float64)}
    a = copy(e)
    a["w"][:30] += 0.9
    a["w"][30:] += 0.01
    found = compare(e, a, limits=Limits(relative=0.4))
    assert (found.status, found.tensors[0].share_over) == ("failed", 0.3)


def test_a_difference_that_overflows_fails():
    e = {"w": torch.tensor([1.5e308], dtype=torch.float64)}
    found = compare(e, {"w": -e["w"]}, limits=LIMITS)
    assert (found.status, found.rel_l2) == ("failed", None)
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_tensor_of_rounding_noise_passes_as_below_floor_but_proves_nothing():
    e = gradients()
    name = "model.layers.0.self_attn.k_proj.weight"
    e[name] = e[name] * 1e-19
    a = copy(e)
    a[name] = a[name].roll(1)
    found = compare(e, a, limits=LIMITS)
    assert found.status == "proven"
    assert result_of(found, name).verdict == "below_floor"
    assert found.counts["below_floor"] == 1
    assert found.unverified == (name,)
    assert found.worst_parameter != name


def test_a_gradient_where_the_reference_has_only_noise_fails():
    e = gradients()
    name = "model.layers.0.self_attn.k_proj.weight"
    e[name] = e[name] * 1e-19
    a = dict(e) | {name: e[name] * 1e9}
    found = compare(e, a, limits=LIMITS)
    assert (found.status, found.worst_parameter) == ("failed", name)


def test_a_small_tensor_above_the_floor_is_still_held_to_the_relative_limit():
    e = gradients()
    name = "model.layers.0.input_layernorm.weight"
    e[name] = e[name] * 1e-2
    assert compare(e, dict(e) | {name: e[name] * (1 + 1e-11)}, limits=LIMITS).status == "failed"


def test_everything_below_the_floor_is_vacuous():
    e = {"w": torch.ones(4), "v": torch.ones(4)}
    loose = Limits(relative=0.5, relative_floor=0.99)
    scattered = {f"w{i}": torch.ones(4) for i in range(16)}
    assert compare(e, dict(e), limits=loose).status == "proven"
    assert compare(scattered, dict(scattered), limits=loose).status == "vacuous"


def test_a_wrong_slice_hidden_by_a_big_fused_tensor_fails():
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    fused[4:8] *= 1e-6
    e = {"model.h.2.attn.qkv_proj.weight": fused, "w": torch.ones(3)}
    a = copy(e)
    a["model.h.2.attn.qkv_proj.weight"][4:8] *= 1 + 1e-8
    whole = compare(e, a, limits=LIMITS)
    assert whole.status == "proven"
    sliced = compare(e, a, limits=LIMITS, slices={"model.h.2.attn.qkv_proj.weight": thirds(4)})
    assert sliced.status == "failed"
    assert sliced.worst_slice == "k"
    assert sliced.counts["mismatch"] == 1
    assert sliced.worst_rel_l2 == pytest.approx(1e-8, rel=1e-6)
    assert sliced.slice_counts["mismatch"] == 1
    assert "model.h.2.attn.qkv_proj.weight[k]" in message(sliced)
    assert "only the slice k of fused tensors differs" in sliced.hints
    assert sliced.per_kind["k"]["rel_l2"] == pytest.approx(1e-8, rel=1e-6)
    assert sliced.per_kind["q"]["rel_l2"] == 0.0


def test_the_k_part_of_a_fused_bias_may_be_noise_or_zero_but_not_wrong():
    bias = torch.cat([torch.full((4,), 1e-2), torch.full((4,), 1e-19), torch.full((4,), 1e-2)])
    name = "transformer.h.0.attn.c_attn.bias"
    e = {name: bias.double(), "w": torch.ones(3)}
    a = copy(e)
    a[name][4:8] = 0
    slices = {name: thirds(4)}
    found = compare(e, a, limits=LIMITS, slices=slices)
    assert found.status == "proven"
    assert {p.slice: p.verdict for p in result_of(found, name).parts} == {
        "q": "match",
        "k": "below_floor",
        "v": "match",
    }
    a[name][5] = 1e-9
    assert compare(e, a, limits=LIMITS, slices=slices).worst_slice == "k"


def test_the_worst_index_of_a_slice_is_that_of_the_whole_tensor():
    e = {"w": torch.ones(6, 4, dtype=torch.float64)}
    odd = [Slice("even", (slice(0, None, 2),)), Slice("odd", (torch.tensor([1, 3, 5]),))]
    a = copy(e)
    a["w"][3, 2] = 7.0
    found = compare(e, a, limits=LIMITS, slices={"w": odd})
    (part,) = (p for p in found.tensors[0].parts if p.verdict == "mismatch")
    assert (part.slice, part.worst.index, part.worst.actual) == ("odd", (3, 2), 7.0)
    assert part.share_over == pytest.approx(1 / 12)


def test_slices_that_do_not_cover_their_tensor_are_refused():
    e = {"w": torch.ones(6)}
    with pytest.raises(InputError, match=r"slices of w cover 3 of its 6 elements"):
        compare(e, e, limits=LIMITS, slices={"w": [Slice("half", (slice(3),))]})


def test_the_papers_gate_stands_beside_ours():
    e = gradients()
    loose = compare(e, noisy(e, 5e-3), limits=LIMITS)
    assert (loose.status, loose.paper_gate) == ("failed", True)
    assert not compare(e, noisy(e, 5e-2), limits=LIMITS).paper_gate


def test_the_papers_cosine_alone_is_not_enough():
    e = gradients()
    found = compare(e, {n: 1.0117 * g for n, g in e.items()}, limits=LIMITS)
    assert found.cosine == pytest.approx(1)
    assert not found.paper_gate


def test_a_rolled_reference_is_far_away():
    e = gradients()
    control = compare(e, rolled(e), limits=LIMITS)
    assert control.status == "failed"
    assert control.rel_l2 > 1
    assert control.rolled_rel_l2 == 0.0
    slightly = compare(e, noisy(e, 1e-6), limits=LIMITS)
    assert slightly.rolled_rel_l2 > 1
    assert rolled({"w": None}) == {"w": None}
