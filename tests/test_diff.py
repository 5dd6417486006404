"""`lsverify diff`: two files of gradients, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from lsverify import cli
from lsverify.tensor_files import INDEX

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    name: torch.randn(shape, generator=GENERATOR, dtype=torch.float64)
    for name, shape in {"a": (30, 40), "b": (7,), "none": (0, 3)}.items()
}


@pytest.fixture
def run(capsys):
    def command(*arguments):
        code = cli.run(["diff", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def saved(path, **changes):
    save_file(TENSORS | changes, path)
    return path


@pytest.fixture
def one(tmp_path):
    return saved(tmp_path / "one.safetensors")


def test_equal_files_are_equal(run, one, tmp_path):
    code, out, _ = run(one, saved(tmp_path / "two.safetensors"))
    assert code == 0
    assert out.splitlines()[-1] == "0 of 3 tensors differ by more than their limit"


def test_the_worst_tensor_is_named_with_its_numbers(run, one, tmp_path):
    b = TENSORS["b"].clone()
    b[4] += 0.5
    two = saved(tmp_path / "two.safetensors", b=b)
    code, out, _ = run(one, two, "--json")
    assert code == 1
    found = json.loads(out)
    worst = found["tensors"][0]
    assert (worst["name"], worst["at"], worst["equal"]) == ("b", 4, False)
    assert worst["rel_l2"] == pytest.approx(0.5 / float(TENSORS["b"].norm()), rel=1e-12)
    whole = torch.cat([TENSORS["a"].flatten(), TENSORS["b"]])
    assert found["overall"]["rel_l2"] == pytest.approx(0.5 / float(whole.norm()), rel=1e-12)
    other = torch.cat([TENSORS["a"].flatten(), b])
    cosine = float(torch.nn.functional.cosine_similarity(whole, other, dim=0))
    assert found["overall"]["cosine"] == pytest.approx(cosine, rel=1e-12)
    assert run(one, two, "--limit", "0.9")[0] == 0


def test_the_limit_is_that_of_the_coarser_precision(run, one, tmp_path):
    floats = {name: tensor.float() for name, tensor in TENSORS.items()}
    two = saved(tmp_path / "two.safetensors", **floats)
    assert run(one, two)[0] == 0
    assert run(one, two, "--limit", "1e-12")[0] == 1


def test_shards_of_an_index_are_compared_with_a_file(run, one, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    for name, keys in (("x", ["a"]), ("y", ["b", "none"])):
        save_file({key: TENSORS[key] for key in keys}, folder / f"{name}.safetensors")
    places = {"a": "x.safetensors", "b": "y.safetensors", "none": "y.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    assert run(one, folder)[0] == 0
    assert run(folder / INDEX, one)[0] == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"c": torch.zeros(1)}, "lacks tensor 'c', one of 1 that"),
        ({"a": torch.zeros(40, 30)}, "has 'a' of shape [40, 30]"),
        ({"b": torch.full((7,), torch.nan)}, "tensor 'b' is nan at element 0"),
        ({"b": torch.zeros(7, dtype=torch.float8_e4m3fn)}, "are not compared"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(run, one, tmp_path, change, expected):
    two = saved(tmp_path / "two.safetensors", **change)
    for pair in ((one, two), (two, one)):
        code, out, err = run(*pair)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert expected in err or "has 'a' of shape [30, 40]" in err


@pytest.mark.parametrize("limit", ["-1", "1", "nan"])
def test_a_limit_that_is_none_is_refused(run, one, limit):
    code, _, err = run(one, one, "--limit", limit)
    assert code == 2
    assert "limit" in err


def test_memory_does_not_grow_with_the_file(tmp_path):
    # Two sparse files of 192 MiB of zeros each; a block of each takes 8 MiB as float64.
    size = 192 * 2**20
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    for name in "ab":
        with (tmp_path / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header.encode())
            file.truncate(8 + len(header) + size)
    code = """
import resource, sys
from pathlib import Path
from lsverify.diff import diff
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
assert diff(Path(sys.argv[1]), Path(sys.argv[2])).unequal == 0
print((peak() - before) / 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 96, "MiB"
