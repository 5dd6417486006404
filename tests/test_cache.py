from __future__ import annotations

import copy

import pytest
import torch
from small_steps import tokens
from transformers import FalconH1Config
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    LinearAttentionLayer,
)

from lsverify.cache import (
    Prefix,
    Slot,
    by_path,
    compact,
    leaves_of,
    map_state,
    new_cache,
    prefix_or_tensor,
    state_of,
    with_leaves,
)
from lsverify.cases import DEFAULT_ARCHS
from lsverify.models import TINY, tiny
from lsverify.precision import computing
from lsverify.prompt import continue_from

ARCHS = sorted(DEFAULT_ARCHS)
KINDS = {
    "llama": [["attention", "attention"]] * 4,
    "mistral": [["sliding", "sliding"]] * 4,
    "qwen3_5": [["conv", "recurrent"]] * 3 + [["attention", "attention"]],
    "glm_moe_dsa": [["index", "latent", "latent"], ["latent", "latent"]] * 2,
}


def captured(model, length=6):
    cache = new_cache(model.config)
    with torch.no_grad():
        continue_from(model, tokens(length), cache, 0, keep=1)
    return cache


def identity(slot, tensor):
    return tensor


def snapshot(cache):
    """Every tensor of a cache by path, integers too, copied."""
    found = {}
    map_state(cache, lambda slot, tensor: found.setdefault(slot.path, tensor.clone()))
    return found


def same(before, after):
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_tensor_of_the_state_has_its_layer_and_kind(oracle, arch):
    state = state_of(captured(oracle(arch)))
    found = [sorted(slot.kind for slot in state if slot.layer == layer) for layer in range(4)]
    assert found == KINDS[arch]
    assert all(slot.path.startswith(f"layers.{slot.layer}.") for slot in state)
    assert all(tensor.dtype == torch.float64 for tensor in state.values())


def test_an_empty_cache_has_no_state(oracle):
    for arch in ARCHS:
        assert state_of(new_cache(oracle(arch).config)) == {}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("count", [1, 3])
def test_continuing_a_copy_leaves_the_original_as_it_was(oracle, arch, count):
    model, cache = oracle(arch), captured(oracle(arch))
    before = snapshot(cache)
    sibling = map_state(cache, identity)
    with torch.no_grad():
        first, _ = continue_from(model, tokens(count, 1), sibling, 6, keep=1)
        assert same(before, snapshot(cache))
        assert not same(before, snapshot(sibling))
        again, _ = continue_from(model, tokens(count, 1), map_state(cache, identity), 6, keep=1)
    assert torch.equal(first, again)


@pytest.mark.parametrize("arch", ARCHS)
def test_continuing_the_original_leaves_a_copy_as_it_was(oracle, arch):
    model, cache = oracle(arch), captured(oracle(arch))
    kept = map_state(cache, identity)
    before = snapshot(kept)
    with torch.no_grad():
        for step in range(3):
            continue_from(model, tokens(1, step), cache, 6 + step, keep=1)
    assert same(before, snapshot(kept))


def test_a_decode_kernel_writes_in_place_and_only_fresh_reads_keep_it_from_the_snapshot(oracle):
    model, cache = oracle("qwen3_5"), captured(oracle("qwen3_5"))
    before = snapshot(cache)
    polluted = map_state(cache, identity)
    for layer in polluted.layers[:3]:
        layer.conv_states = dict(layer.conv_states)
    with torch.no_grad():
        continue_from(model, tokens(1), polluted, 6, keep=1)
    changed = {
        path for path, tensor in snapshot(cache).items() if not torch.equal(tensor, before[path])
    }
    assert changed == {f"layers.{layer}.conv_states.0" for layer in range(3)}


@pytest.mark.parametrize("count", [1, 3])
def test_the_librarys_own_linear_attention_pollutes_the_snapshot(oracle, count):
    model, cache = oracle("qwen3_5"), DynamicCache(config=oracle("qwen3_5").config)
    with torch.no_grad():
        continue_from(model, tokens(6), cache, 0, keep=1)
        before = snapshot(cache)
        continue_from(model, tokens(count), map_state(cache, identity), 6, keep=1)
    changed = {
        path for path, tensor in snapshot(cache).items() if not torch.equal(tensor, before[path])
    }
    kinds = ("conv_states", "recurrent_states")
    assert changed == {f"layers.{layer}.{kind}.0" for layer in range(3) for kind in kinds}


