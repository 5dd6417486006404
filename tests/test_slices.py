import types

import pytest
import torch
import transformers

from lsverify.errors import InputError
from lsverify.slices import fused_slices, partition

COMMON = {"vocab_size": 31, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = COMMON | {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DELTA = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
MOE = {"num_local_experts": 3, "num_experts_per_tok": 2}
GPT = COMMON | {"n_embd": 24, "n_layer": 1, "n_head": 4}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 5}
FALCON = COMMON | {
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "bias": True,
    "alibi": False,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "gpt2": lambda: transformers.GPT2Config(**GPT),
    "gpt_bigcode": lambda: transformers.GPTBigCodeConfig(**GPT, multi_query=True),
    "gpt_bigcode_heads": lambda: transformers.GPTBigCodeConfig(**GPT, multi_query=False),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**LLAMA),
    "bloom": lambda: transformers.BloomConfig(**COMMON, hidden_size=24, n_layer=1, n_head=4),
    "falcon": lambda: transformers.FalconConfig(**FALCON, multi_query=True),
    "falcon_heads": lambda: transformers.FalconConfig(**FALCON, multi_query=False),
    "falcon_new": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "mpt": lambda: transformers.MptConfig(**COMMON, d_model=24, n_layers=1, n_heads=4),
    "phi3": lambda: transformers.Phi3Config(**LLAMA),
    "glm": lambda: transformers.GlmConfig(**LLAMA, head_dim=6),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, **MOE),
    "gpt_oss": lambda: transformers.GptOssConfig(**LLAMA, **MOE, head_dim=6),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**LLAMA | DELTA),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **LLAMA | DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        shared_expert_intermediate_size=6,
    ),
    "glm_moe_dsa": lambda: transformers.GlmMoeDsaConfig(
        **LLAMA | MLA, index_n_heads=8, index_head_dim=8
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LLAMA | MLA),
    "mamba2": lambda: transformers.Mamba2Config(
        **COMMON,
        hidden_size=24,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=12,
        n_groups=2,
        state_size=5,
    ),
    "mamba": lambda: transformers.MambaConfig(**COMMON, hidden_size=24, num_hidden_layers=1),
    "bamba": lambda: transformers.BambaConfig(
        **LLAMA | {"num_hidden_layers": 2, "attn_layer_indices": [0]}, **MAMBA2
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **LLAMA | {"num_hidden_layers": 2, "layer_types": ["full_attention", "conv"]}
    ),
}


def model_of(arch):
    config = CONFIGS[arch]()
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def slices_of(model, **options):
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return fused_slices(shapes, model.config, **options)


def selected(model, slices, module, role):
    """(parameter, slice) of every slice of `module`, bias included, with this role."""
    parameters = dict(model.named_parameters())
    return [
        (parameters[name], part)
        for name, parts in slices.items()
        if {module, f"{module}_bias"} & set(name.split("."))
        for part in parts
        if part.label.split()[-1] == role
    ]


def labels(slices, ending):
    (found,) = {tuple(p.label for p in parts) for n, parts in slices.items() if n.endswith(ending)}
    return list(found)


@pytest.mark.parametrize("arch", CONFIGS)
def test_slices_partition_every_fused_parameter(arch):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[arch]())
    slices = slices_of(model, seen_tokens=[3, 3, 7, 30])
    assert slices
    for name, parts in slices.items():
        shape = dict(model.named_parameters())[name].shape
        entries = torch.arange(shape.numel()).reshape(shape)
        taken = torch.cat([entries[part.index].flatten() for part in parts])
        assert torch.equal(taken.sort().values, torch.arange(shape.numel())), name
        assert len({part.label for part in parts}) == len(parts) > 1


