"""Every family of this project: `exact` is full autograd, whatever the lengths, adapters, base and head."""

from __future__ import annotations

import functools

import pytest
import torch
from small_steps import distance, gradients, problem_for

from lsverify import adapters, models
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError, NotShareable
from lsverify.families.rope import CHANGING, TRAINED_LENGTH
from lsverify.paths import full_autograd, longstraw
from lsverify.precision import computing
from lsverify.pretrained import dropouts
from lsverify.problems import ProblemSpec, draw
from lsverify.sharing import check_shareable

FAMILIES = (
    "llama qwen3 gpt2 mistral gemma3 gpt_oss mixtral qwen3_moe deepseek_v3 glm_moe_dsa deepseek_v32 deepseek_v4 "
    "qwen3_5 qwen3_5_moe qwen3_next kimi_linear"
).split()
# The other lengths and chunks of the default four are in test_paths.
LENGTHS_AND_CHUNKS = ((1, 5), (2, 1), (9, 5), (21, 5), (70, 64))
UNTIED_ONLY = {"kimi_linear"}
TIED_UNDER_ADAPTERS = {"llama", "gpt2", "qwen3_5", "deepseek_v4"}


@functools.cache
def model_of(arch, **options):
    return models.build(arch, seed=1, **options)


def error(model, length, chunk, responses=(4, 1, 6)):
    problem = problem_for(
        model,
        seed=length,
        prompt_lengths=(length,),
        group_sizes=(len(responses),),
        response_lengths=responses,
        holes=True,
    )
    with computing(model, "float64"):
        expected = gradients(full_autograd, model, problem)
        return distance(gradients(longstraw, model, problem, policy="exact", chunk=chunk), expected)


def test_these_families_are_registered():
    assert set(FAMILIES) | set(DEFAULT_ARCHS) <= set(models.TINY)


@pytest.mark.parametrize("arch", FAMILIES)
def test_exact_is_full_autograd(arch):
    for length, chunk in LENGTHS_AND_CHUNKS:
        assert error(model_of(arch), length, chunk) <= 1e-12, (length, chunk)


@pytest.mark.parametrize("arch", FAMILIES)
def test_nothing_is_constant_and_all_but_indexers_get_a_gradient(arch):
    model = model_of(arch)
    constant = [n for n, t in model.state_dict().items() if len(t.unique()) < min(2, t.numel())]
    assert constant == []
    problem = problem_for(model, prompt_lengths=(40,), response_lengths=(9,))
    with computing(model, "float64"):
        found = gradients(full_autograd, model, problem)
    idle = {name for name, grad in found.items() if grad is None or grad.norm() < 1e-9}
    assert idle == {name for name in found if ".indexer." in name}


@pytest.mark.parametrize("arch", FAMILIES)
def test_sizes_are_small_and_switches_off(arch):
    config = models.TINY[arch]()
    assert config.vocab_size == models.VOCABULARY
    assert 3 <= config.num_hidden_layers <= 4
    assert dropouts(config) == {}
    assert not config.tie_word_embeddings
    assert {getattr(config, f"{which}_token_id") for which in ("pad", "bos", "eos")} == {None}
    for short in ("sliding_window", "index_topk"):
        assert (getattr(config, short, None) or 8) <= 8


@pytest.mark.parametrize(
    ("arch", "field", "kinds"),
    [
        ("gemma3", "layer_types", {"sliding_attention", "full_attention"}),
        ("gpt_oss", "layer_types", {"sliding_attention", "full_attention"}),
        ("qwen3_next", "layer_types", {"linear_attention", "full_attention"}),
        ("kimi_linear", "layer_types", {"linear_attention", "full_attention"}),
        ("kimi_linear", "mlp_layer_types", {"dense", "sparse"}),
        ("deepseek_v32", "mlp_layer_types", {"dense", "sparse"}),
        ("deepseek_v4", "mlp_layer_types", {"hash_moe", "moe"}),
        (
            "deepseek_v4",
            "layer_types",
            {"heavily_compressed_attention", "compressed_sparse_attention"},
        ),
    ],
)
def test_every_kind_of_layer_is_there(arch, field, kinds):
    assert set(getattr(models.TINY[arch](), field)) == kinds


def test_tokens_choose_experts_by_a_table_without_repeats():
    table = model_of("deepseek_v4").get_buffer("model.layers.0.mlp.gate.tid2eid")
    assert table.shape == (models.VOCABULARY, 2)
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.flatten().tolist()) == set(range(8))


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("arch", FAMILIES)
def test_adapters_are_trained_exactly_over_every_family(arch, quantised):
    model = model_of(arch, lora=True, quantised=quantised)
    assert error(model, 9 if quantised else 21, 5) <= 1e-12
    problem = problem_for(model, prompt_lengths=(21,), response_lengths=(4, 1))
    with computing(model, "float64"):
        found = gradients(longstraw, model, problem)
    assert sum(".lora_A." in name for name in found) == len(adapters.targets(model_of(arch)))
    assert [name for name, grad in found.items() if grad is None or grad.norm() < 1e-9] == []


@pytest.mark.parametrize(
    ("arch", "lora"),
    [(arch, False) for arch in FAMILIES if arch not in UNTIED_ONLY]
    + [(arch, True) for arch in sorted(TIED_UNDER_ADAPTERS)],
)
def test_a_tied_head_is_trained_exactly(arch, lora):
    model = model_of(arch, tied=True, lora=lora)
    inner = model.get_base_model() if lora else model
    assert inner.get_output_embeddings().weight is inner.get_input_embeddings().weight
    assert error(model, 9, 5, responses=(3, 1)) <= 1e-12


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_a_rotary_table_that_changes_with_the_length_is_refused(name):
    model = models.tiny(CHANGING[name](), seed=0, dtype="float64")
    sizes = {"group_sizes": (2,), "response_lengths": (3, TRAINED_LENGTH), "seed": 0}
    problem = draw(ProblemSpec(prompt_lengths=(12,), **sizes), models.VOCABULARY)
    with computing(model, "float64"), pytest.raises(NotShareable, match="total length"):
        check_shareable(model, problem)


def test_options_that_do_not_go_together_are_refused(tmp_path):
    with pytest.raises(InputError, match="quantised needs lora"):
        models.build("llama", seed=0, quantised=True)
    with pytest.raises(InputError, match="its head cannot be tied"):
        models.build("kimi_linear", seed=0, tied=True)
    with pytest.raises(InputError, match="tied is for small models"):
        models.build(str(tmp_path), seed=0, tied=True)


def test_a_float32_model_is_the_rounded_float64_model():
    for arch in ("gpt_oss", "deepseek_v4", "kimi_linear"):
        double, single = (models.build(arch, seed=1, dtype=d) for d in ("float64", "float32"))
        for name, value in double.state_dict().items():
            rounded = value.float() if value.is_floating_point() else value
            assert torch.equal(rounded, single.state_dict()[name]), name