def test_the_librarys_own_linear_attention_breaks_the_gradient_of_the_state(oracle):
    model, cache = oracle("qwen3_5"), DynamicCache(config=oracle("qwen3_5").config)
    with torch.no_grad():
        continue_from(model, tokens(6), cache, 0, keep=1)
    leaves = leaves_of(cache)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        continue_from(model, tokens(3), with_leaves(cache, leaves), 6, keep=1)


@pytest.mark.parametrize("arch", ARCHS)
def test_leaves_get_the_same_gradient_from_one_pass_as_from_token_by_token(oracle, arch):
    model, cache = oracle(arch), captured(oracle(arch), 12)
    branch = tokens(3, 1)
    weights = torch.randn(97, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grads = []
    for pieces in ([branch], list(branch.split(1))):
        leaves, start = leaves_of(cache), 12
        state = with_leaves(cache, leaves)
        for piece in pieces:
            logits, state = continue_from(model, piece, state, start, keep=1)
            start += len(piece)
        (logits[0] @ weights).backward()
        grads.append({path: leaf.grad for path, leaf in leaves.items()})
    assert all(g is not None and g.norm() > 0 for g in grads[0].values())
    for path, expected in grads[0].items():
        assert (grads[1][path] - expected).norm() <= 1e-12 * expected.norm(), path


def test_an_indexers_keys_are_no_leaves(oracle):
    cache = captured(oracle("glm_moe_dsa"))
    left_out = by_path(cache).keys() - leaves_of(cache).keys()
    assert left_out == {"layers.0.indexer_keys", "layers.2.indexer_keys"}


def test_leaves_stand_where_their_paths_say(oracle):
    cache = captured(oracle("qwen3_5"))
    leaves = {"layers.1.recurrent_states.0": torch.zeros(1), "layers.3.values": torch.ones(1)}
    found = by_path(with_leaves(cache, leaves))
    for path, tensor in by_path(cache).items():
        assert found[path] is leaves.get(path, tensor)


def test_every_container_is_copied(oracle):
    cache = captured(oracle("qwen3_5"))
    other = map_state(cache, identity)
    assert other is not cache
    assert other.layers is not cache.layers
    for mine, its in zip(cache.layers, other.layers, strict=True):
        assert type(mine) is type(its)
        assert mine is not its
        for name, value in vars(mine).items():
            if isinstance(value, dict):
                assert getattr(its, name) is not value
                assert type(getattr(its, name)) is type(value)


def test_tuples_dummy_layers_and_prefixes_are_mapped_too():
    cache = DynamicCache()
    layer = DynamicLayer()
    layer.keys, layer.more = Prefix(0, 2), (torch.ones(1), "text", [torch.zeros(1)])
    cache.layers = [DummyLayer(), layer]
    seen = []
    copied = map_state(cache, lambda slot, value: seen.append(slot))
    assert {slot.path for slot in seen} == {"layers.1.keys", "layers.1.more.0", "layers.1.more.2.0"}
    assert {(slot.layer, slot.kind) for slot in seen} == {(1, "attention")}
    assert copied.layers[1].more == (None, "text", [None])
    assert copied.layers[1].keys is None
    assert layer.more[2][0] is not None


def test_only_floating_point_tensors_with_elements_are_state():
    cache, layer = DynamicCache(), DynamicLayer()
    layer.keys, layer.values = torch.tensor([]), torch.ones(2)
    layer.count, layer.length = torch.tensor([3]), Prefix(0, 1)
    cache.layers = [layer]
    assert list(state_of(cache)) == [Slot("layers.0.values", 0, "attention")]


@pytest.fixture(scope="module")
def hybrid():
    """Attention and state-space layers side by side in every layer of the model."""
    return FalconH1Config(num_hidden_layers=1, hidden_size=16, vocab_size=11)


def test_a_hybrid_layer_has_both_kinds_of_state(hybrid):
    cache = new_cache(hybrid)
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    cache.update_conv_state(torch.ones(1, 3, 2), 0, conv_kernel_size=4)
    cache.update_recurrent_state(torch.ones(1, 2, 2), 0)
    assert sorted(slot.kind for slot in state_of(cache)) == [
        "attention",
        "attention",
        "conv",
        "recurrent",
    ]
    assert type(cache.layers[0]) is type(new_cache(hybrid).layers[0])


@pytest.mark.parametrize("pieces", [(5,), (1, 1, 1), (2, 6), (4, 1), (7, 2, 1)])
@pytest.mark.parametrize("stated", [True, False])
def test_assigned_states_are_the_ones_that_the_library_copies(hybrid, pieces, stated):
    ours, theirs = new_cache(hybrid).layers[0], LinearAttentionLayer()
    generator = torch.Generator().manual_seed(0)
    # Without a stated width the first call's own length is the width, in the library as here.
    width = {"conv_kernel_size": 4} if stated else {}
    for length in pieces:
        piece = torch.randn(1, 3, length, generator=generator)
        full = ours.update_conv_state(piece, **width)
        expected = theirs.update_conv_state(piece, **width)
        assert torch.equal(full[..., -length:], expected[..., -length:])
        assert torch.equal(ours.conv_states[0], theirs.conv_states[0])
        recurrent = torch.randn(1, 2, 2, generator=generator)
        assert torch.equal(ours.update_recurrent_state(recurrent), recurrent)
        theirs.update_recurrent_state(recurrent)
        assert torch.equal(ours.recurrent_states[0], theirs.recurrent_states[0])
    for flag in ("has_previous_state", "is_conv_states_initialized", "conv_kernel_size"):
        assert getattr(ours, flag) == getattr(theirs, flag)
    assert ours.is_recurrent_states_initialized == theirs.is_recurrent_states_initialized


def test_a_read_of_a_linear_state_is_fresh_and_kept(hybrid):
    layer = new_cache(hybrid).layers[0]
    assert layer.conv_states[0] is None
    given = torch.ones(1, 2, 2)
    layer.update_recurrent_state(given)
    read = layer.recurrent_states[0]
    read.add_(1)
    assert float(given.sum()) == 4
    assert float(layer.recurrent_states[0].sum()) == 8
    twin = copy.copy(layer.recurrent_states)
    twin[0].add_(1)
    assert float(layer.recurrent_states[0].sum()) == 8


def test_a_state_that_merely_grew_is_kept_by_its_length():
    later = torch.arange(24.0).reshape(2, 4, 3)
    for dim, length in ((0, 1), (1, 2), (2, 1)):
        earlier = later.narrow(dim, 0, length).clone()
        kept = prefix_or_tensor(earlier, later)
        assert kept == Prefix(dim, length)
        assert torch.equal(kept.of(later), earlier)


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        pytest.param(torch.ones(2, 2), None, id="gone later"),
        pytest.param(torch.ones(2, 2), torch.ones(2, 2, 1), id="another rank"),
        pytest.param(torch.ones(2, 2), torch.ones(2, 2), id="not grown"),
        pytest.param(torch.ones(2, 2), torch.ones(3, 3), id="grown along two axes"),
        pytest.param(torch.ones(2, 2), torch.ones(2, 1), id="shrunk"),
        pytest.param(torch.ones(2, 2), torch.zeros(2, 3), id="changed while it grew"),
        pytest.param(
            torch.full((2, 2), torch.nan), torch.full((2, 3), torch.nan), id="not a number"
        ),
    ],
)
def test_any_other_state_is_kept_itself(earlier, later):
    assert prefix_or_tensor(earlier, later) is earlier


def test_a_window_cut_from_more_is_given_storage_of_its_own():
    cache, layer = DynamicCache(), DynamicLayer()
    whole = torch.arange(100.0)
    layer.keys, layer.values = whole[-3:], whole
    cache.layers = [layer]
    small = by_path(compact(cache))
    assert torch.equal(small["layers.0.keys"], whole[-3:])
    assert small["layers.0.keys"].untyped_storage().nbytes() == 12
    assert small["layers.0.values"] is whole


def test_a_family_without_latents_or_windows_is_told_by_its_config():
    """An indexed layer is latent; a multi-head latent one is told by the rank of its latents."""
    config = TINY["glm_moe_dsa"]()
    dense = copy.deepcopy(config)
    dense.layer_types = ["full_attention"] * 4
    for layer in new_cache(dense).layers:
        layer.update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
        assert layer.holds_latents
    model = tiny(TINY["llama"](), seed=0, dtype="float64")
    with computing(model, "float64"):
        assert not hasattr(captured(model).layers[0], "holds_latents")
