from __future__ import annotations

import re

import pytest
import torch
from small_steps import tokens
from torch import nn

import lsverify.prompt
from lsverify.cache import by_path, map_state, new_cache, state_of
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError, StalePromptState
from lsverify.models import build
from lsverify.prompt import capture, continue_from, keep_logits, unwrapped
from lsverify.tags import adapter_of, fingerprint, tags_of, token_hash, weights_version

ARCHS = sorted(DEFAULT_ARCHS)
PROMPT = tokens(9)


@pytest.fixture(scope="module")
def adapted():
    """llama under two adapters, `default` in use."""
    model = build("llama", seed=0, dtype="float32", lora=True)
    model.add_adapter("other", model.peft_config["default"])
    return model


def captured(model, boundary=8, chunk=3, keep_from=0, prompt=PROMPT):
    return capture(model, prompt, boundary=boundary, chunk=chunk, keep_from=keep_from)


def near(actual, expected, limit=1e-12):
    return actual.keys() == expected.keys() and all(
        (actual[path] - expected[path]).norm() <= limit * expected[path].norm() for path in expected
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_the_state_does_not_depend_on_the_chunk(oracle, arch):
    model, prompt = oracle(arch), tokens(20)
    whole = by_path(captured(model, 19, 19, 19, prompt).cache)
    for chunk in (1, 7):
        assert near(by_path(captured(model, 19, chunk, 19, prompt).cache), whole)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("boundary", [0, 1, 8])
def test_a_branch_continues_as_if_there_had_been_no_cut(oracle, arch, boundary):
    model = oracle(arch)
    state = captured(model, boundary, keep_from=boundary)
    with torch.no_grad():
        logits, _ = continue_from(model, PROMPT[boundary:], state.branch({}), boundary, keep=1)
        expected = model(input_ids=PROMPT[None], use_cache=False).logits[0, -1:]
    assert (logits - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("arch", ARCHS)
def test_branches_leave_the_captured_state_as_it_was(oracle, arch):
    model, state = oracle(arch), captured(oracle(arch))
    before = {path: tensor.clone() for path, tensor in by_path(state.cache).items()}
    for count in (1, 3):
        leaves = state.leaves(lambda layer, kind: True)
        logits, _ = continue_from(model, tokens(count), state.branch(leaves), 8, keep=1)
        logits.sum().backward()
        assert all(leaf.grad.norm() > 0 for leaf in leaves.values())
    after = by_path(state.cache)
    assert all(torch.equal(after[path], tensor) for path, tensor in before.items())
    assert not any(tensor.requires_grad for tensor in after.values())


@pytest.mark.parametrize("arch", ARCHS)
def test_each_chunks_incoming_state_is_that_of_a_shorter_capture(oracle, arch):
    model, prompt = oracle(arch), tokens(21)
    state = captured(model, 20, 6, 0, prompt)
    outgoing = by_path(state.cache)
    assert [chunk.start for chunk in state.chunks] == [0, 6, 12, 18]
    for chunk in reversed(state.chunks):
        incoming = chunk.incoming(outgoing)
        assert torch.equal(chunk.tokens, prompt[chunk.start : min(chunk.start + 6, 20)])
        shorter = captured(model, chunk.start, 6, chunk.start, prompt)
        expected = by_path(shorter.cache)
        found = by_path(incoming)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], expected[path]) for path in expected)
        if chunk.start:
            assert incoming.get_seq_length() == chunk.start
        outgoing = found


@pytest.mark.parametrize(
    ("keep_from", "starts"),
    [(0, [0, 3, 6]), (1, [1, 4, 7]), (3, [3, 6]), (5, [5]), (7, [7]), (8, [])],
)
def test_chunks_are_kept_from_where_the_sweep_will_end(oracle, keep_from, starts):
    state = captured(oracle("llama"), keep_from=keep_from)
    assert [chunk.start for chunk in state.chunks] == starts
    assert sum(len(chunk.tokens) for chunk in state.chunks) == 8 - keep_from


def test_a_one_token_prompt_has_an_empty_state(oracle):
    for arch in ARCHS:
        state = captured(oracle(arch), 0, prompt=PROMPT[:1])
        assert (
            state.chunks,
            state.tensors,
            state.leaves(lambda layer, kind: True),
            state.inventory(),
        ) == ((), {}, {}, [])


@pytest.mark.parametrize("chunk", [0, -1])
def test_a_chunk_without_tokens_is_refused(oracle, chunk):
    with pytest.raises(InputError, match=f"chunk {chunk} is not allowed: use 1 or more"):
        captured(oracle("llama"), chunk=chunk)


def test_capture_builds_no_graph_and_touches_no_gradient(oracle):
    model = oracle("qwen3_5")
    assert not any(tensor.requires_grad for tensor in captured(model).tensors.values())
    assert all(parameter.grad is None for parameter in model.parameters())


# What a state was computed from ------------------------------------------------------------------


def flip_signs(model):
    model.lm_head.weight.data.neg_()


