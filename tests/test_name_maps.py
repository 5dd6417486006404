"""Name maps: round trips of index-valued tensors, and maps and files that are refused."""

from __future__ import annotations

import types

import pytest
import torch
from foreign_files import megatron, model_of, shapes_of, values_of, write, write_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from lsverify.errors import InputError
from lsverify.name_maps import MAPS, NameMap, Rule, read_map
from lsverify.name_round_trip import push, require_bijection
from lsverify.name_ties import Tie, tie
from lsverify.tensor_files import open_tensors

CONFIG = types.SimpleNamespace(num_key_value_heads=2)


@pytest.fixture(scope="module")
def llama():
    shapes = shapes_of(model_of("llama"))
    return shapes, values_of(shapes)


def pulled(owner, shapes, files):
    out = {}
    for one in tie(owner, shapes, CONFIG, files):
        require_bijection(one)
        out |= one.pull(lambda source: files.entries[source.name].read())
    return out


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("arch", "tp", "ep"), [("llama", 1, 1), ("llama", 2, 1), ("mixtral", 1, 2), ("mixtral", 2, 4)]
)
def test_the_shipped_map_gives_back_what_was_sharded_by_hand(tmp_path, arch, tp, ep):
    shapes = shapes_of(model_of(arch))
    values = values_of(shapes)
    folder = write_ranks(megatron(values, tp=tp, ep=ep), tmp_path / "ranks")
    owner = read_map(f"megatron_core:tp={tp},ep={ep}")
    assert equal(pulled(owner, shapes, open_tensors(folder)), values)


def test_one_file_needs_no_prefix(tmp_path, llama):
    shapes, values = llama
    path = write(megatron(values)[0, 0], tmp_path / "all.safetensors")
    assert equal(pulled(read_map("megatron_core"), shapes, open_tensors(path)), values)


JOINS = st.sampled_from(["cat", "sum", "mean", "equal"])


@st.composite
def rules(draw):
    """A rule, its ranks, and shapes of parameters that it can divide."""
    tp, dp, groups = (draw(st.integers(1, 3)) for _ in range(3))
    shards = {"tp": draw(JOINS), "dp": draw(JOINS)}
    cut = 1
    for rank, count in (("tp", tp), ("dp", dp)):
        cut *= count if shards[rank] == "cat" else 1
    count, pieces = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    groups = groups * cut if count * pieces > 1 else 1
    axis, width = draw(st.integers(0, 1)), draw(st.integers(1, 3))
    experts = draw(st.booleans())
    names = [f"w{i}" for i in range(count)]
    shapes = {}
    for name in names:
        shape = [width, width]
        shape[axis] = max(groups, cut) * pieces * draw(st.integers(1, 3))
        shapes[name] = (2, *shape) if experts else tuple(shape)
    rule = Rule(
        ours=names,
        theirs="t{tp}.{dp}.{expert}" if experts else "t{tp}.{dp}",
        axis=axis,
        pieces=pieces,
        groups=groups,
        transpose=draw(st.booleans()),
        experts=experts,
        shards=shards,
    )
    return NameMap(ranks={"tp": tp, "dp": dp}, rule=[rule]), shapes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rules())
def test_every_rule_is_a_bijection_and_its_inverse_comes_back(drawn):
    owner, shapes = drawn
    (rule,) = owner.rule
    one = Tie(owner, rule, {}, tuple(rule.ours), shapes, int(rule.groups), False)
    require_bijection(one)
    values = values_of(shapes)
    back = one.pull(push(one, values).__getitem__)
    # A mean of three equal values may round.
    exact = "mean" not in rule.shards.values()
    assert all(
        torch.allclose(back[n], v, rtol=0 if exact else 1e-15, atol=0) for n, v in values.items()
    )


def swapped_gate_and_up(tensors):
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    gate, up = tensors[name].chunk(2)
    tensors[name] = torch.cat([up, gate])


def plain_qkv(tensors):
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    groups = tensors[name].unflatten(0, (2, -1)).split([32, 16, 16], dim=1)
    tensors[name] = torch.cat([part.flatten(0, 1) for part in groups])


@pytest.mark.parametrize("fault", [swapped_gate_and_up, plain_qkv])
def test_a_fault_of_layout_changes_the_values(tmp_path, llama, fault):
    shapes, values = llama
    tensors = megatron(values)[0, 0]
    fault(tensors)
    files = open_tensors(write(tensors, tmp_path / "f.safetensors"))
    found = pulled(read_map("megatron_core"), shapes, files)
    assert 1 <= sum(not torch.equal(found[name], values[name]) for name in values) <= 3


def refused(owner, shapes, files, match):
    with pytest.raises(InputError, match=match) as caught:
        pulled(owner, shapes, files)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_refused(tmp_path, llama):
    shapes, values = llama
    owner = read_map("megatron_core:tp=2")
    folder = write_ranks(megatron(values, tp=2), tmp_path / "ranks")
    (folder / "tp1_ep0.safetensors").unlink()
    refused(owner, shapes, open_tensors(folder), "tensor 'tp1_ep0/.* is missing, which the map")
    refused(read_map("megatron_core"), shapes, open_tensors(folder), "has shape .* the map makes")


