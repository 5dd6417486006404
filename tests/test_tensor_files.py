"""Safetensors headers from elsewhere: what is sound is read as the library reads it, everything else is refused."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lsverify.errors import InputError
from lsverify.tensor_files import INDEX, open_tensors

TENSORS = {
    "a": torch.randn(3, 4),
    "b": torch.tensor(1.5, dtype=torch.bfloat16),
    "c": torch.arange(6).view(2, 3),
    "none": torch.zeros(0, 3),
}


@pytest.fixture
def saved(tmp_path):
    save_file(TENSORS, tmp_path / "f.safetensors", metadata={"key": "value"})
    return tmp_path / "f.safetensors"


def test_tensors_are_what_the_library_reads(saved):
    files, expected = open_tensors(saved), load_file(saved)
    assert files.entries.keys() == expected.keys()
    assert files.metadata == {"key": "value"}
    for name, tensor in expected.items():
        found = files.entries[name].read()
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    assert [len(block) for block in files.entries["a"].blocks(5)] == [5, 5, 2]


def rewritten(path, change):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    text = change(header)
    text = (json.dumps(header) if text is None else text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def refused(path, match):
    with pytest.raises(InputError, match=match) as caught:
        open_tensors(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: '{"a": 1, "a": 2}', "names 'a' twice"),
        (lambda h: json.dumps(h).replace('"shape"', '"dtype": "F32", "shape"'), "'dtype' twice"),
        (lambda h: "[]", "a header that is a list"),
        (lambda h: "{", "is not sound JSON"),
        (lambda h: "[" * 100_000, "is not sound JSON"),
        (lambda h: h["a"].update(dtype="F99"), "of dtype 'F99'; known are F64"),
        (lambda h: h["a"].update(shape=[-3, -4]), "of shape"),
        (lambda h: h["a"].update(shape=[True, 12]), "of shape"),
        (lambda h: h["a"].update(shape=[12.0]), "of shape"),
        (lambda h: h["a"].update(shape=[2**62] * 16), "it takes"),
        (lambda h: h["a"].update(shape=[1] * 17), "up to 16 lengths"),
        (lambda h: h["a"].update(shape=[13]), "in 48 bytes; it takes 52"),
        (lambda h: h["a"].update(data_offsets=[0, 10**10]), "at bytes .* it is truncated"),
        (lambda h: h["a"].update(data_offsets=[48, 0]), "at bytes"),
        (lambda h: h["a"].update(data_offsets=[0]), "at bytes"),
        (lambda h: h["a"].update(more=1), "describes tensor 'a'"),
        (lambda h: h["a"].pop("shape") and None, "describes tensor 'a'"),
        (lambda h: h.update(d=h["a"]), "shares bytes with another"),
        (lambda h: h.pop("a") and None, "leaves a gap|belong to no tensor"),
        (lambda h: h.update({"": h.pop("a")}), "a name is printable and not empty"),
        (lambda h: h.update({"a\n\x1b[31m": h.pop("a")}), "a name is printable and not empty"),
        (lambda h: h.update(__metadata__={"a": 1}), "not a mapping of text to text"),
        (lambda h: h.update(__metadata__=[]), "not a mapping of text to text"),
        (lambda h: '{"a": {"shape": [' + "9" * 10_000 + "]}}", "is not sound JSON"),
    ],
)
def test_a_header_that_is_not_sound_is_refused(saved, change, match):
    rewritten(saved, change)
    refused(saved, match)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -8, -1])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    refused(saved, "bytes")


def test_a_header_that_claims_ten_gigabytes_is_refused(saved):
    saved.write_bytes((10 * 2**30).to_bytes(8, "little") + saved.read_bytes()[8:])
    refused(saved, "claims a header of 10737418240 bytes and has")


def test_a_sparse_file_that_has_them_is_refused_too(saved):
    saved.write_bytes((10 * 2**30).to_bytes(8, "little") + saved.read_bytes()[8:])
    with saved.open("r+b") as file:
        file.truncate(12 * 2**30)
    refused(saved, "allowed are 100000000")


@pytest.fixture
def sharded(tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name, keys in (("one", "ab"), ("two", "c")):
        save_file({key: TENSORS[key] for key in keys}, folder / f"{name}.safetensors")
    places = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_an_index_of_shards_is_read_by_folder_or_by_name(sharded):
    for path in (sharded, sharded / INDEX):
        assert {n: e.shape for n, e in open_tensors(path).entries.items()} == {
            "a": (3, 4),
            "b": (),
            "c": (2, 3),
        }


@pytest.mark.parametrize(
    ("places", "match"),
    [
        ({"a": "../f.safetensors"}, "only plain files in its own folder are read"),
        ({"a": "/etc/passwd"}, "only plain files in its own folder are read"),
        ({"a": ".."}, "only plain files in its own folder are read"),
        ({"a": "one.safetensors\0"}, "only plain files in its own folder are read"),
        ({"a": "link.safetensors"}, "only plain files in its own folder are read"),
        ({"a": "three.safetensors"}, "cannot be read: No such file"),
        ({"a": 3}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"a": "one.safetensors"}, "does not say that 'b' is in 'one.safetensors'"),
        (
            {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"},
            "says that 'c' is in 'one.safetensors', which has no such tensor",
        ),
    ],
)
def test_an_index_that_lies_is_refused(sharded, places, match):
    (sharded / "link.safetensors").symlink_to("/etc/passwd")
    (sharded / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(sharded, match)


def test_what_is_no_file_is_refused(tmp_path):
    refused(tmp_path / "nowhere.safetensors", "cannot be read: No such file")
    refused(tmp_path, "has neither model.safetensors.index.json nor")
    refused(tmp_path / ("x" * 300), "cannot be read")