def swap_rows(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.flip(0)


def swap_columns(model):
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.copy_(weight.data.flip(1))


def one_bit(model):
    weight = model.model.norm.weight
    weight.data[3] = torch.nextafter(weight.data[3], torch.tensor(10.0, dtype=weight.dtype))


def optimizer_step(model):
    bias = model.model.norm.weight
    bias.grad = torch.full_like(bias, 1e-3)
    torch.optim.SGD([bias], lr=1e-6).step()
    bias.grad = None


def write_buffer(model):
    model.model.rotary_emb.inv_freq[2] *= 1.001


def swap_layers(model):
    first, second = (model.model.layers[i].mlp.down_proj for i in (0, 1))
    first.weight, second.weight = second.weight, first.weight


def change_dtype(model):
    model.to(torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        flip_signs,
        swap_rows,
        swap_columns,
        one_bit,
        optimizer_step,
        write_buffer,
        swap_layers,
        change_dtype,
    ],
)
def test_any_change_of_the_weights_makes_a_state_stale(change):
    model = build("llama", seed=0)
    state = captured(model)
    state.check(model, PROMPT, 8)
    change(model)
    with pytest.raises(StalePromptState, match="weights was") as caught:
        state.check(model, PROMPT, 8)
    assert str(caught.value).count(" was ") == 1
    assert "capture again" in str(caught.value)


def test_weights_written_back_are_the_same_weights(oracle):
    model, state = oracle("llama"), captured(oracle("llama"))
    model.lm_head.weight.data.neg_()
    assert weights_version(model) != state.tags.weights
    model.lm_head.weight.data.neg_()
    state.check(model, PROMPT, 8)


