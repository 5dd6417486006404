import json
import math

import pytest
import torch
from gradient_mappings import copy, gradients, noisy, thirds

from lsverify.attribution import kind_of, layer_of
from lsverify.compare import Limits, compare, message
from lsverify.norms import norm
from lsverify.slices import Slice

LIMITS = Limits()


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("model.embed_tokens.weight", None, "embedding"),
        ("lm_head.weight", None, "head"),
        ("model.norm.weight", None, "norm"),
        ("model.layers.3.self_attn.q_proj.weight", 3, "q"),
        ("model.layers.3.self_attn.q_a_layernorm.weight", 3, "norm"),
        ("model.layers.3.self_attn.kv_b_proj.weight", 3, "kv"),
        ("model.layers.3.self_attn.indexer.k_norm.bias", 3, "indexer"),
        ("model.layers.3.mlp.gate.weight", 3, "router"),
        ("model.layers.3.mlp.shared_expert_gate.weight", 3, "router"),
        ("model.layers.3.mlp.experts.gate_up_proj", 3, "expert"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", 3, "expert"),
        ("model.layers.3.mlp.gate_proj.weight", 3, "gate"),
        ("model.layers.3.mlp.down_proj.weight", 3, "down"),
        ("model.layers.10.linear_attn.in_proj_qkv.weight", 10, "recurrent"),
        ("model.layers.10.linear_attn.A_log", 10, "recurrent"),
        ("model.layers.10.linear_attn.conv1d.weight", 10, "conv"),
        ("model.layers.10.linear_attn.norm.weight", 10, "norm"),
        ("backbone.layers.1.mixer.in_proj.weight", 1, "recurrent"),
        ("backbone.layers.1.mixer.q_proj.weight", 1, "q"),
        ("model.layers.0.conv.in_proj.weight", 0, "conv"),
        ("transformer.h.3.attn.c_attn.bias", 3, "qkv"),
        ("transformer.h.3.attn.c_proj.weight", 3, "o"),
        ("transformer.h.3.mlp.c_proj.weight", 3, "down"),
        ("transformer.h.3.ln_1.weight", 3, "norm"),
        ("transformer.wpe.weight", None, "embedding"),
        ("base_model.model.model.layers.5.self_attn.v_proj.base_layer.weight", 5, "v"),
        ("base_model.model.model.layers.5.self_attn.v_proj.lora_A.default.weight", 5, "lora_A"),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", None, "lora_B"),
        ("base_model.model.lm_head.modules_to_save.default.weight", None, "head"),
        ("something.new", None, "other"),
    ],
)
def test_names_are_read(name, layer, kind):
    assert (layer_of(name), kind_of(name)) == (layer, kind)


def test_slices_of_fused_projections_have_the_kind_of_their_role():
    assert kind_of("transformer.h.0.attn.c_attn.weight", "k") == "k"
    assert kind_of("model.layers.0.self_attn.kv_b_proj.weight", "head 3 v") == "v"
    assert kind_of("model.layers.0.mlp.gate_up_proj.weight", "up") == "up"
    assert kind_of("model.layers.0.mlp.experts.gate_up_proj", "expert 1 up") == "expert"


def test_errors_are_attributed_to_layers_and_kinds():
    e = gradients()
    a = copy(e)
    a["model.layers.1.self_attn.q_proj.weight"] *= 2
    found = compare(e, a, limits=LIMITS)
    assert found.tensors[0].name == "model.layers.1.self_attn.q_proj.weight"
    assert {layer for layer, n in found.per_layer.items() if n["rel_l2"]} == {1}
    assert {kind for kind, n in found.per_kind.items() if n["rel_l2"]} == {"q"}
    expected = norm(e["model.layers.1.self_attn.q_proj.weight"]) / math.hypot(
        *(norm(g) for n, g in e.items() if n.endswith("q_proj.weight"))
    )
    assert found.per_kind["q"]["rel_l2"] == pytest.approx(expected)


