from __future__ import annotations

import json

import pytest
import wandb
from small_nights import ENDS, curve, made_up
from small_trainings import SMALL

from lsverify.cli import run
from lsverify.nightly_record import RECORD, Nightly
from lsverify.whole_files import read_record

SUITE = f"""
seeds = 4
[[entries]]
name = "small"
arch = "warm:llama"
arms = ["full", "exact", "detach", "other_seeds", "scrambled"]
options = {{ {", ".join(f"{key} = {json.dumps(value)}" for key, value in SMALL.items())} }}
"""


@pytest.fixture
def spend(tmp_path, monkeypatch):
    """`lsverify nightly` of a small suite without W&B; returns its exit code."""
    (tmp_path / "suite.toml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    made_up(monkeypatch)

    def command(*options):
        common = ("--suite", "suite.toml", "--engine", "ray", "--wandb", "disabled")
        return run(["nightly", *common, "--out", "out", *options])

    return command


def test_a_night_prints_verdicts_and_keeps_its_record(spend, tmp_path, capsys):
    assert spend() == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    (exact,) = [line for line in lines if "exact" in line and "equivalent" in line]
    (detach,) = [line for line in lines if "detach" in line and "different" in line]
    assert "+0.0000" in exact
    assert "-0.1" in detach
    assert "small: exact and full differ by at most 0 of a test reward" in told.out
    assert "80/80 steps, 20 of 20 trainings" in " ".join(told.err.split())
    record = read_record(Nightly, tmp_path / "out" / RECORD)
    assert record.command[:3] == ("nightly", "--suite", "suite.toml")
    assert not (tmp_path / "out" / "wandb").exists()


def test_a_void_night_is_1_and_says_why(spend, monkeypatch, capsys):
    made_up(monkeypatch, lambda training: curve(training, ENDS | {"full": 0.4}))
    assert spend() == 1
    assert "small: void: the reference is not better than its untrained start" in " ".join(
        capsys.readouterr().err.split()
    )


def test_seeds_are_counted_up_over_nights(spend, tmp_path):
    assert spend("--seeds", "2") == spend("--seeds", "3") == 0
    assert read_record(Nightly, tmp_path / "out" / RECORD).entries[0].fresh == (2, 3, 4)


def test_failing_wandb_costs_a_line_and_no_night(spend, tmp_path, monkeypatch, capsys):
    def init(**named):
        raise RuntimeError("no route to host")

    monkeypatch.setattr(wandb, "init", init)
    assert spend("--wandb", "offline", "--seeds", "2") == 0
    assert "wandb: small full seed 0 is not logged: no route to host" in capsys.readouterr().err
    assert spend("--wandb", "disabled", "--seeds", "2") == 0
    assert read_record(Nightly, tmp_path / "out" / RECORD).number == 2


REFUSED = [
    (("--quick",), "--quick and --suite suite.toml exclude each other"),
    (("--seeds", "1"), "seeds 1 is not allowed"),
    (("--processes", "0"), "processes 0 is not allowed"),
    (("--engine", "spark"), "engine 'spark' is not known: use local or ray"),
    (("--wandb", "on"), "wandb 'on' is not known"),
    (("--suite", "none.toml"), "suite 'none.toml' cannot be read"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_is_one_line_and_leaves_no_night(spend, tmp_path, capsys, options, message):
    assert spend(*options) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert line.startswith(f"lsverify: {message}")
    assert spend() == 0, "no unfinished night is in the way"


def test_help_says_what_makes_it_fail(capsys):
    assert run(["nightly", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Exit code 1: a comparison is void" in told
    assert "measured and fails nothing" in told