def test_the_version_does_not_depend_on_strides():
    model = build("llama", seed=0)
    before = weights_version(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    assert weights_version(model) == before


def test_every_dtype_has_a_fingerprint():
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        ones = torch.ones(4, dtype=dtype)
        assert fingerprint(ones) == fingerprint(ones.clone())
        assert fingerprint(ones) != fingerprint(torch.zeros(4, dtype=dtype))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
    assert fingerprint(torch.ones(0)) == 0


@pytest.mark.parametrize(
    ("prompt", "boundary", "field"),
    [
        pytest.param(torch.cat([PROMPT[:4], PROMPT[4:5] + 1, PROMPT[5:]]), 8, "tokens", id="token"),
        pytest.param(PROMPT[[1, 0, *range(2, 9)]], 8, "tokens", id="order"),
        pytest.param(torch.cat([PROMPT, PROMPT[:1]]), 8, "prompt_length", id="longer"),
    ],
)
def test_another_prompt_makes_a_state_stale(oracle, prompt, boundary, field):
    state = captured(oracle("llama"))
    with pytest.raises(StalePromptState, match=f"{field} was") as caught:
        state.check(oracle("llama"), prompt, boundary)
    assert str(caught.value).count(" was ") == 1


def test_another_boundary_makes_a_state_stale_and_the_message_names_both(oracle):
    state = captured(oracle("llama"))
    with pytest.raises(StalePromptState, match=re.escape("boundary was 8 and is 7")) as caught:
        state.check(oracle("llama"), PROMPT, 7)
    assert "tokens was" in str(caught.value)


def test_the_live_tail_is_no_part_of_the_state(oracle):
    state = captured(oracle("llama"))
    state.check(oracle("llama"), torch.cat([PROMPT[:8], PROMPT[8:] + 1]), 8)


def test_tokens_are_told_apart_by_value_not_by_text():
    assert token_hash(torch.tensor([1, 23])) != token_hash(torch.tensor([12, 3]))
    assert token_hash(torch.tensor([1, 23])) == token_hash(torch.tensor([1, 23]))


def test_the_adapter_in_use_is_a_tag(adapted):
    state = captured(adapted)
    assert state.tags.adapter == "default"
    state.check(adapted, PROMPT, 8)
    with adapted.disable_adapter():
        assert adapter_of(adapted) == "off"
        with pytest.raises(StalePromptState, match="adapter was default and is off"):
            state.check(adapted, PROMPT, 8)
    adapted.set_adapter("other")
    with pytest.raises(StalePromptState, match="adapter was default and is other"):
        state.check(adapted, PROMPT, 8)
    adapted.set_adapter("default")
    state.check(adapted, PROMPT, 8)


def test_an_adapter_that_is_off_in_one_layer_is_another_adapter(adapted):
    layer = adapted.get_base_model().model.layers[0].self_attn.q_proj
    before = adapter_of(adapted)
    layer.enable_adapters(False)
    assert re.fullmatch(r"default in \d+ of \d+ layers", adapter_of(adapted))
    layer.enable_adapters(True)
    assert adapter_of(adapted) == before


def test_a_model_without_adapters_says_so(oracle):
    assert adapter_of(oracle("llama")) == "none"
    assert tags_of(oracle("llama"), PROMPT, 8).adapter == "none"


# Size --------------------------------------------------------------------------------------------


def test_the_inventory_counts_every_tensor_by_its_shape(oracle):
    rows = captured(oracle("qwen3_5")).inventory()
    found = {(row.layer, row.kind, row.name): (row.shape, row.dtype, row.bytes) for row in rows}
    linear = {
        ("conv", "conv_states.0"): ((1, 80, 4), "float64", 80 * 4 * 8),
        ("recurrent", "recurrent_states.0"): ((1, 4, 12, 8), "float64", 4 * 12 * 8 * 8),
    }
    attention = ((1, 2, 8, 16), "float64", 2 * 8 * 16 * 8)
    expected = {
        (layer, kind, f"layers.{layer}.{name}"): size
        for layer in range(3)
        for (kind, name), size in linear.items()
    } | {(3, "attention", f"layers.3.{name}"): attention for name in ("keys", "values")}
    assert found == expected


def test_an_inventory_in_half_precision_has_half_the_bytes():
    model = build("llama", seed=0, dtype="bfloat16")
    row = captured(model).inventory()[0]
    assert (row.kind, row.dtype, row.bytes) == ("attention", "bfloat16", 2 * 8 * 16 * 2)


def held_and_shaped(state):
    """Bytes of the storages that a state keeps alive, and bytes of its tensors by their shapes."""
    storages, shaped = {}, 0

    def note(slot, tensor):
        nonlocal shaped
        if isinstance(tensor, torch.Tensor):
            shaped += tensor.nbytes
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    map_state(state.cache, note)
    for chunk in state.chunks:
        map_state(chunk.shell, note)
    return sum(storages.values()), shaped


@pytest.mark.parametrize("arch", ARCHS)
def test_a_state_holds_no_more_than_its_shapes(oracle, arch):
    held, shaped = held_and_shaped(captured(oracle(arch), 40, 16, 0, tokens(41)))
    assert held <= shaped


@pytest.mark.parametrize("arch", ["llama", "glm_moe_dsa"])
def test_checkpoints_of_attention_cost_nothing(oracle, arch):
    prompt = tokens(41)
    with_chunks = held_and_shaped(captured(oracle(arch), 40, 4, 0, prompt))
    without = held_and_shaped(captured(oracle(arch), 40, 4, 40, prompt))
    assert with_chunks == without


@pytest.mark.parametrize("arch", ARCHS)
def test_checkpoints_grow_with_the_prompt_not_with_its_square(oracle, arch):
    sizes = [
        held_and_shaped(captured(oracle(arch), length, 8, 0, tokens(length + 1)))[0]
        for length in (16, 32, 48)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0]


def test_checkpoints_kept_whole_would_grow_with_the_square(oracle, monkeypatch):
    monkeypatch.setattr(lsverify.prompt, "prefix_or_tensor", lambda earlier, later: earlier)
    sizes = [
        held_and_shaped(captured(oracle("llama"), length, 8, 0, tokens(length + 1)))[0]
        for length in (16, 32, 48)
    ]
    assert sizes[2] - sizes[1] > sizes[1] - sizes[0]


def test_views_kept_whole_would_hold_more_than_their_shapes(oracle, monkeypatch):
    monkeypatch.setattr(lsverify.prompt, "compact", lambda cache: cache)
    held, shaped = held_and_shaped(captured(oracle("mistral"), 40, 16, 0, tokens(41)))
    assert held > 2 * shaped


# The one primitive -------------------------------------------------------------------------------


class Recorder(nn.Module):
    """A model that takes every token for a score of one and remembers what it was called with."""

    def forward(self, input_ids, position_ids, cache, use_cache):
        self.seen = position_ids, cache, use_cache
        logits = input_ids[..., None].float()
        return type("Output", (), {"logits": logits})


def test_positions_are_always_given_and_a_model_may_return_all_logits():
    model, cache = Recorder(), object()
    logits, after = continue_from(model, tokens(4), cache, 7, keep=2)
    assert model.seen[0].tolist() == [[7, 8, 9, 10]]
    assert model.seen[1:] == (cache, True)
    assert after is cache
    assert logits[:, 0].tolist() == tokens(4)[-2:].tolist()
    assert keep_logits(model, 2) == {}


def test_logits_that_nobody_reads_are_not_computed(oracle):
    model = oracle("llama")
    assert keep_logits(model, 3) == {"logits_to_keep": 3}
    widths = []
    handle = model.lm_head.register_forward_hook(lambda m, a, out: widths.append(out.shape[1]))
    captured(model, chunk=4)
    handle.remove()
    assert widths == [1, 1]


def test_a_wrapped_model_is_unwrapped(adapted, oracle):
    assert type(unwrapped(adapted)).__name__ == "LlamaForCausalLM"
    assert unwrapped(oracle("llama")) is oracle("llama")
    assert state_of(new_cache(unwrapped(adapted).config)) == {}


def test_everything_that_moved_is_said():
    model, prompt = build("llama", seed=0), torch.arange(6)
    state = capture(model, prompt, boundary=4, chunk=4, keep_from=4)
    with pytest.raises(
        StalePromptState, match=r"fit: tokens was \w+ and is \w+; boundary was 4 and is 3; capture"
    ):
        state.check(model, prompt.flip(0), 3)