def test_a_failure_names_index_values_difference_allowance_and_share():
    e = {"model.layers.0.self_attn.q_proj.weight": torch.ones(4, 4, dtype=torch.float64)}
    a = copy(e)
    a["model.layers.0.self_attn.q_proj.weight"][2, 1] = 1.5
    text = message(compare(e, a, limits=LIMITS))
    for part in (
        "gradient comparison: failed",
        "model.layers.0.self_attn.q_proj.weight: relative L2 1.250e-01",
        "largest at (2, 1): expected 1.0, actual 1.5, difference 5.000e-01",
        "allowance 4.000e-12 (limit 1e-12: constant at oracle precision)",
        "6.25% of 16 elements",
        "reference rolled by one element",
    ):
        assert part in text


def test_a_long_failure_is_cut_and_says_so():
    e = {f"w{i}": torch.ones(2) for i in range(30)}
    wrong = {f"w{i}": torch.full((2,), 1.0 + i) for i in range(1, 30)} | {"w0": torch.ones(2)}
    assert "and 24 more tensors or slices differ" in message(compare(e, wrong, limits=LIMITS))
    assert "and 20 more findings" in message(compare(e, {}, limits=LIMITS))


def test_a_pass_says_what_was_counted():
    e = gradients() | {"zero": torch.zeros(3)}
    text = message(compare(e, dict(e), limits=LIMITS))
    assert "gradient comparison: proven\n" in text
    assert "20 match, 1 zero; 1371 elements compared" in text


def test_the_dictionary_is_json_at_full_precision():
    e = gradients()
    found = compare(e, noisy(e, 1e-9), limits=LIMITS, slices={"lm_head.weight": thirds(4)})
    plain = found.as_dict()
    again = json.loads(json.dumps(plain, allow_nan=False))
    assert again == plain
    assert again["rel_l2"] == found.rel_l2
    assert again["tensors"][0]["worst"]["expected"] == found.tensors[0].worst.expected
    assert again["per_layer"]["0"]["cosine"] == found.per_layer[0]["cosine"]
    assert again["passed"] is False


def test_the_comparison_repeats_and_changes_nothing():
    e, a = gradients(), noisy(gradients(), 1e-9)
    before = copy(a)
    assert compare(e, a, limits=LIMITS) == compare(e, a, limits=LIMITS)
    assert all(torch.equal(a[n], before[n]) for n in a)


def hint_text(e, a, **options):
    return " | ".join(compare(e, a, limits=LIMITS, **options).hints)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (0.125, "every gradient is 1/8 times the reference: a wrong denominator or scale"),
        (4.0, "every gradient is 4 times the reference"),
        (1.0 + 1e-7, "every gradient is 1.0000001 times the reference"),
        (-1.0, "every gradient is -1 times the reference: a wrong sign"),
    ],
)
def test_a_common_factor_is_named(factor, words):
    e = gradients()
    assert words in hint_text(e, {n: factor * g for n, g in noisy(e, 1e-14).items()})


def test_a_factor_of_one_kind_is_named():
    e = gradients()
    a = {n: g * 0.5 if "k_proj" in n or "v_proj" in n else g for n, g in e.items()}
    assert "the differing tensors (k, v) are all 1/2 times the reference" in hint_text(e, a)
    assert "only kind k, v differs" in hint_text(e, a)


def test_unrelated_errors_are_not_called_a_factor():
    e = gradients()
    assert "times the reference" not in hint_text(e, noisy(e, 1e-3))
    assert "times the reference" not in hint_text(e, {n: 2 * g.roll(1) for n, g in e.items()})
    zero = {n: torch.zeros_like(g) for n, g in e.items()}
    assert hint_text(zero, e) == ""


def test_noise_of_float32_is_named_and_no_other():
    e = gradients()
    words = "every error is of float32's size"
    assert words in hint_text(e, noisy(e, 1e-7))
    for other in (noisy(e, 1e-10), noisy(e, 1e-3), {n: (1 + 1e-7) * g for n, g in e.items()}):
        assert words not in hint_text(e, other)
    one = dict(e)
    name = next(iter(e))
    one[name] = noisy({name: e[name]}, 1e-7)[name]
    assert words not in hint_text(e, one)


def test_zero_gradients_of_keys_and_values_are_named():
    e = gradients()
    a = noisy(e, 1e-4)
    a |= {n: torch.zeros_like(g) for n, g in a.items() if "k_proj" in n or "v_proj" in n}
    assert "exactly zero gradient for k, v only" in hint_text(e, a)
    up = {n: torch.zeros_like(g) if "up_proj" in n else g for n, g in e.items()}
    assert "exactly zero gradient where the reference has one (up): detached" in hint_text(e, up)
    everywhere = {n: torch.zeros_like(g) for n, g in e.items()}
    assert "every gradient is exactly zero" in hint_text(e, everywhere)


