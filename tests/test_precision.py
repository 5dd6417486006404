from __future__ import annotations

import pytest
import torch
from small_steps import GRPO, distance, gradients, problem_for, tokens
from torch import nn

from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.models import build
from lsverify.paths import full_autograd, full_score, longstraw
from lsverify.precision import DTYPES, computing, deterministic, threads, weight_dtype

ARCHS = sorted(DEFAULT_ARCHS)


def norms_inside(model):
    """The dtypes that the model's own float32 casts come out in, at each of its normalisations' variances."""
    seen = []
    original = torch.Tensor.pow

    def watched(tensor, *args):
        seen.append(tensor.dtype)
        return original(tensor, *args)

    torch.Tensor.pow = watched
    try:
        with torch.no_grad():
            model(input_ids=tokens(3)[None])
    finally:
        torch.Tensor.pow = original
    return set(seen)


@pytest.mark.parametrize("arch", ARCHS)
def test_at_oracle_precision_batched_and_serial_agree_to_a_few_roundings(oracle, arch):
    model = oracle(arch)
    problem = problem_for(model, prompt_lengths=(9, 5), response_lengths=(3, 1, 4, 1))
    serial = gradients(full_autograd, model, problem)
    for padding in ("left", "right"):
        batched = gradients(full_autograd, model, problem, batched=True, padding=padding)
        assert distance(batched, serial) <= 1e-14


def test_without_promotion_the_models_own_casts_leave_a_floor():
    model = build("llama", seed=0)
    problem = problem_for(model)
    bare = gradients(full_autograd, model, problem)
    with computing(model, "float64"):
        promoted = gradients(full_autograd, model, problem)
    assert 1e-9 < distance(bare, promoted) < 1e-5


def test_promotion_reaches_the_models_own_casts_and_ends_with_the_context():
    model = build("llama", seed=0)
    assert norms_inside(model) == {torch.float32}
    with computing(model, "float64"):
        assert norms_inside(model) == {torch.float64}
    assert norms_inside(model) == {torch.float32}


class Casting(nn.Module):
    """Asks for float32 in every way that model code does."""

    def forward(self, x):
        return [
            x.float(),
            x.to(torch.float32),
            x.to(dtype=torch.float32),
            x.type(torch.float32),
            x.softmax(-1, dtype=torch.float32),
            nn.functional.softmax(x, dim=-1, dtype=torch.float32),
            torch.zeros(2, dtype=torch.float32),
            torch.empty_like(x, dtype=torch.float32),
        ]


def test_every_way_to_ask_for_float32_is_promoted_and_nothing_else():
    model, x = Casting(), torch.ones(2, dtype=torch.float64)
    half = x.to(torch.bfloat16)
    with computing(model, "float64"):
        assert {out.dtype for out in model(x)} == {torch.float64}
        assert {out.dtype for out in model(half)} == {torch.float64}
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert {out.dtype for out in model(x)} == {torch.float32}


def test_casts_outside_a_forward_pass_stay_what_they_are():
    model = build("llama", seed=0)
    seen = []

    def cast(module, args, output):
        seen.append(torch.ones(1, dtype=torch.float64).float().dtype)

    with computing(model, "float64"):
        handle = model.register_forward_hook(cast)
        model(input_ids=tokens(3)[None])
        handle.remove()
        assert torch.ones(1).dtype == torch.float32
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32
    assert seen == [torch.float32]


def test_promotion_ends_with_the_pass_that_raises():
    model = build("llama", seed=0)
    with computing(model, "float64"):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[97]]))
        assert torch.ones(1, dtype=torch.float64).float().dtype == torch.float32
        assert norms_inside(model) == {torch.float64}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_no_forward_is_left_behind(dtype):
    model = build("qwen3_5", seed=0, dtype=dtype)
    with computing(model, dtype):
        assert "forward" in vars(model)
        model(input_ids=tokens(3)[None])
    assert not [name for name, m in model.named_modules() if "forward" in vars(m)]
    with pytest.raises(KeyError, match="stop"), computing(model, dtype):
        raise KeyError("stop")
    assert not [name for name, m in model.named_modules() if "forward" in vars(m)]


def test_a_forward_that_somebody_set_before_is_put_back():
    model = build("llama", seed=0)
    own = model.forward
    model.forward = own
    with computing(model, "float64"), computing(model, "float64"):
        assert norms_inside(model) == {torch.float64}
    assert vars(model)["forward"] is own