FUSED_ATTENTION = {
    "gpt2": "c_attn",
    "gpt_bigcode": "c_attn",
    "gpt_bigcode_heads": "c_attn",
    "gpt_neox": "query_key_value",
    "bloom": "query_key_value",
    "falcon": "query_key_value",
    "falcon_heads": "query_key_value",
    "falcon_new": "query_key_value",
    "mpt": "Wqkv",
    "phi3": "qkv_proj",
}
DELTA_NETS = {"qwen3_5": "in_proj_qkv", "qwen3_next": "in_proj_qkvz"}

# With one role set to zero the gradient of others vanishes exactly: without values attention gives
# nothing whatever q and k are, and scores of a zero query do not depend on the keys.
DEAD = [
    *[
        (arch, module, zeroed, dead, live)
        for arch, module in (FUSED_ATTENTION | DELTA_NETS).items()
        for zeroed, dead, live in [("v", ("q", "k"), ("v",)), ("q", ("k",), ("q",))]
    ],
    ("phi3", "gate_up_proj", "gate", ("up",), ("gate",)),
    ("glm", "gate_up_proj", "gate", ("up",), ("gate",)),
    ("mixtral", "gate_up_proj", "gate", ("up",), ("gate",)),
    ("gpt_oss", "gate_up_proj", "gate", ("up",), ("gate",)),
    ("glm_moe_dsa", "gate_up_proj", "gate", ("up",), ("gate",)),
    ("glm_moe_dsa", "kv_b_proj", "v", ("k_nope",), ("v",)),
    ("lfm2", "in_proj", "x", ("B", "C"), ("x",)),
    ("mamba", "in_proj", "gate", ("x",), ("gate",)),
    ("mamba2", "in_proj", "gate", ("x", "B", "C", "dt"), ("gate",)),
    ("mamba", "x_proj", "C", ("B",), ("C",)),
    ("mamba2", "conv1d", "x", ("B", "C"), ("x",)),
    ("qwen3_5", "conv1d", "v", ("q", "k"), ("v",)),
    ("bamba", "in_proj", "gate", ("x", "B", "C", "dt"), ("gate",)),
]


