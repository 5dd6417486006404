"""A case exported, its step taken elsewhere, and the file judged; and files that are refused."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch
from foreign_files import megatron, write, write_ranks
from safetensors import safe_open
from safetensors.torch import load_file

from lsverify import cli, evidence
from lsverify.setting import make_setting

QUICK = ["--prompt-length", "9", "--group-size", "2", "--response-length", "3,1"]
RUNGS = ["objective", "execution", "forward", "gradient", "optimizer_delta"]


@pytest.fixture
def run(capsys):
    """Runs one command: exit code, standard output, standard error."""

    def command(*arguments):
        code = cli.run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


def exported(folder, case, *options):
    """The folder of a case, its step taken by the script that it comes with, in a process without lsverify."""
    with redirect_stdout(io.StringIO()):
        assert cli.run(["export", case, str(folder), *QUICK, *options]) == 0
    block = "import sys; sys.modules['lsverify'] = None; sys.argv = sys.argv[1:]; import runpy; "
    code = block + "runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = [folder / "step.py", folder.with_suffix(".safetensors")]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, arguments[1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("llama") / "case", "llama")


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("mixtral") / "case", "mixtral", "--tied", "--seed", "1")


def parts(path):
    """The file's tensors and metadata, to be changed."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    return load_file(path), metadata


def statuses(out):
    return {rung["name"]: rung["status"] for rung in json.loads(out)["cases"][0]["rungs"]}


def test_a_step_taken_elsewhere_is_proven_but_for_what_a_file_cannot_show(run, llama, tmp_path):
    code, out, err = run("check", *llama)
    assert (code, err) == (1, "")
    assert (
        out.splitlines()[-1] == "forward, gradient, one optimizer step equal; execution not shown"
    )
    arguments = ["--allow-missing", "execution", "--json", "--out", tmp_path]
    code, out, _ = run("check", *llama, *arguments)
    assert code == 0
    assert statuses(out) == dict.fromkeys(RUNGS, "proven") | {"execution": "not_run"}
    assert json.loads((tmp_path / "receipt.json").read_text()) == json.loads(out)
    code, out, _ = run("repeat", tmp_path / "receipt.json")
    assert code == 0
    assert "every number is the same" in out


def test_gradients_alone_are_proven_as_gradients_alone(run, llama, tmp_path):
    tensors, _ = parts(llama[1])
    plain = {n: t for n, t in tensors.items() if not n.startswith(("after.", "log_p", "loss"))}
    path = write(plain, tmp_path / "g.safetensors")
    code, out, _ = run("check", llama[0], path, "--allow-missing", "execution")
    assert code == 1
    assert (
        out.splitlines()[-1] == "gradient equal; execution, forward, one optimizer step not shown"
    )
    missing = ["--allow-missing", "execution,forward,optimizer_delta"]
    assert run("check", llama[0], path, *missing)[0] == 0
    missing = ["--allow-missing", "execution,forward", "--require", "gradient"]
    assert run("check", llama[0], path, *missing)[0] == 0


def test_the_claim_of_a_policy_is_what_the_gradient_is_held_to(run, llama, tmp_path):
    folder = tmp_path / "case"
    assert run("export", "llama:detach", folder, *QUICK)[0] == 0
    code, out, _ = run("check", folder, llama[1], "--allow-missing", "execution", "--json")
    assert code == 1
    assert statuses(out)["gradient"] == "failed"
    assert json.loads(out)["cases"][0]["bias"]["rel_l2"] < 1e-4


def test_a_fused_tied_model_with_choices(run, mixtral, tmp_path):
    folder, path = mixtral
    missing = ["--allow-missing", "execution", "--json"]
    code, out, _ = run("check", folder, path, *missing)
    assert code == 0
    assert (
        "tables of decisions are not in the file (decisions.layers.0.mlp.gate.0)"
        in json.loads(out)["cases"][0]["warnings"][0]
    )
    tensors, metadata = parts(path)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors |= decisions(folder)
    both = write(tensors, tmp_path / "both.safetensors", metadata)
    code, out, _ = run("check", folder, both, *missing)
    assert code == 0
    assert json.loads(out)["cases"][0]["warnings"] == []
    name = next(name for name in tensors if name.startswith("decisions."))
    tensors[name] = (tensors[name] + 1) % 8
    wrong = write(tensors, tmp_path / "wrong.safetensors", metadata)
    code, out, _ = run("check", folder, wrong, *missing)
    assert code == 1
    assert statuses(out)["forward"] == "failed"
    tensors["lm_head.weight"] = 2 * tensors["lm_head.weight"]
    path = write(tensors, tmp_path / "two.safetensors", metadata)
    code, _, err = run("check", folder, path)
    assert code == 2
    assert "lm_head.weight and model.embed_tokens.weight with different values" in err


