from __future__ import annotations

from math import prod

import pytest
import torch

from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.inventory import rows_of, show


def kinds(rows):
    return {row["kind"] for row in rows}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("llama", {"attention"}),
        ("mistral", {"sliding"}),
        ("qwen3_5", {"attention", "conv", "recurrent"}),
        ("glm_moe_dsa", {"latent", "index"}),
    ],
)
def test_every_kind_of_state_is_listed_with_its_bytes(arch, expected):
    rows = rows_of(arch, prompt_length=20, dtype="float32")
    assert kinds(rows) == expected
    for row in rows:
        assert row["bytes"] == prod(row["shape"]) * getattr(torch, row["dtype"]).itemsize
    assert {row["layer"] for row in rows} == {0, 1, 2, 3}


def test_keys_grow_with_the_prompt_and_windows_do_not():
    def size(arch, length):
        return sum(row["bytes"] for row in rows_of(arch, prompt_length=length, dtype="float32"))

    # 4 layers, keys and values, 2 heads of 16, 4 bytes; all but the last prompt token are captured.
    assert size("llama", 41) - size("llama", 31) == 10 * 4 * 2 * 2 * 16 * 4
    assert size("mistral", 41) == size("mistral", 31)


def test_a_prompt_of_one_token_leaves_nothing_behind():
    assert (
        sum(prod(row["shape"]) for row in rows_of("llama", prompt_length=1, dtype="float32")) == 0
    )


def test_bytes_follow_the_dtype():
    wide = rows_of("llama", prompt_length=9, dtype="float64")
    narrow = rows_of("llama", prompt_length=9, dtype="float32")
    assert [row["bytes"] for row in wide] == [2 * row["bytes"] for row in narrow]


def test_the_table_shows_rows_and_sums(capsys):
    rows = rows_of("qwen3_5", prompt_length=9, dtype="float32")
    show(rows)
    printed = capsys.readouterr().out
    total = sum(row["bytes"] for row in rows)
    assert f"in all: {total:,} bytes" in printed
    for kind in kinds(rows):
        assert f"{kind}: " in printed


def test_a_tensor_of_the_whole_model_has_no_layer(capsys):
    show(
        [
            {
                "layer": None,
                "kind": "other",
                "name": "n",
                "shape": (2, 3),
                "dtype": "float32",
                "bytes": 24,
            }
        ]
    )
    assert "2 x 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arch", "length", "dtype", "told"),
    [
        ("lama", 9, "float32", "architecture 'lama' is not known"),
        ("llama", 0, "float32", "prompt length 0 is not allowed: use 1 token or more"),
        ("llama", 9, "int8", "dtype 'int8' is not known"),
    ],
)
def test_what_cannot_be_listed_is_said(arch, length, dtype, told):
    with pytest.raises(InputError, match=told):
        rows_of(arch, prompt_length=length, dtype=dtype)


def test_all_default_architectures_are_covered_above():
    assert set(DEFAULT_ARCHS) == {"llama", "mistral", "qwen3_5", "glm_moe_dsa"}
