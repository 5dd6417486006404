from __future__ import annotations

import json
import os
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from lsverify import problem_files
from lsverify.errors import InputError
from lsverify.problems import Problem, ProblemSpec, draw

SPEC = ProblemSpec(prompt_lengths=(5, 3), group_sizes=(2, 3), holes=True, truncated=True, seed=11)


def problem_of(spec=SPEC):
    problem = draw(spec, vocab_size=40)
    generator = torch.Generator().manual_seed(spec.seed)
    noise = [
        torch.randn(length, generator=generator, dtype=torch.float64)
        for length in problem.response_lengths
    ]
    return problem.replace_logps(old=noise)


@pytest.fixture
def saved(tmp_path):
    return problem_of().save(tmp_path / "a" / "problem")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reference": False},
        {"prompt_lengths": (1,), "group_sizes": (1,), "response_lengths": (1,)},
        {"rewards": "equal", "seed": 2**63 - 1},
    ],
)
def test_load_gives_back_exactly_what_was_saved(tmp_path, changes):
    problem = problem_of(SPEC.model_copy(update=changes))
    again = Problem.load(problem.save(tmp_path))
    assert again.content_hash() == problem.content_hash()
    assert again.seed == problem.seed
    assert [r.truncated for r in again.responses] == [r.truncated for r in problem.responses]
    for name, value in problem.flat().items():
        assert torch.equal(again.flat()[name], value)


def test_sampler_log_probs_and_nan_at_masked_slots_survive(tmp_path):
    problem = problem_of()
    logps = [torch.where(r.mask, r.old_logp, torch.nan) for r in problem.responses]
    problem = problem.replace_logps(old=logps, sampler=logps)
    assert any(bool(logp.isnan().any()) for logp in logps)
    assert Problem.load(problem.save(tmp_path)).content_hash() == problem.content_hash()


def test_saving_again_replaces_and_leaves_nothing_else_behind(saved):
    other = problem_of(SPEC.model_copy(update={"seed": 12}))
    other.save(saved)
    assert Problem.load(saved).content_hash() == other.content_hash()
    assert sorted(os.listdir(saved)) == ["problem.json", "problem.safetensors"]


def test_files_get_ordinary_permissions(saved, tmp_path):
    (tmp_path / "plain").write_text("")
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    for name in ("problem.json", "problem.safetensors"):
        assert stat.S_IMODE((saved / name).stat().st_mode) == expected


def test_a_save_that_fails_leaves_the_old_file_whole(saved, monkeypatch):
    before = (saved / "problem.safetensors").read_bytes()
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        problem_of(SPEC.model_copy(update={"seed": 12})).save(saved)
    assert (saved / "problem.safetensors").read_bytes() == before
    assert sorted(os.listdir(saved)) == ["problem.json", "problem.safetensors"]


def refused(directory, message):
    with pytest.raises(InputError, match=message) as caught:
        Problem.load(directory)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def edit_json(directory, change):
    path = directory / "problem.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def setting(name, value):
    return lambda content: content.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (setting("schema_version", 3), "schema_version is 3; this version reads 1 and 2"),
        (setting("schema_version", "1"), "schema_version is '1'; this version reads 1 and 2"),
        (setting("schema_version", True), "schema_version is True; this version reads 1 and 2"),
        (lambda c: c.pop("schema_version"), "schema_version is None; this version reads 1 and 2"),
        (lambda c: c.pop("rewards"), "rewards: Field required"),
        (setting("colour", 1), "colour: Extra inputs are not permitted"),
        (
            lambda c: c["rewards"].__setitem__(2, float("nan")),
            "rewards.2: Input should be a finite",
        ),
        (lambda c: c["rewards"].__setitem__(2, "1"), "rewards.2: Input should be a valid number"),
        (lambda c: c["prompt_lengths"].__setitem__(0, -5), "prompt_lengths.0: .* greater than 0"),
        (
            lambda c: c["response_lengths"].__setitem__(1, 0),
            "response_lengths.1: .* greater than 0",
        ),
        (
            lambda c: c["response_lengths"].__setitem__(1, 1.5),
            "response_lengths.1: .* valid integer",
        ),
        (setting("prompt_lengths", []), "prompt_lengths: List should have at least 1 item"),
        (setting("group_sizes", [5]), "group_sizes has 1 entries; the other fields ask for 2"),
        (
            setting("group_sizes", [2, 2]),
            "response_lengths has 5 entries; the other fields ask for 4",
        ),
        (lambda c: c["rewards"].pop(), "rewards has 4 entries; the other fields ask for 5"),
        (lambda c: c["truncated"].append(False), "truncated has 6 entries; the other fields ask"),
        (setting("log_probs", ["ref_logp", "old_logp"]), "log_probs is .*; list each name once"),
        (setting("log_probs", ["old_logp"] * 2), "log_probs is .*; list each name once"),
        (setting("log_probs", ["ref_logp"]), "log_probs lacks old_logp"),
        (setting("log_probs", ["new_logp"]), "log_probs.0: Input should be 'old_logp'"),
        (
            lambda c: c["prompt_lengths"].__setitem__(0, 6),
            "lengths in problem.json ask for .* bytes",
        ),
        (lambda c: c["prompt_lengths"].__setitem__(0, 10**18), "lengths in problem.json ask for"),
        (setting("content_hash", "0" * 64), "the content does not match its content_hash"),
        (setting("seed", 12), "the content does not match its content_hash"),
        (lambda c: c["prompt_lengths"].reverse(), "the content does not match its content_hash"),
        (lambda c: c["rewards"].reverse(), "the content does not match its content_hash"),
    ],
)
def test_a_layout_that_contradicts_itself_or_the_tensors_is_refused(saved, change, message):
    edit_json(saved, change)
    refused(saved, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\xfd", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "schema_version is None"),
    ],
)
def test_a_layout_that_is_no_json_object_is_refused(saved, content, message):
    (saved / "problem.json").write_bytes(content)
    refused(saved, message)


