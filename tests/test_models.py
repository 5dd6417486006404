from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

from lsverify import adapters, models, pretrained
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError

ARCHS = sorted(DEFAULT_ARCHS)


def tokens(count=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(models.VOCABULARY, (1, count), generator=generator)


def constant(model):
    """Names of the parameters and saved buffers that hold one value only."""
    return [n for n, t in model.state_dict().items() if t.double().std().item() < 1e-3]


def gradients(model):
    inputs = tokens()
    logits = model(input_ids=inputs, use_cache=False).logits.double()
    chosen = logits.log_softmax(-1)[0, :-1].gather(-1, inputs[0, 1:, None])
    chosen.mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("arch", ARCHS)
def test_no_parameter_or_saved_buffer_is_constant(arch):
    assert constant(models.build(arch, seed=3)) == []


def test_the_librarys_own_initialisation_would_be_caught():
    fresh = AutoModelForCausalLM.from_config(models.TINY["glm_moe_dsa"]())
    found = constant(fresh)
    assert "model.norm.weight" in found
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in found


@pytest.mark.parametrize("arch", ARCHS)
def test_every_parameter_gets_a_gradient_but_the_indexers(arch):
    grads = gradients(models.build(arch, seed=5))
    for name, grad in grads.items():
        if ".indexer." in name:
            assert grad is None, name
        else:
            assert 1e-3 < grad.norm() < 30, (name, grad.norm())


@pytest.mark.parametrize("arch", ARCHS)
def test_every_embedding_row_that_is_read_gets_a_gradient(arch):
    grad = gradients(models.build(arch, seed=5))["model.embed_tokens.weight"]
    # The last token is nobody's input that is scored.
    assert grad[tokens()[0, :-1].unique()].norm(dim=1).min() > 1e-4


@pytest.mark.parametrize("arch", ARCHS)
def test_the_seed_alone_decides_the_values(arch):
    first, same, other = (models.build(arch, seed=seed).state_dict() for seed in (1, 1, 2))
    for name in first:
        assert torch.equal(first[name], same[name]), name
        assert not torch.equal(first[name], other[name]), name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("lora", [False, True])
def test_global_random_states_are_untouched(arch, lora):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    models.build(arch, seed=1, lora=lora)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_float64_and_float32_hold_throughout_and_agree(arch):
    double, single = (models.build(arch, seed=1, dtype=d) for d in ("float64", "float32"))
    assert {t.dtype for t in (*double.parameters(), *double.buffers())} == {torch.float64}
    assert {t.dtype for t in (*single.parameters(), *single.buffers())} == {torch.float32}
    for name, value in double.state_dict().items():
        assert torch.equal(value.float(), single.state_dict()[name]), name


def test_bfloat16_autocast_keeps_float32_weights():
    model = models.build("llama", seed=1, dtype="bfloat16-autocast")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16_is_what_the_library_loads(arch, tmp_path):
    models.build(arch, seed=1, dtype="float32").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    built = models.build(arch, seed=1, dtype="bfloat16")
    theirs = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    ours = dict(built.named_parameters()) | dict(built.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name


def test_glm_keeps_its_router_in_float32_under_bfloat16():
    model = models.build("glm_moe_dsa", seed=1, dtype="bfloat16")
    kept = {n for n, t in model.state_dict().items() if t.dtype == torch.float32}
    routers = {f"model.layers.{i}.mlp.gate" for i in (1, 2, 3)}
    assert kept == {
        f"{r}.{leaf}" for r in routers for leaf in ("weight", "e_score_correction_bias")
    }


def test_architectures_have_what_they_are_here_for():
    llama, mistral, qwen, glm = (
        models.build(arch, seed=0).config for arch in ("llama", "mistral", "qwen3_5", "glm_moe_dsa")
    )
    assert llama.num_key_value_heads < llama.num_attention_heads
    assert not llama.tie_word_embeddings
    assert mistral.sliding_window == 8
    assert qwen.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert qwen.linear_num_value_heads == 2 * qwen.linear_num_key_heads
    assert qwen.linear_conv_kernel_dim == 4
    assert glm.indexer_types == ["full", "shared", "full", "shared"]
    assert glm.mlp_layer_types == ["dense", "sparse", "sparse", "sparse"]
    assert (glm.index_n_heads, glm.index_topk) == (32, 8)
    for config in (llama, mistral, qwen, glm):
        assert config._experts_implementation == "eager"
        assert config._attn_implementation == "sdpa"
        assert models.pretrained.dropouts(config) == {}


def test_window_and_top_k_are_shorter_than_the_prompt_and_felt():
    for arch, field in (("mistral", "sliding_window"), ("glm_moe_dsa", "index_topk")):
        config = models.TINY[arch]()
        narrow = models.tiny(config, seed=0, dtype="float64")
        wide = models.TINY[arch]()
        setattr(wide, field, 64)
        wide = models.tiny(wide, seed=0, dtype="float64")
        with torch.no_grad():
            a, b = (m(input_ids=tokens(20), use_cache=False).logits[0] for m in (narrow, wide))
        same = (a - b).abs().amax(dim=-1) < 1e-12
        assert same[:8].all(), arch
        assert not same[8:].any(), arch


def test_delta_net_heads_remember_for_long_and_for_short():
    rates = torch.cat(
        [
            value.exp()
            for seed in range(4)
            for name, value in models.build("qwen3_5", seed=seed).state_dict().items()
            if name.endswith("A_log")
        ]
    )
    assert 0.0099 < rates.min() < 0.05
    assert 0.3 < rates.max() < 1.01


def test_router_margins_stand_above_the_float32_floor():
    for seed in range(4):
        model = models.build("glm_moe_dsa", seed=seed)
        margins = []

        def note(router, _, output, margins=margins):
            best = (output[0].sigmoid() + router.e_score_correction_bias).topk(3).values
            margins.append(best[:, 1] - best[:, 2])

        for module in model.modules():
            if isinstance(module, GlmMoeDsaTopkRouter):
                module.register_forward_hook(note)
        with torch.no_grad():
            model(input_ids=tokens(100, seed))
        margin = torch.cat(margins)
        assert len(margin) == 300
        assert margin.min() > 2e-6
        assert margin.median() > 0.03


def test_both_attention_implementations_agree():
    for arch in ARCHS:
        fused, plain = (
            models.build(arch, seed=1, attention=attention) for attention in models.ATTENTION
        )
        assert plain.config._attn_implementation == "eager"
        with torch.no_grad():
            a, b = (m(input_ids=tokens(), use_cache=False).logits for m in (fused, plain))
        # Model code casts to float32 in places; only oracle precision removes that.
        assert (a - b).abs().max() < 1e-4, arch


def test_train_and_eval_are_chosen_and_equal():
    for arch in ARCHS:
        train, evaluate = (models.build(arch, seed=1, train=train) for train in (True, False))
        assert train.training
        assert not any(module.training for module in evaluate.modules())
        with torch.no_grad():
            a, b = (m(input_ids=tokens(), use_cache=False).logits for m in (train, evaluate))
        assert torch.equal(a, b), arch


@pytest.mark.parametrize("arch", ARCHS)
def test_lora_trains_adapters_and_the_head_alone(arch):
    model = models.build(arch, seed=1, lora=True)
    grads = gradients(model)
    head = "base_model.model.lm_head.modules_to_save.default.weight"
    assert head in grads
    for name, grad in grads.items():
        assert name == head or ".lora_A." in name or ".lora_B." in name
        assert grad.norm() > 1e-4, name
    assert constant(model) == []
    assert {t.dtype for t in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    ("arch", "leaves"),
    [
        ("llama", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        ("mistral", "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"),
        (
            "qwen3_5",
            "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj "
            "in_proj_qkv in_proj_z in_proj_a in_proj_b out_proj",
        ),
        ("glm_moe_dsa", "q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj o_proj"),
    ],
)
def test_lora_reaches_every_layer_it_should(arch, leaves):
    model = models.build(arch, seed=1, lora=True)
    adapted = {n.partition(".lora_A")[0] for n, _ in model.named_parameters() if ".lora_A." in n}
    assert {name.rpartition(".")[2] for name in adapted} == set(leaves.split())
    assert {name.split(".")[4] for name in adapted} == {"0", "1", "2", "3"}
    assert not any("experts" in name or "indexer" in name for name in adapted)
    assert len(adapted) == len(adapters.targets(models.build(arch, seed=1)))


def test_lora_changes_the_output_and_can_be_turned_off():
    plain, adapted = (models.build("llama", seed=1, lora=lora) for lora in (False, True))
    with torch.no_grad():
        expected = plain(input_ids=tokens()).logits
        assert (adapted(input_ids=tokens()).logits - expected).abs().max() > 0.1
        with adapted.disable_adapter():
            assert torch.equal(adapted(input_ids=tokens()).logits, expected)


def test_lora_on_tied_embeddings_trains_the_final_norm():
    config = models.TINY["llama"]()
    config.tie_word_embeddings = True
    model = adapters.attach(models.tiny(config, seed=0, dtype="float64"), seed=0)
    grads = gradients(model)
    whole = [name for name in grads if ".lora_" not in name]
    assert whole == ["base_model.model.model.norm.modules_to_save.default.weight"]
    assert grads[whole[0]].norm() > 1e-3


def test_lora_on_a_tied_model_with_other_names():
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=11, n_positions=16)
    assert adapters._saved_module(GPT2LMHeadModel(config)) == "transformer.ln_f"


def test_lora_without_peft_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install 'lsverify\[lora\]'"):
        models.build("llama", seed=0, lora=True)


def test_unknown_names_get_one_line_that_lists_what_there_is():
    with pytest.raises(InputError) as caught:
        models.build("gpt5", seed=0)
    text = str(caught.value)
    assert "\n" not in text
    assert "'gpt5'" in text
    assert "local folder" in text
    for name in (*ARCHS, pretrained.SMOLLM2):
        assert name in text


@pytest.mark.parametrize(
    ("argument", "text"),
    [({"dtype": "float16"}, "float16.*float64"), ({"attention": "flash"}, "flash.*sdpa, eager")],
)
def test_unknown_options_are_refused(argument, text):
    with pytest.raises(InputError, match=text):
        models.build("llama", seed=0, **argument)
