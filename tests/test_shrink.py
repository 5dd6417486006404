"""Any causal model type by its name alone: what its default has is kept, small; what cannot be judged says why."""

from __future__ import annotations

import json

import pytest
import torch
from small_steps import distance, gradients, problem_for
from transformers import CONFIG_MAPPING

from lsverify import archs, cli, models, shrink
from lsverify.errors import InputError
from lsverify.paths import full_autograd, longstraw
from lsverify.precision import computing
from lsverify.pretrained import dropouts
from lsverify.small_sizes import small_rope


def config_of(model_type):
    return shrink.shrunk(model_type)[0]


@pytest.mark.parametrize(
    "model_type", ["olmo2", "bart", "bert", "longcat_flash", "olmoe", "lfm2", "gemma3n"]
)
def test_a_type_is_built_and_exact_is_full_autograd(model_type):
    model = models.build(model_type, seed=1)
    problem = problem_for(model, prompt_lengths=(12,), response_lengths=(3, 1))
    with computing(model, "float64"):
        expected = gradients(full_autograd, model, problem)
        found = gradients(longstraw, model, problem, policy="exact", chunk=5)
    assert distance(found, expected) <= 1e-12


@pytest.mark.parametrize("model_type", shrink.model_types())
def test_every_type_has_a_small_config_or_a_line(model_type):
    if model_type == "gemma4_assistant":
        with pytest.raises(InputError, match="it has no default config"):
            config_of(model_type)
        return
    config = config_of(model_type)
    assert config.vocab_size == models.VOCABULARY or model_type == "blt"
    assert not getattr(config, "tie_word_embeddings", False)
    kept = {name for name in dropouts(config) if "classifier" not in name and "summary" not in name}
    assert kept == set()


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma2",
        "qwen3_next",
        "deepseek_v3",
        "glm_moe_dsa",
        "gpt_oss",
        "afmoe",
        "nemotron_h",
        "zaya",
    ],
)
@pytest.mark.parametrize("field", ["layer_types", "mlp_layer_types", "indexer_types"])
def test_every_kind_of_layer_of_the_default_is_kept(model_type, field):
    default, small = CONFIG_MAPPING[model_type](), config_of(model_type)
    kinds = getattr(default, field, None)
    if kinds is not None:
        assert set(getattr(small, field)) == set(kinds)
        assert shrink.FEWEST_LAYERS <= len(getattr(small, field)) <= shrink.MOST_LAYERS


def test_dense_layers_first_and_experts_after_them():
    config = config_of("deepseek_v3")
    assert 1 <= config.first_k_dense_replace < config.num_hidden_layers
    assert config.n_routed_experts == 8
    assert config.num_experts_per_tok == 2


def test_windows_are_shorter_than_prompts_and_rotary_slices_fit():
    assert config_of("gemma2").sliding_window == 8
    assert config_of("llama4_text").attention_chunk_size == 8
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]}
    divided = small_rope(rope, 16)
    assert divided["mrope_section"] == [2, 1, 1]
    assert config_of("deepseek_v3").head_dim == config_of("deepseek_v3").qk_rope_head_dim


def test_a_wrapper_stands_for_its_language_model():
    assert config_of("gemma3").model_type == "gemma3_text"
    assert config_of("got_ocr2").model_type == "qwen2"
    assert config_of("qwen3_5_moe").model_type == "qwen3_5_moe_text"


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        ("xlnet", "it is not causal: logits changes"),
        ("cpmant", "it is not causal"),
        ("doge", "model.layers.0 changes at the first 17 tokens with the number that follow"),
        ("openai-gpt", "does not leave any state in its cache"),
        ("reformer", "its forward pass draws random numbers"),
        ("musicgen", "a plain forward pass fails"),
        ("phimoe", "its forward pass draws random numbers"),
        ("moshi", r"first in model.layers.0 \(state: sliding\)"),
        ("gemma4_assistant", "it has no default config"),
    ],
)
def test_what_cannot_be_judged_is_said_in_one_line(model_type, told):
    with pytest.raises(InputError, match=told) as refused:
        models.build(model_type, seed=0)
    assert str(refused.value).startswith(f"model type {model_type!r}: ")
    assert "\n" not in str(refused.value)


def test_the_gate_refuses_before_anything_runs(capsys):
    assert cli.run(["gate", "--arch", "xlnet", "--quick"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("lsverify: model type 'xlnet': it is not causal")
    assert told.err.count("\n") == 1


def test_a_type_that_stays_large_is_refused(monkeypatch):
    monkeypatch.setattr(models, "MOST_PARAMETERS", 1000)
    models.require_usable.cache_clear()
    with pytest.raises(InputError, match=r"it stays large, with .* parameters"):
        models.require_usable("olmo")
    models.require_usable.cache_clear()


def test_dropout_that_cannot_be_switched_off_is_refused(monkeypatch):
    monkeypatch.setitem(shrink.EXCEPTIONS, "opt", {"dropout": 0.1})
    models.require_usable.cache_clear()
    with pytest.raises(InputError, match=r"dropout=0\.1 stays at its default"):
        models.require_usable("opt")
    models.require_usable.cache_clear()


def test_a_seed_decides_a_type_and_global_random_state_is_untouched():
    before = torch.get_rng_state()
    first, again = (models.build("olmo2", seed=3) for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_the_record_names_every_family_and_type():
    found = archs.recorded()
    assert [o.name for o in found.outcomes] == archs.names()
    for outcome in found.outcomes:
        if outcome.outcome == "proven":
            assert outcome.rel_l2 <= 1e-12
            assert outcome.line == ""
        else:
            assert outcome.line
            assert "\n" not in outcome.line


def test_the_page_is_the_record(request):
    folder = request.config.rootpath
    assert (folder / "docs" / archs.PAGE).read_text() == archs.page(archs.recorded())


def test_archs_prints_the_record_and_says_when_the_library_is_another(capsys, monkeypatch):
    cli.run(["archs", "llama", "xlnet"])
    told = capsys.readouterr().out
    assert "llama" in told
    assert "it is not causal" in told
    assert "another version" not in told
    monkeypatch.setattr(archs, "installed", lambda: "9.9.9")
    cli.run(["archs", "llama"])
    assert "transformers 9.9.9 is installed, another version" in capsys.readouterr().out


def test_archs_as_json(capsys):
    assert cli.run(["archs", "llama", "--json"]) == 0
    (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert (outcome["name"], outcome["family"], outcome["outcome"]) == ("llama", True, "proven")


def test_archs_refuses_an_unknown_name(capsys):
    assert cli.run(["archs", "gpt5"]) == 2
    assert cli.run(["archs", "gpt5", "--prove"]) == 2
    assert capsys.readouterr().err.count("'gpt5' is neither a family nor a model type") == 2


def test_proving_is_done_in_processes_of_their_own_and_merged(tmp_path, capsys):
    assert cli.run(["archs", "--prove", "xlnet", "--out", str(tmp_path)]) == 0
    assert cli.run(["archs", "--prove", "reformer", "--out", str(tmp_path)]) == 0
    written = archs.in_folder(tmp_path)
    assert [(o.name, o.outcome) for o in written.outcomes] == [
        ("reformer", "refused"),
        ("xlnet", "refused"),
    ]
    assert (tmp_path / archs.PAGE).read_text() == archs.page(written)
    capsys.readouterr()


def test_a_name_that_takes_too_long_is_an_error(tmp_path, capsys):
    assert cli.run(["archs", "--prove", "xlnet", "--out", str(tmp_path), "--seconds", "0"]) == 1
    assert "no outcome within 0 seconds" in capsys.readouterr().out