def test_a_path_that_drives_backbone_or_layers_itself_is_promoted_too():
    model = build("llama", seed=0)
    hidden = torch.randn(1, 3, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos_sin = model.model.rotary_emb(hidden, torch.arange(3)[None])

    def layer():
        return model.model.layers[0](hidden, position_embeddings=cos_sin)

    def backbone():
        return model.model(input_ids=tokens(3)[None]).last_hidden_state

    bare = layer(), backbone()
    with computing(model, "float64"):
        promoted = layer(), backbone()
        through_the_model = model(input_ids=tokens(3)[None], output_hidden_states=True)
    for before, after in zip(bare, promoted, strict=True):
        assert 0 < (before - after).norm() < 1e-5
    assert torch.equal(promoted[1], through_the_model.hidden_states[-1])


@pytest.mark.parametrize("arch", ["llama", "qwen3_5", "glm_moe_dsa"])
@pytest.mark.parametrize("first", ["checkpointing", "computing"])
def test_gradient_checkpointing_recomputes_at_oracle_precision(arch, first):
    model = build(arch, seed=0)
    with computing(model, "float64"):
        problem = problem_for(model)
        expected = gradients(full_autograd, model, problem)
        if first == "computing":
            model.activation_checkpointing_enable()
            assert distance(gradients(full_autograd, model, problem), expected) == 0
    if first == "checkpointing":
        model.activation_checkpointing_enable()
        with computing(model, "float64"):
            assert distance(gradients(full_autograd, model, problem), expected) == 0


def test_adapters_compute_at_oracle_precision():
    model = build("llama", seed=0, lora=True)
    with computing(model, "float64"):
        problem = problem_for(model)
        serial = gradients(full_autograd, model, problem)
        assert distance(gradients(full_autograd, model, problem, batched=True), serial) <= 1e-14
        assert norms_inside(model) == {torch.float64}


def test_autocast_computes_in_bfloat16_on_float32_weights():
    model = build("llama", seed=0, dtype="bfloat16-autocast")
    seen = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, output: seen.append(output.dtype)
    )
    with computing(model, "bfloat16-autocast"):
        problem = problem_for(model)
        found = gradients(full_autograd, model, problem)
        assert not torch.is_autocast_enabled("cpu")
    full_score(model, problem)
    handle.remove()
    assert {g.dtype for g in found.values()} == {torch.float32}
    assert seen[0] == torch.bfloat16
    assert seen[-1] == torch.float32


def test_autocast_casts_anew_after_an_update():
    """Autocast's cache of casted weights would serve the old ones to the next pass."""
    model = build("llama", seed=0, dtype="bfloat16-autocast")
    ids = tokens(5)[None]
    with computing(model, "bfloat16-autocast"):
        before = model(input_ids=ids).logits
        model.lm_head.weight.data.neg_()
        assert torch.equal(model(input_ids=ids).logits, -before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_leave_the_model_as_it_is(dtype):
    model, ids = build("llama", seed=0, dtype=dtype), tokens(5)[None]
    bare = model(input_ids=ids).logits
    with computing(model, dtype):
        assert torch.equal(model(input_ids=ids).logits, bare)
        assert norms_inside(model) == {torch.float32}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16-autocast", "bfloat16"])
def test_a_step_in_a_native_precision_is_near_the_full_gradient(dtype):
    model = build("llama", seed=0, dtype=dtype)
    with computing(model, dtype):
        problem = problem_for(model)
        expected = gradients(full_autograd, model, problem)
        error = distance(gradients(longstraw, model, problem, chunk=4), expected)
    assert error <= {"float32": 1e-5, "bfloat16-autocast": 0.1, "bfloat16": 0.1}[dtype]


@pytest.mark.parametrize("name", ["float16", "", "FLOAT64", "double"])
def test_an_unknown_precision_is_refused_before_anything_changes(oracle, name):
    model = nn.Linear(1, 1)
    for use in (lambda: weight_dtype(name), lambda: computing(model, name).__enter__()):
        with pytest.raises(
            InputError, match="use one of float64, float32, bfloat16, bfloat16-auto"
        ):
            use()
    assert "forward" not in vars(model)


def test_weights_have_the_dtype_of_their_precision():
    assert [weight_dtype(name) for name in DTYPES] == list(DTYPES.values())
    for name, dtype in DTYPES.items():
        parameters = build("llama", seed=0, dtype=name).parameters()
        assert {parameter.dtype for parameter in parameters} == {dtype}


def test_a_model_without_a_backbone_is_promoted_at_its_own_forward():
    model = Casting()
    with computing(model, "float32"):
        assert {out.dtype for out in model(torch.ones(2))} == {torch.float32}
    assert GRPO.beta == 0


def test_threads_and_determinism_last_as_long_as_their_context():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    with threads(None):
        assert torch.get_num_threads() == before
    assert torch.get_num_threads() == before
    was = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() == was


def test_a_softer_determinism_is_put_back_as_it_was():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