def test_absent_gradients_are_named_by_kind():
    e = gradients()
    a = {n: None if "o_proj" in n else g for n, g in e.items()}
    assert "no gradient at all for 3 parameters (o)" in hint_text(e, a)


def test_swapped_names_are_named():
    e = gradients()
    x, y = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    a = dict(e) | {x: e[y], y: e[x]}
    found = compare(e, a, limits=LIMITS)
    assert found.status == "failed"
    assert any("carry each other's norm" in h and x in h and y in h for h in found.hints)


def test_tensors_of_equal_norm_are_not_called_exchanged():
    g = gradients()["lm_head.weight"]
    e = {"x": g, "y": g.roll(1), "z": torch.ones(3)}
    assert "exchanged" not in hint_text(e, dict(e) | {"x": g.roll(2), "y": g.roll(3)})


def test_errors_confined_to_layers_or_to_the_token_rows_are_named():
    e = gradients()
    early = {n: g.roll(1) if layer_of(n) in (0, 1) else g for n, g in e.items()}
    assert "only layers 0 to 1 differ" in hint_text(e, early)
    ends = {n: g.roll(1) if layer_of(n) in (0, 2) else g for n, g in e.items()}
    assert "only layers 0, 2 differ" in hint_text(e, ends)
    one = {n: g.roll(1) if layer_of(n) == 2 else g for n, g in e.items()}
    assert "only layer 2 differs" in hint_text(e, one)
    rows = dict(e) | {"lm_head.weight": e["lm_head.weight"].roll(1)}
    assert "only head differ: token rows" in hint_text(e, rows)


def test_a_lost_cotangent_of_the_prompt_state_is_named():
    e = gradients()
    makers = ("k_proj", "v_proj", "input_layernorm")
    a = {
        n: g.roll(1)
        if layer_of(n) in (0, 1) or (layer_of(n) == 2 and any(m in n for m in makers))
        else g
        for n, g in e.items()
    }
    found = hint_text(e, a)
    assert "in the last layer only what makes the prompt's state (k, norm, v) differs" in found
    reader_too = dict(a) | {n: g.roll(1) for n, g in e.items() if "layers.2.self_attn.q_proj" in n}
    assert "prompt's state" not in hint_text(e, reader_too)
    only = {n: g.roll(1) if "k_proj" in n else g for n, g in e.items()}
    assert "prompt's state" not in hint_text(e, only)
    assert "prompt's state" not in hint_text(e, {n: g.roll(1) for n, g in e.items()})


def test_errors_in_many_kinds_and_layers_are_not_guessed_at():
    e = gradients()
    a = noisy(e, 1e-3) | {"lm_head.weight": e["lm_head.weight"]}
    assert compare(e, a, limits=LIMITS).hints == ["only layers 0 to 2 differ"] or not hint_text(
        e, a
    )


def test_one_wrong_expert_slice_is_named():
    e = {"model.layers.0.mlp.experts.down_proj": torch.ones(9, 4, dtype=torch.float64)}
    a = {n: g.clone() for n, g in e.items()}
    a["model.layers.0.mlp.experts.down_proj"][3:6] *= 2
    parts = {"model.layers.0.mlp.experts.down_proj": thirds(3)}
    assert "only the slice k of fused tensors differs" in hint_text(e, a, slices=parts)
    every = [Slice(f"expert {i}", (slice(i, i + 1),)) for i in range(9)]
    wrong = {n: g * 2 for n, g in e.items()}
    wrong["model.layers.0.mlp.experts.down_proj"][8] = 1.0
    text = hint_text(e, wrong, slices={"model.layers.0.mlp.experts.down_proj": every})
    assert "slice" not in text


def test_a_long_list_of_inconsistent_tensors_does_not_hide_the_numbers():
    e = gradients()
    limits = Limits(cap=0.1, inconsistent={n: 1.0 for n in e})
    text = message(compare(e, dict(e), limits=limits))
    assert text.count("above the cap 0.1") == 5