def test_a_transposed_tensor_is_refused(tmp_path, llama):
    shapes, values = llama
    tensors = megatron(values)[0, 0]
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    tensors[name] = tensors[name].T
    files = open_tensors(write(tensors, tmp_path / "f.safetensors"))
    refused(read_map("megatron_core"), shapes, files, r"linear_fc2.weight' has shape \[80, 48\]")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update(more=torch.zeros(2)), "tensor 'more' is used by no rule"),
        (
            lambda t: t["output_layer.weight"][97].fill_(1.0),
            "lm_head.weight has 1 entries of padding that are not zero",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, llama, change, match):
    shapes, values = llama
    tensors = megatron(values)[0, 0]
    change(tensors)
    files = open_tensors(write(tensors, tmp_path / "f.safetensors"))
    refused(read_map("megatron_core"), shapes, files, match)


def test_replicas_that_differ_are_refused_and_extra_state_is_ignored(tmp_path, llama):
    shapes, values = llama
    ranks = megatron(values, tp=2)
    ranks[1, 0]["decoder.layers.0._extra_state"] = torch.zeros(1)
    owner = read_map("megatron_core:tp=2")
    assert equal(pulled(owner, shapes, open_tensors(write_ranks(ranks, tmp_path / "a"))), values)
    ranks[1, 0]["decoder.final_layernorm.weight"] = torch.zeros(48).double()
    files = open_tensors(write_ranks(ranks, tmp_path / "b"))
    refused(owner, shapes, files, "the shards of model.norm.weight on tp 0 and tp 1 differ")


def test_a_rule_that_reads_one_tensor_twice_is_no_bijection():
    # Each expert is read from the same name, since theirs does not say which.
    rule = Rule(ours=["w"], theirs="t", experts=True)
    one = Tie(NameMap(rule=[rule]), rule, {}, ("w",), {"w": (2, 3, 4)}, 1, False)
    with pytest.raises(InputError, match="the rule for w is no bijection"):
        require_bijection(one)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is no name map at rule: Field required"),
        ("rule = 3", "is no name map at rule"),
        ("[[rule]]\nours = []\ntheirs = 'a'", "is no name map at rule.0.ours"),
        ("[[rule]]\nours = ['a']\ntheirs = '{b}'", "cannot be filled in"),
        ("[[rule]]\nours = ['a']\ntheirs = '{'", "cannot be filled in"),
        ("[[rule]]\nours = ['a']\ntheirs = '{layer}'", "'layer' cannot be filled in; there are no"),
        ("[[rule]]\nours = ['a', '{name}']\ntheirs = 'b'", "'name' cannot be filled in"),
        ("[[rule]]\nours = ['a']\ntheirs = '{expert}'", "'expert' cannot be filled in"),
        ("[[rule]]\nours = ['{layer}']\ntheirs = '{layer:999999999}'", "with a width such as"),
        ("[[rule]]\nours = ['{layer.x}']\ntheirs = 'b'", "'layer.x' cannot be filled in"),
        ("[[rule]]\nours = ['{layer!r}']\ntheirs = 'b'", "'layer' cannot be filled in"),
        ("[[rule]]\nours = ['{tp}']\ntheirs = 'b'\n[ranks]\ntp = 2", "'tp' cannot be filled in"),
        ("[[rule]]\nours = ['{layer}.{layer}']\ntheirs = 'b'", "none of its 1 rules matches"),
        ("[[rule]]\nours = ['a']\ntheirs = 'b'\nshards = {tp = 'cat'}", "does not count"),
        ("[[rule]]\nours = ['a']\ntheirs = 'b'\ngroups = 2", "holds one part only"),
        ("[[rule]]\nours = ['a']\ntheirs = 'b'\ncolour = 2", "is no name map at rule.0.colour"),
        ("[[rule]]\nours = ['nothing']\ntheirs = 'b'", "none of its 1 rules matches a parameter"),
        ("rule = [", "is not sound TOML"),
        ("a = 1\na = 2", "is not sound TOML"),
    ],
)
def test_a_map_that_is_none_is_refused(tmp_path, llama, text, match):
    path = tmp_path / "names.toml"
    path.write_text(text)
    files = open_tensors(write({"b": torch.zeros(2)}, tmp_path / "f.safetensors"))
    with pytest.raises(InputError, match=match) as caught:
        pulled(read_map(str(path)), llama[0], files)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["megatron_core:tp=0", "megatron_core:pp=2", "nowhere.toml"])
def test_a_spec_that_is_none_is_refused(spec):
    with pytest.raises(InputError, match=r"number of ranks|cannot be read as a name map"):
        read_map(spec)


def test_shipped_maps_are_read():
    assert [read_map(path.stem).rule for path in MAPS.glob("*.toml")]
