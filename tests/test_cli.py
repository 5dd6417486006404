"""The command line in this process; two commands in a fresh one, as a user has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest
from judged import judged, made_up, receipt_of

from lsverify import __version__, benchmark, cli, evidence, ladder

ROOT = Path(__file__).parent.parent
QUICK = ["gate", "--arch", "llama", "--quick"]


@pytest.fixture
def run(capsys):
    """Runs one command: exit code, standard output, standard error."""

    def command(*arguments):
        code = cli.run([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return command


@pytest.fixture
def not_judged(monkeypatch):
    """Cases are looked up instead of judged."""
    monkeypatch.setattr(ladder, "judge", lambda config: judged(policy=config.policy))


def test_a_gate_that_holds(run, tmp_path):
    arguments = [*QUICK, "--policy", "exact", "--policy", "detach", "--json"]
    arguments += ["--out", tmp_path / "out", "--junit", tmp_path / "gate.xml"]
    code, out, err = run(*arguments)
    assert code == 0
    printed = json.loads(out)
    jsonschema.validate(printed, evidence.schema())
    assert printed["command"] == [str(argument) for argument in arguments]
    assert [case["policy"] for case in printed["cases"]] == ["exact", "detach"]
    assert json.loads((tmp_path / "out" / "receipt.json").read_text()) == printed
    assert len(err.splitlines()) == 2 * 5
    assert any(
        line.split()[:3] == ["llama-exact", "gradient", "proven"] for line in err.splitlines()
    )
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("10", "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gate.xml", "out"]


def test_a_gate_that_refuses_shows_the_distance(run, tmp_path):
    code, out, _ = run(
        *QUICK, "--policy", "detach", "--reference", "full", "--junit", tmp_path / "gate.xml"
    )
    assert code == 1
    row = next(line for line in out.splitlines() if "llama" in line and "detach" in line)
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells[:3] == ["llama", "detach", "full"]
    assert cells[3:8] == ["proven", "proven", "proven", "failed", "failed"]
    assert float(cells[8]) > 0.1
    assert float(cells[8]) == float(cells[10])
    assert cells[-1] == "FAIL / fail"
    assert "llama detach: gradient failed" in out
    assert "relative L2" in out
    assert "0 of 1 cases reached their claim" in out
    suite = ElementTree.parse(tmp_path / "gate.xml").getroot().find("testsuite")
    assert suite.get("failures") == "2"


def test_adapters_only(run):
    code, out, _ = run(*QUICK, "--policy", "exact", "--lora", "--require", "gradient", "--json")
    assert code == 0
    names = [parameter["name"] for parameter in json.loads(out)["cases"][0]["parameters"]]
    assert names
    assert all("lora_" in name or "modules_to_save" in name for name in names)


def test_every_option_arrives(run, monkeypatch):
    seen = []

    def judge(config):
        seen.append(config)
        return judged(policy="exact")

    monkeypatch.setattr(ladder, "judge", judge)
    code, _, _ = run(
        *["gate", "--arch", "mistral", "--policy", "tail:2", "--reference", "full"],
        *["--require", "forward", "--dtype", "float32", "--prompt-length", 9, "--group-size", 3],
        *["--response-length", "2,1", "--objective", "dapo", "--seed", 5, "--chunk", 4],
        *["--branches", 2, "--quantised", "--tied", "--spans", "prefix"],
        *["--lora", "--quantised", "--tied", "--quick", "--candidate", "candidates:full"],
    )
    assert code == 0
    assert seen[0].model_dump() == {
        "arch": "mistral",
        "policy": "tail:2",
        "candidate": "candidates:full",
        "reference": "full",
        "dtype": "float32",
        "prompt_length": 9,
        "group_size": 3,
        "response_lengths": (2, 1),
        "objective": "dapo",
        "seed": 5,
        "chunk": 4,
        "branches": 2,
        "quantised": True,
        "tied": True,
        "spans": "prefix",
        "lora": True,
        "training": True,
        "require": "forward",
    }


@pytest.mark.parametrize("name", ["exits", "skips", "raises"])
def test_no_way_out_of_a_candidate_looks_like_success(run, name, tmp_path):
    code, out, _ = run(*QUICK, "--candidate", f"candidates:{name}", "--json", "--out", tmp_path)
    assert code == 1
    assert len(json.loads(out)["cases"]) == 1
    assert (tmp_path / "receipt.json").is_file()


def test_an_interrupt_is_said_and_leaves_nothing(run, tmp_path):
    code, out, err = run(
        *[*QUICK, "--candidate", "candidates:interrupts"],
        *["--out", tmp_path / "out", "--junit", tmp_path / "gate.xml"],
    )
    assert code == 2
    assert out == ""
    assert err == "lsverify: interrupted; nothing half written is left behind\n"
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_what_a_candidate_prints_is_not_in_the_json(run, tmp_path, monkeypatch):
    (tmp_path / "loud_candidate.py").write_text(
        "print('imported')\nfrom candidates import chatty as step\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = ["--candidate", "loud_candidate:step", "--require", "execution", "--json"]
    code, out, err = run(*QUICK, *arguments)
    assert code == 0
    assert json.loads(out)["cases"]
    assert "imported" in err


def test_a_warning_of_a_candidate_is_shown_as_it_is(run):
    code, out, _ = run(*QUICK, "--candidate", "candidates:warns", "--require", "execution")
    assert code == 0
    assert "warning UserWarning: a shape [/bold] of [2, 3] is odd" in out


def test_a_fault_of_ours_is_three(run, monkeypatch, tmp_path):
    def broken(config):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ladder, "judge", broken)
    code, out, err = run(
        *QUICK, "--out", tmp_path / "out", "--junit", tmp_path / "gate.xml", "--json"
    )
    assert code == 3
    assert out == ""
    assert "ZeroDivisionError: planted" in err
    assert err.splitlines()[-1] == "lsverify: this is a fault of lsverify itself; please report it"
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_an_exit_from_within_is_a_fault_too(run, monkeypatch, error):
    def broken(mode):
        raise error

    monkeypatch.setattr("lsverify.tracking.check_mode", broken)
    assert run(*QUICK)[0] == 3


BAD = [
    (["--arch", "lama"], "architecture 'lama' is not known: use one of "),
    (["--arch", "llama", "--arch", "lama"], "architecture 'lama' is not known"),
    (["--policy", "windows:3"], "policy 'windows:3' is not known: use exact, detach, window:M"),
    (["--policy", "tail:0"], "policy 'tail:0': the live tail needs at least 1 token"),
    (["--prompt-length", "-3"], "prompt length -3 is not allowed"),
    (["--prompt-length", "x"], "Invalid value for '--prompt-length'"),
    (["--group-size", "0"], "group size 0 is not allowed"),
    (["--chunk", "0"], "chunk 0 is not allowed"),
    (["--branches", "0"], "branches 0 is not allowed"),
    (["--seed", "99999999999999999999"], "seed 99999999999999999999 is not allowed"),
    (["--response-length", "3,x"], "response length '3,x' is not allowed"),
    (["--response-length", "1,2,3,4"], "names 4 lengths for 3 responses"),
    (["--dtype", "float16"], "dtype 'float16' is not known: use one of float64"),
    (["--objective", "ppo"], "objective 'ppo' is not known; choose from grpo"),
    (["--require", "learning"], "require 'learning' is not known: use one of objective"),
    (["--reference", "half"], "reference 'half' is not known: use one of declared, full"),
    (["--wandb", "on"], "wandb 'on' is not known: use one of offline, online, disabled"),
    (["--candidate", "nowhere:step"], "no module 'nowhere'"),
    (["--candidate", "nowhere"], "candidate 'nowhere' is not of the form MODULE:NAME"),
    (["--candidate", "candidates:gone"], "module 'candidates' has no 'gone'"),
    (["--candidate", "candidates:not_callable"], "is not callable: give (model, problem,"),
    (["--out", "{tmp}/file"], "cannot be written to"),
    (["--junit", "{tmp}/missing/gate.xml"], "is not a file in a folder that exists"),
    (["--junit", "{tmp}"], "is not a file in a folder that exists"),
    (["--no-such-option"], "No such option: --no-such-option"),
    (["surplus"], "surplus"),
]


@pytest.mark.parametrize(("arguments", "told"), BAD, ids=lambda value: "-".join(value)[:30])
def test_bad_input_is_one_line_and_two(run, tmp_path, arguments, told, monkeypatch):
    monkeypatch.setattr(ladder, "make_setting", pytest.fail)
    (tmp_path / "file").write_text("")
    code, out, err = run(*QUICK, *(a.replace("{tmp}", str(tmp_path)) for a in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("lsverify: ")
    assert err.count("\n") == 1
    assert told in err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_bad_input_leaves_no_folder_behind(run, tmp_path):
    for arguments in (["--dtype", "float16"], ["--candidate", "nowhere:step"]):
        code, _, _ = run(*QUICK, *arguments, "--out", tmp_path / "out")
        assert code == 2
        assert list(tmp_path.iterdir()) == []


def test_bad_input_that_shows_only_when_it_runs_is_one_line(run, tmp_path):
    code, out, err = run(*QUICK, "--candidate", "candidates:wants_a_reference", "--out", tmp_path)
    assert code == 2
    assert out == ""
    assert "objective has beta > 0" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["gates"], ["repeat"], ["--no-such-option"]])
def test_unknown_commands_are_one_line_and_two(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "lsverify --help lists what there is" in err


def test_help_and_version(run):
    assert run("--version") == (0, f"{__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    for command in ("gate", "repeat", "table", "inventory", "archs", "doctor", "schema"):
        assert command in out
    code, out, _ = run()
    assert code == 2
    assert "gate" in out


def test_a_reader_that_goes_away_is_no_fault(run, monkeypatch):
    def gone(line):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(cli.typer, "echo", gone)
    out, err = sys.stdout, sys.stderr
    try:
        assert cli.run(["schema"]) == 1
    finally:
        sys.stdout, sys.stderr = out, err


def test_bench_measures_writes_and_says(run, monkeypatch, tmp_path):
    asked = []

    def measured(workload, progress):
        asked.append(workload)
        progress("measured")
        return "numbers"

    monkeypatch.setattr(benchmark, "run", measured)
    monkeypatch.setattr(benchmark, "table", lambda result: f"table of {result}")
    monkeypatch.setattr(benchmark, "summary", lambda result: [f"summary of {result}"])
    monkeypatch.setattr(benchmark, "write", lambda result, path: path.write_text(result))
    code, out, err = run(
        *["bench", "--path", "exact", "--prompt-length", 64, "--group-size", 2, "--group-size", 3],
        *["--response-length", 4, "--chunk", 16, "--layers", 1, "--width", 64],
        *["--out", tmp_path / "bench.json"],
    )
    assert (code, err) == (0, "measured\n")
    assert out == "table of numbers\nsummary of numbers\n"
    assert (tmp_path / "bench.json").read_text() == "numbers"
    workload = asked[0]
    assert (workload.paths, workload.group_sizes) == (("exact",), (2, 3))
    assert (workload.prompt_length, workload.chunk) == (64, 16)


def test_schema_is_json(run):
    code, out, _ = run("schema")
    assert code == 0
    assert json.loads(out) == evidence.schema()


def test_inventory_as_a_table_and_as_json(run):
    code, out, _ = run("inventory", "llama", "--prompt-length", 9, "--dtype", "float64")
    assert code == 0
    assert (
        "in all: 16,384 bytes" in out
    )  # 8 tokens, 4 layers, keys and values, 2 heads of 16, float64
    code, out, _ = run("inventory", "llama", "--prompt-length", 9, "--json")
    assert sum(row["bytes"] for row in json.loads(out)) == 8192
    code, _, err = run("inventory", "lama")
    assert (code, err.count("\n")) == (2, 1)
    assert "architecture 'lama' is not known" in err


def test_doctor(run):
    code, out, _ = run("doctor")
    assert code == 0
    assert "torch" in out


def test_table_in_markdown(run, tmp_path):
    evidence.save(receipt_of(judged(policy="detach")), tmp_path / "receipt.json")
    code, out, _ = run("table", tmp_path / "receipt.json")
    assert code == 0
    assert len(out.splitlines()) == 3
    assert "| llama | detach | stopped at B |" in out


def test_a_receipt_repeats(run, tmp_path, not_judged, monkeypatch):
    evidence.save(receipt_of(judged(policy="exact")), tmp_path / "receipt.json")
    monkeypatch.setattr("lsverify.repeat.judge", lambda config: judged(policy=config.policy))
    code, out, _ = run("repeat", tmp_path / "receipt.json")
    assert code == 0
    assert out.splitlines()[-1] == "every number is the same"
    assert "environment:" not in out


def test_a_receipt_that_does_not_repeat_is_one(run, tmp_path, monkeypatch):
    before = receipt_of(made_up())
    there = before.environment.model_copy(update={"threads": 99})
    evidence.save(before.model_copy(update={"environment": there}), tmp_path / "receipt.json")
    other = made_up(measure=2e-15)
    monkeypatch.setattr("lsverify.repeat.judge", lambda config: other)
    code, out, _ = run("repeat", tmp_path / "receipt.json")
    assert code == 1
    assert "environment: threads was 99 and is " in out
    assert "llama exact: rungs.0.measure was 1.5e-15 and is 2e-15" in out
    assert out.splitlines()[-1] == "5 numbers differ"


def test_a_receipt_that_repeats_its_refusal_is_one(run, tmp_path, monkeypatch):
    evidence.save(receipt_of(made_up(status="failed")), tmp_path / "receipt.json")
    monkeypatch.setattr("lsverify.repeat.judge", lambda config: made_up(status="failed"))
    assert run("repeat", tmp_path / "receipt.json")[0] == 1


def test_what_is_no_receipt_cannot_be_repeated(run, tmp_path):
    (tmp_path / "receipt.json").write_text("{}")
    for path in (tmp_path / "receipt.json", tmp_path / "missing.json"):
        code, out, err = run("repeat", path)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "give a receipt.json" in err


def test_wandb_is_told_last_and_gets_the_receipt(run, tmp_path, not_judged, monkeypatch):
    logged = []
    monkeypatch.setattr(
        "lsverify.tracking.log", lambda receipt, **options: logged.append((receipt, options))
    )
    code, out, _ = run(
        *QUICK, "--policy", "exact", "--out", tmp_path, "--wandb", "offline", "--json"
    )
    assert code == 0
    receipt, options = logged[0]
    assert options == {"mode": "offline", "folder": tmp_path}
    assert json.loads(evidence.as_json(receipt)) == json.loads(out)


def test_the_command_in_a_fresh_process():
    environment = os.environ | {"PYTEST_ADDOPTS": "-k nothing", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lsverify.cli", *QUICK, "--policy", "exact", "--json"]
    command += ["--require", "execution"]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["command"] == command[3:]
    assert [line.split()[:3] for line in ran.stderr.splitlines()][:2] == [
        ["llama-exact", "objective", "proven"],
        ["llama-exact", "execution", "proven"],
    ]


def test_the_exit_code_reaches_the_shell():
    command = [sys.executable, "-m", "lsverify.cli", "gate", "--dtype", "float16"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1


def test_a_candidate_that_leaves_the_process_is_no_success(tmp_path):
    (tmp_path / "leaver.py").write_text(
        "import os\n\n\ndef step(model, problem, objective):\n    os._exit(0)\n"
    )
    command = [sys.executable, "-m", "lsverify.cli", "gate", "--quick", "--arch=llama"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [*command, "--candidate=leaver:step"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 1
    assert "SystemExit: os._exit(0)" in ran.stdout
