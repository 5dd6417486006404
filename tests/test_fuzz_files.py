"""Garbage in: seeded mutations of files that are sound, each of which must end in one line and exit code 2."""

from __future__ import annotations

import functools
import json
import random
import shutil
import sys

import pytest
import torch
from foreign_files import megatron, write, write_ranks
from safetensors.torch import load_file

from lsverify import check, cli
from lsverify.tensor_files import INDEX

QUICK = ["--prompt-length", "9", "--group-size", "2", "--response-length", "3,1"]
SEED, EACH = 20260101, 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An exported folder and gradients that fit it, as one file, as shards, and as ranks."""
    folder = tmp_path_factory.mktemp("fuzz")
    assert cli.run(["export", "llama", str(folder / "case"), *QUICK]) == 0
    weights = load_file(folder / "case" / "model.safetensors")
    tensors = weights | {"log_probs.0": torch.zeros(3), "log_probs.1": torch.zeros(1)}
    tensors["log_probs.2"] = torch.zeros(3)
    write(tensors, folder / "f.safetensors")
    write_ranks(megatron(weights, tp=2), folder / "ranks")
    (folder / "shards").mkdir()
    places = {name: f"{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for shard in set(places.values()):
        part = {name: tensors[name] for name in tensors if places[name] == shard}
        write(part, folder / "shards" / shard)
    (folder / "shards" / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


def split(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 : 8 + length], raw[8 + length :]


def join(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def truncated(rng, folder):
    path = folder / "f.safetensors"
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    return path


def longer(rng, folder):
    path = folder / "f.safetensors"
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 99)))
    return path


def other_header_length(rng, folder):
    path = folder / "f.safetensors"
    raw = path.read_bytes()
    right = int.from_bytes(raw[:8], "little")
    wrong = rng.choice([rng.randrange(right), right + rng.randint(1, 999), 10 * 2**30, 2**63])
    path.write_bytes(wrong.to_bytes(8, "little") + raw[8:])
    return path


def damaged_header(rng, folder):
    path = folder / "f.safetensors"
    _, text, data = split(path)
    at = rng.randrange(len(text.rstrip()))
    # No white space, which changes nothing between two tokens.
    other = rng.choice([b for b in range(256) if b not in b" \t\r\n" and b != text[at]])
    if text[at] in b" \t\r\n":
        other = 0
    join(path, text[:at] + bytes([other]) + text[at + 1 :], data)
    return path


def lying_entry(rng, folder):
    path = folder / "f.safetensors"
    header, _, data = split(path)
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    field, value = rng.choice(
        [
            ("dtype", rng.choice(["F99", "", 3, None, "I8", "C64"])),
            ("shape", rng.choice([[-1], [2**70], [1.5], None, "3", [True], [0], [10**9, 10]])),
            ("data_offsets", rng.choice([[0, 10**10], [5, 1], [-4, 0], [0], None, [0.0, 4.0]])),
            ("more", 1),
        ]
    )
    header[name][field] = value
    join(path, header, data)
    return path


def duplicate_key(rng, folder):
    path = folder / "f.safetensors"
    header, text, data = split(path)
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    again = f"{{{json.dumps(name)}: {json.dumps(header[name])}, "
    join(path, again.encode() + text[1:], data)
    return path


def changed(rng, folder, change):
    path = folder / "f.safetensors"
    tensors = load_file(path)
    change(tensors, rng.choice(sorted(tensors)))
    return write(tensors, path)


def not_finite(rng, folder):
    def change(tensors, name):
        flat = tensors[name].view(-1)
        flat[rng.randrange(len(flat))] = rng.choice([torch.nan, torch.inf, -torch.inf])

    return changed(rng, folder, change)


def missing_name(rng, folder):
    return changed(rng, folder, lambda tensors, name: tensors.pop(name))


def extra_name(rng, folder):
    name = "".join(rng.choices("abcé.{}%s/\\", k=rng.randint(1, 40)))
    return changed(rng, folder, lambda tensors, _: tensors.update({name: torch.zeros(2)}))


def wrong_shape(rng, folder):
    def change(tensors, name):
        shape = list(tensors[name].shape)
        shape[rng.randrange(len(shape))] += rng.randint(1, 3)
        tensors[name] = torch.zeros(shape)

    return changed(rng, folder, change)


def wrong_dtype(rng, folder):
    def change(tensors, name):
        tensors[name] = tensors[name].to(rng.choice([torch.int64, torch.bool, torch.uint8]))

    return changed(rng, folder, change)


def lying_index(rng, folder):
    path = folder / "shards" / INDEX
    content = json.loads(path.read_text())
    name = rng.choice(sorted(content["weight_map"]))
    place = rng.choice(
        ["../f.safetensors", "/etc/passwd", "..", "", "9.safetensors", "a\0b", "x" * 999, 3, None]
    )
    content["weight_map"][name] = place
    path.write_text(json.dumps(content) if rng.random() < 0.9 else json.dumps(content)[:-3])
    return folder / "shards"


def map_of(text):
    def mutate(rng, folder):
        (folder / "names.toml").write_bytes(text(rng))
        return folder / "ranks", "--map", folder / "names.toml"

    return mutate


@map_of
def garbage_map(rng):
    return rng.randbytes(rng.randint(0, 200))


@map_of
def map_that_matches_nothing(rng):
    name = "".join(rng.choices("abc.{}", k=9))
    return f"[[rule]]\nours = [{json.dumps(name)}]\ntheirs = 'x'".encode()


def wrong_ranks(rng, folder):
    count = rng.choice(["1", "3", "4", "0", "-1", "x", "99999"])
    return folder / "ranks", "--map", f"megatron_core:tp={count}"


def missing_shard(rng, folder):
    path = rng.choice(sorted((folder / "ranks").iterdir()))
    tensors = load_file(path)
    tensors.pop(rng.choice(sorted(tensors)))
    write(tensors, path)
    return folder / "ranks", "--map", "megatron_core:tp=2"


def altered_folder(rng, folder):
    path = rng.choice(sorted((folder / "case").iterdir()))
    raw = bytearray(path.read_bytes())
    # A control character: no byte of a JSON text, so that case.json is caught as well.
    at = rng.randrange(len(raw))
    raw[at] = next(b for b in (1, 2) if b != raw[at])
    path.write_bytes(raw)
    return folder / "f.safetensors"


def traversing_case(rng, folder):
    path = folder / "case" / "case.json"
    content = json.loads(path.read_text())
    name = rng.choice(sorted(content["files"]))
    content["files"][rng.choice(["../" * rng.randint(1, 9) + name, "/" + name, name + "\0"])] = (
        content["files"].pop(name)
    )
    path.write_text(json.dumps(content))
    return folder / "f.safetensors"


MUTATIONS = [
    truncated,
    longer,
    other_header_length,
    damaged_header,
    lying_entry,
    duplicate_key,
    not_finite,
    missing_name,
    extra_name,
    wrong_shape,
    wrong_dtype,
    lying_index,
    garbage_map,
    map_that_matches_nothing,
    wrong_ranks,
    missing_shard,
    altered_folder,
    traversing_case,
]
# What `diff` refuses too, against the sound file.
FOR_DIFF = MUTATIONS[:12]


@pytest.fixture
def setting_once(monkeypatch):
    """The model and the problem of the folder are built once: here only files change."""
    monkeypatch.setattr(check, "make_setting", SETTING)
    monkeypatch.setattr(check, "Referee", REFEREE)


SETTING = functools.cache(check.make_setting)
REFEREE = functools.lru_cache(1)(check.Referee)
tried: list[object] = []
commands_refused: list[str] = []


@pytest.mark.usefixtures("setting_once")
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_garbage_ends_in_one_line_and_exit_code_2(sound, tmp_path, capsys, mutate):
    for number in range(EACH):
        rng = random.Random(f"{SEED} {number}")
        folder = tmp_path / str(number)
        shutil.copytree(sound, folder)
        found = mutate(rng, folder)
        given = found if isinstance(found, tuple) else (found,)
        commands = [["check", folder / "case", *given]]
        if mutate in FOR_DIFF:
            commands.append(["diff", sound / "f.safetensors", *given])
        for command in commands:
            code = cli.run([str(part) for part in command])
            out, err = capsys.readouterr()
            case = f"{number}: {command[0]} {out} {err}"
            assert code == 2, case
            assert out == "", case
            assert len(err.splitlines()) == 1, case
            assert err.startswith("lsverify: "), case
            assert err[:-1].isprintable(), case
            assert len(err) < 1200, case
            commands_refused.append(command[0])
        tried.append(mutate)
        shutil.rmtree(folder)


def test_how_many_were_tried(capsys):
    with capsys.disabled():
        kinds = len(set(tried))
        sys.stdout.write(
            f"\n{len(tried)} inputs of {kinds} kinds were refused in one line, by {len(commands_refused)} commands\n"
        )
    # Fewer where the kinds are shared out among processes, or only some are asked for.
    assert len(tried) >= 300 or len(set(tried)) < len(MUTATIONS)