@pytest.mark.parametrize(
    ("arch", "module", "zeroed", "dead", "live"),
    DEAD,
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_slice_holds_the_role_that_its_label_says(arch, module, zeroed, dead, live):
    model = model_of(arch)
    slices = slices_of(model)
    with torch.no_grad():
        for parameter, part in selected(model, slices, module, zeroed):
            parameter[part.index] = 0
    model(input_ids=torch.tensor([[3, 9, 5, 12, 7, 21, 8]])).logits.square().mean().backward()
    for role in dead:
        pieces = selected(model, slices, module, role)
        assert pieces
        assert all(not p.grad[part.index].any() for p, part in pieces), role
    for role in live:
        assert any(p.grad[part.index].any() for p, part in selected(model, slices, module, role))


# A loss at the last position sees one query and many keys: the gradient of the query's rows has the
# rank of the positions that the query is made of (`reach`: 1, or the width of a convolution before it).
READERS = [
    *[(arch, module, "q", "k", 1) for arch, module in FUSED_ATTENTION.items()],
    ("qwen3_5", "in_proj_qkv", "q", "k", 4),
    ("qwen3_next", "in_proj_qkvz", "q", "k", 4),
    ("mamba", "x_proj", "C", "B", 1),
    ("mamba2", "in_proj", "C", "B", 4),
    ("mamba2", "in_proj", "gate", "dt", 1),
    ("bamba", "in_proj", "C", "B", 4),
    ("lfm2", "in_proj", "C", "B", 1),
]


@pytest.mark.parametrize(("arch", "module", "reader", "store", "reach"), READERS)
def test_what_reads_the_state_is_told_from_what_fills_it(arch, module, reader, store, reach):
    model = model_of(arch)
    slices = slices_of(model)
    tokens = torch.tensor([[3, 9, 5, 12, 7, 21, 8, 17, 25, 11]])
    model(input_ids=tokens).logits[0, -1].square().mean().backward()

    def rank(role):
        weights = [(p, s) for p, s in selected(model, slices, module, role) if p.dim() == 2]
        (axis,) = {0 if s.index[1] == slice(None) else 1 for _, s in weights}
        rows = torch.cat([p.grad[s.index] for p, s in weights], dim=axis)
        return int(torch.linalg.matrix_rank(rows, rtol=1e-4))

    assert rank(reader) <= reach < rank(store)


def test_mla_slices_are_the_positional_and_the_plain_parts():
    model = model_of("deepseek_v3")
    slices = slices_of(model)
    with torch.no_grad():
        for parameter, part in selected(model, slices, "q_b_proj", "q_rope"):
            parameter[part.index] = 0
    model(input_ids=torch.tensor([[3, 9, 5, 12, 7]])).logits.square().mean().backward()
    (rope,) = selected(model, slices, "kv_a_proj_with_mqa", "rope")
    (latent,) = selected(model, slices, "kv_a_proj_with_mqa", "latent")
    assert not rope[0].grad[rope[1].index].any()
    assert latent[0].grad[latent[1].index].any()
    assert any(p.grad[s.index].any() for p, s in selected(model, slices, "kv_b_proj", "k_nope"))


def test_a_gated_query_projection_is_cut_per_head():
    model = model_of("qwen3_5")
    slices = slices_of(model)
    assert labels(slices, "q_proj.weight")[:3] == ["head 0 q", "head 0 gate", "head 1 q"]
    with torch.no_grad():
        for parameter, part in selected(model, slices, "q_proj", "q"):
            parameter[part.index] = 0
    model(input_ids=torch.tensor([[3, 9, 5, 12, 7]])).logits.square().mean().backward()
    attention = {n: p for n, p in model.named_parameters() if "self_attn" in n}
    (keys,) = (p for n, p in attention.items() if n.endswith("k_proj.weight"))
    assert not keys.grad.any()
    assert all(p.grad[s.index].any() for p, s in selected(model, slices, "q_proj", "gate"))


def test_experts_are_compared_one_by_one():
    slices = slices_of(model_of("glm_moe_dsa"))
    assert labels(slices, "experts.gate_up_proj")[:3] == [
        "expert 0 gate",
        "expert 0 up",
        "expert 1 gate",
    ]
    assert labels(slices, "experts.down_proj") == [f"expert {e}" for e in range(4)]


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_unseen_rows_of_an_untied_embedding_have_no_gradient(arch):
    model = model_of(arch)
    tokens = [3, 9, 5, 9]
    embedding = model.get_input_embeddings()
    embedding(torch.tensor(tokens)).sum().backward()
    (name,) = (n for n, p in model.named_parameters() if p is embedding.weight)
    parts = {part.label: part for part in slices_of(model, seen_tokens=tokens)[name]}
    assert set(parts) == {"seen", "unseen"}
    assert embedding.weight.grad[parts["seen"].index].all()
    assert not embedding.weight.grad[parts["unseen"].index].any()


def test_embeddings_stay_whole_without_two_kinds_of_rows():
    shapes = {"model.embed_tokens.weight": (5, 4)}
    config = types.SimpleNamespace(vocab_size=5, model_type="llama")
    assert fused_slices(shapes, config) == {}
    assert fused_slices(shapes, config, seen_tokens=[]) == {}
    assert fused_slices(shapes, config, seen_tokens=range(5)) == {}
    assert fused_slices({"model.embed_tokens.weight": (3, 4)}, config, seen_tokens=[1]) == {}


def test_a_seen_token_outside_the_embedding_is_refused():
    config = types.SimpleNamespace(vocab_size=5)
    with pytest.raises(InputError, match=r"seen token 5 has no row in wte\.weight: .* 0 to 4"):
        fused_slices({"wte.weight": (5, 4)}, config, seen_tokens=[1, 5])


def test_adapters_are_cut_along_the_output_of_their_layer():
    config = transformers.GPT2Config(**GPT)
    prefix = "base_model.model.transformer.h.0.attn.c_attn"
    found = fused_slices(
        {
            f"{prefix}.base_layer.weight": (24, 72),
            f"{prefix}.lora_A.default.weight": (2, 24),
            f"{prefix}.lora_B.default.weight": (72, 2),
            "base_model.model.transformer.wte.modules_to_save.default.weight": (31, 24),
            "base_model.model.transformer.wte.lora_embedding_A.default": (2, 31),
            "base_model.model.transformer.wte.lora_embedding_B.default": (24, 2),
        },
        config,
        seen_tokens=[4],
    )
    assert {name: parts[1].index for name, parts in found.items() if "c_attn" in name} == {
        f"{prefix}.base_layer.weight": (slice(None), slice(24, 48)),
        f"{prefix}.lora_B.default.weight": (slice(24, 48), slice(None)),
    }
    rows = {
        name.rsplit("wte.")[1]: parts[0].index for name, parts in found.items() if "wte" in name
    }
    assert rows["modules_to_save.default.weight"][0].tolist() == [4]
    assert rows["lora_embedding_A.default"][1].tolist() == [4]
    assert len(rows) == 2


def test_a_composite_config_uses_its_text_part():
    text = transformers.Phi3Config(**LLAMA)
    shapes = {"model.layers.0.self_attn.qkv_proj.weight": (48, 24)}
    assert (
        len(fused_slices(shapes, types.SimpleNamespace(text_config=text))[next(iter(shapes))]) == 3
    )


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.o_proj.weight", (24, 24)),
        ("model.layers.0.self_attn.qkv_proj.weight", (50, 24)),
        ("model.layers.0.mlp.gate_up_proj.weight", (41, 24)),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 41, 24)),
        ("model.layers.0.mlp.experts.gate_up_proj", (3, 40)),
        ("model.layers.0.self_attn.q_proj.weight", (24, 24)),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", (48, 24)),
        ("model.layers.0.mamba.in_proj.weight", (100, 24)),
        ("model.layers.0.mamba.conv1d.weight", (100, 1, 4)),
        ("scale", ()),
        ("layer.weight", ()),
    ],
)
def test_what_is_not_recognised_or_does_not_fit_stays_whole(name, shape):
    assert fused_slices({name: shape}, transformers.Phi3Config(**LLAMA)) == {}