def decisions(folder):
    """Experts chosen, from the model's own routers on the folder's problem."""
    from lsverify.decisions import ChoiceMode
    from lsverify.export import read_case

    setting = make_setting(read_case(folder))
    out = {}
    for i in range(len(setting.problem)):
        seen = []
        with torch.no_grad(), ChoiceMode(lambda scores, chosen, seen=seen: seen.append(chosen)):
            setting.model(input_ids=setting.problem.tokens(i)[None, :-1], use_cache=False)
        for layer, chosen in enumerate(seen):
            out[f"decisions.layers.{layer}.mlp.gate.{i}"] = chosen
    return out


@pytest.mark.parametrize("tp", [1, 2])
def test_megatron_names_through_the_shipped_map(run, llama, tmp_path, tp):
    tensors, metadata = parts(llama[1])
    values = {n: t for n, t in tensors.items() if n.startswith(("model.", "lm_head."))}
    ranks = megatron(values, tp=tp)
    folder = write_ranks(ranks, tmp_path / "ranks")
    missing = ["--allow-missing", "execution,forward,optimizer_delta"]
    names = ["--map", f"megatron_core:tp={tp}"]
    assert run("check", llama[0], folder, *names, *missing)[0] == 0
    # A fault of layout is a wrong gradient, and the parameter is named.
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    gate, up = ranks[0, 0][name].chunk(2)
    ranks[0, 0][name] = torch.cat([up, gate])
    write_ranks(ranks, folder)
    code, out, _ = run("check", llama[0], folder, *names, *missing, "--json")
    assert code == 1
    assert statuses(out)["gradient"] == "failed"
    assert json.loads(out)["cases"][0]["gradient"]["worst_parameter"].startswith(
        "model.layers.1.mlp"
    )
    after = {n: t for n, t in tensors.items() if n.startswith("after.")}
    stepped = megatron({n.removeprefix("after."): t for n, t in after.items()})[0, 0]
    whole = megatron(values)[0, 0] | {f"after.{n}": t for n, t in stepped.items()}
    both = write(whole, tmp_path / "both.safetensors", metadata)
    missing = ["--allow-missing", "execution,forward"]
    assert run("check", llama[0], both, "--map", "megatron_core", *missing)[0] == 0


def change_of(name):
    def change(tensors, metadata):
        tensors[name] = tensors[name] * 1.01

    return change


def no_step(tensors, metadata):
    metadata["optimizer"] = json.dumps({"kind": "sgd", "lr": 0.06, "max_grad_norm": 0.5})


@pytest.mark.parametrize(
    ("change", "rung"),
    [
        (change_of("model.layers.0.mlp.up_proj.weight"), "gradient"),
        (change_of("log_probs.1"), "forward"),
        (change_of("loss"), "forward"),
        (change_of("after.model.norm.weight"), "optimizer_delta"),
        (no_step, "optimizer_delta"),
    ],
)
def test_what_is_wrong_fails_its_own_rung(run, llama, tmp_path, change, rung):
    tensors, metadata = parts(llama[1])
    change(tensors, metadata)
    path = write(tensors, tmp_path / "f.safetensors", metadata)
    code, out, err = run("check", llama[0], path, "--json", "--allow-missing", "execution")
    assert (code, err) == (1, "")
    assert [name for name, status in statuses(out).items() if status == "failed"] == [rung]