def test_a_layout_of_absurd_size_is_not_even_parsed(saved, monkeypatch):
    monkeypatch.setattr(problem_files, "LARGEST_JSON", 10)
    refused(saved, "bytes; at most 10 are read")


@pytest.mark.parametrize("name", ["problem.json", "problem.safetensors"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, f"{name}: cannot be read: No such file")


def test_a_directory_that_does_not_exist_is_named(tmp_path):
    refused(tmp_path / "nowhere", "nowhere/problem.json: cannot be read")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -8, -1])
def test_truncated_tensors_are_refused(saved, keep):
    path = saved / "problem.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(saved, "problem.safetensors: ")


def test_a_header_that_claims_more_than_the_file_holds_is_refused(saved):
    path = saved / "problem.safetensors"
    raw = path.read_bytes()
    path.write_bytes((2**62).to_bytes(8, "little") + raw[8:])
    refused(saved, "the header claims 4611686018427387904 ")


def test_a_file_far_larger_than_its_lengths_is_not_read(saved):
    with (saved / "problem.safetensors").open("r+b") as file:
        file.truncate(2**40)
    refused(saved, "1099511627776 bytes; at most ")


def rewrite_header(directory, change):
    path = directory / "problem.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["mask"].update(shape=[9**9]),
        lambda header: header["mask"].update(data_offsets=[0, 1]),
        lambda header: header["mask"].update(dtype="F99"),
        lambda header: header.pop("mask"),
        lambda header: header.clear(),
    ],
)
def test_a_header_that_does_not_describe_its_data_is_refused(saved, change):
    rewrite_header(saved, change)
    refused(saved, "problem.safetensors: not a safetensors file: ")


def test_a_header_that_is_not_json_is_refused(saved):
    path = saved / "problem.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + b"}" + raw[9:])
    refused(saved, "problem.safetensors: not a safetensors file: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ref_logp"), "bytes of tensors; it is truncated or belongs to another"),
        (
            lambda t: t.update(more=torch.zeros(3)),
            "bytes of tensors; it is truncated or belongs to",
        ),
        (lambda t: t.update(old_logps=t.pop("old_logp")), "tensor old_logp is missing"),
        (lambda t: t.update(more=torch.zeros(0)), "tensor more is not expected"),
        (
            lambda t: t.update(old_logp=t["old_logp"].long()),
            r"tensor old_logp is I64 \[\d+\]; expected F64",
        ),
        (lambda t: t.update(mask=t["mask"].view(torch.uint8)), "tensor mask is U8"),
        (
            lambda t: t.update(mask=t["mask"][None]),
            r"tensor mask is BOOL \[1, \d+\]; expected BOOL",
        ),
        (
            lambda t: t["old_logp"].fill_(torch.nan),
            r"member 0: old_logp\[0\] is nan at a token that",
        ),
        (lambda t: t["response_tokens"].fill_(-1), r"member 0: response tokens\[0\] is -1"),
        (lambda t: t["prompt_tokens"].fill_(-1), r"prompt\[0\] is -1; token ids start at 0"),
        (lambda t: t["mask"].view(torch.uint8).fill_(2), "mask holds bytes other than 0 and 1"),
        (lambda t: t["mask"].logical_not_(), "the content does not match its content_hash"),
        (lambda t: t["old_logp"].neg_(), "the content does not match its content_hash"),
    ],
)
def test_tensors_that_are_not_what_was_saved_are_refused(saved, change, message):
    path = saved / "problem.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    refused(saved, message)


def test_tensors_of_another_problem_of_equal_lengths_are_refused(saved, tmp_path):
    other = problem_of(SPEC.model_copy(update={"seed": 12})).save(tmp_path / "other")
    (other / "problem.safetensors").replace(saved / "problem.safetensors")
    refused(saved, "files were altered or mixed")