def test_a_family_with_another_order_stays_whole():
    config = types.SimpleNamespace(model_type="codegen", n_heads=4, hidden_size=24)
    assert fused_slices({"h.0.attn.qkv_proj.weight": (72, 24)}, config) == {}


def test_minimax_keeps_its_roles_per_head():
    config = types.SimpleNamespace(model_type="minimax", num_attention_heads=2, head_dim=3)
    found = fused_slices({"model.layers.0.self_attn.qkv_proj.weight": (18, 4)}, config)
    assert [p.label for p in found["model.layers.0.self_attn.qkv_proj.weight"]][2:4] == [
        "head 0 v",
        "head 1 q",
    ]


def test_dbrx_finds_its_key_heads_one_level_down():
    nested = types.SimpleNamespace(kv_n_heads=1)
    config = types.SimpleNamespace(model_type="dbrx", n_heads=4, hidden_size=24, attn_config=nested)
    found = fused_slices({"blocks.0.Wqkv.weight": (36, 24)}, config)
    assert [p.index[0] for p in found["blocks.0.Wqkv.weight"]] == [
        slice(0, 24),
        slice(24, 30),
        slice(30, 36),
    ]


@pytest.mark.parametrize("parts", [[("a", slice(0, 2))], [("a", slice(0, 3)), ("b", slice(2, 4))]])
def test_parts_that_leave_out_or_repeat_an_entry_are_refused(parts):
    with pytest.raises(ValueError, match="do not partition its 4 entries"):
        partition((4, 2), {0: parts})