def one_line(run, expected, *arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert expected in err


def poke(name, index, value):
    def change(tensors, metadata):
        tensors[name].view(-1)[index] = value

    return change


def put(name, tensor):
    return lambda tensors, metadata: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (poke("lm_head.weight", 5, torch.nan), "tensor 'lm_head.weight' is nan at element 5"),
        (poke("loss", 0, torch.inf), "tensor 'loss' is inf at element 0"),
        (lambda t, m: t.pop("lm_head.weight"), "lacks lm_head.weight (1 of 39"),
        (lambda t, m: t.pop("after.lm_head.weight"), "lacks lm_head.weight (1 of 39"),
        (lambda t, m: t.pop("log_probs.1"), "lacks log_probs.1; the problem has 3 responses"),
        (put("log_probs.3", torch.zeros(1)), "has log_probs.3; the problem has 3 responses"),
        (put("log_probs.0", torch.zeros(2)), "log_probs.0 of F32 [2]; response 0 has 3 tokens"),
        (put("loss", torch.zeros(2)), "has loss of F32 [2]; give one number"),
        (put("more", torch.zeros(2)), "has tensor 'more', which is no parameter"),
        (put("lm_head.weight", torch.zeros(48, 97)), "of shape [48, 97]; the model's is [97, 48]"),
        (put("lm_head.weight", torch.zeros(97, 48).int()), "of dtype I32; a gradient or"),
        (put("decisions.layers.0.mlp.0", torch.zeros(11, 2).int()), "chooses nothing; none does"),
        (put("decisions.layers.0.mlp.9", torch.zeros(11, 2).int()), "response 9 of 3 asks for"),
        (lambda t, m: m.pop("optimizer"), "no `optimizer` in its metadata"),
        (lambda t, m: m.update(optimizer='{"kind": "lion"}'), "has optimizer"),
        (lambda t, m: m.update(optimizer="[" * 9999), "has optimizer"),
        (lambda t, m: m.update(optimizer='{"kind": "sgd", "lr": NaN}'), "has optimizer"),
    ],
)
def test_a_file_that_is_no_answer_is_refused(run, llama, tmp_path, change, expected):
    tensors, metadata = parts(llama[1])
    change(tensors, metadata)
    path = write(tensors, tmp_path / "f.safetensors", metadata)
    one_line(run, expected, "check", llama[0], path)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("config.json", lambda text: text.replace("48", "49"), "config.json: is not the file that"),
        ("step.py", lambda text: text + "#", "step.py: is not the file that case.json names"),
        ("case.json", lambda text: text.replace('"seed": 0', '"seed": 1'), "another problem than"),
        ("case.json", lambda text: text.replace('"seed": 0', '"seed": -1'), "at 'case.seed'"),
        ("case.json", lambda text: text.replace('"step.py"', '"../x"'), "differs in '../x'"),
        ("case.json", lambda text: text[:-5], "is not sound JSON"),
        ("case.json", lambda text: "[" * 99999, "is not sound JSON"),
        ("case.json", lambda text: "3", "case.json: is not valid at 'the file'"),
        ("case.json", lambda text: text.replace('"float32"', '"float8"'), "dtype 'float8'"),
        (
            "case.json",
            lambda text: text.replace("[\n   3,", "[\n   9999999999,"),
            "sizes that are not",
        ),
        (
            "case.json",
            lambda text: text.replace('"candidate": null', '"candidate": "os:abort"'),
            "names a candidate",
        ),
    ],
)
def test_a_folder_that_was_altered_is_refused(run, llama, tmp_path, name, change, expected):
    folder = tmp_path / "case"
    folder.mkdir()
    for path in llama[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    text = (folder / name).read_text()
    assert change(text) != text
    (folder / name).write_text(change(text))
    one_line(run, expected, "check", folder, llama[1])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--allow-missing", "gradient"], "allow-missing 'gradient' is not allowed"),
        (["--require", "everything"], "require 'everything' is not allowed"),
        (["--map", "nowhere.toml"], "cannot be read as a name map"),
        (["--map", "megatron_core"], "has no tensor that the map names, such as 'embedding.word"),
    ],
)
def test_options_that_are_none_are_refused(run, llama, arguments, expected):
    one_line(run, expected, "check", *llama, *arguments)


def test_a_precision_in_which_no_step_shows_says_so(run, tmp_path):
    folder = tmp_path / "case"
    assert run("export", "llama", folder, *QUICK, "--dtype", "bfloat16")[0] == 0
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"after.{name}": tensor for name, tensor in tensors.items()}
    path = write(tensors, tmp_path / "f.safetensors", {"optimizer": '{"kind": "sgd", "lr": 0.05}'})
    code, out, _ = run("check", folder, path)
    assert code == 1
    last = "gradient failed; one optimizer step not applicable; execution, forward not shown"
    assert out.splitlines()[-1] == last


def test_export_refuses_what_it_cannot_write(run, tmp_path):
    (tmp_path / "file").write_text("")
    one_line(run, "is a file: choose a folder", "export", "llama", tmp_path / "file")
    one_line(run, "has other files in it", "export", "llama", tmp_path)
    one_line(run, "is not known", "export", "nothing", tmp_path / "a")
    one_line(run, "name one architecture", "export", "all", tmp_path / "a")
    one_line(run, "policy", "export", "llama:nothing", tmp_path / "a")
    one_line(run, "is not a folder that", "check", tmp_path / "nowhere", tmp_path / "file")
    assert not (tmp_path / "a").exists()


def test_an_export_again_is_the_same(run, llama):
    before = {path.name: path.read_bytes() for path in llama[0].iterdir()}
    assert run("export", "llama", llama[0], *QUICK)[0] == 0
    assert {path.name: path.read_bytes() for path in llama[0].iterdir()} == before
    assert evidence.exit_code([]) == 1
