"""The detection matrix tells a caught fault from a missed one, and one that did nothing from both."""

from __future__ import annotations

import json

import pytest

from lsverify import detection
from lsverify.cli import run
from lsverify.detection import Trial, cases, effect, matrix, tried
from lsverify.evidence import CaseConfig
from lsverify.faults import FAULTS

SMALL = {"prompt_length": 9, "group_size": 2, "response_lengths": (3, 1)}


def trial(**fields):
    given = {
        "fault": "signs_only",
        "arch": "llama",
        "dtype": "float64",
        "seed": 0,
        **SMALL,
        "expected": "gradient",
        "refused_by": "gradient",
        "outcome": "caught",
        "pointed": True,
    }
    return Trial(**(given | fields))


def test_cases_are_drawn_by_their_number_and_shared_by_faults():
    chosen = [FAULTS["signs_only"], FAULTS["clipped_in_silence"], FAULTS["adapters_not_reduced"]]
    found = list(cases(chosen, 4, seed=3))
    assert found == list(cases(chosen, 4, seed=3))
    by_name = {
        name: [case for its, case in found if its == name] for name in {name for name, _ in found}
    }
    assert [len(by_name[fault.name]) for fault in chosen] == [4, 4, 4]
    same = {"candidate": None, "require": "gradient"}
    left, right = (
        [case.model_copy(update=same) for case in by_name[name]]
        for name in ("signs_only", "clipped_in_silence")
    )
    assert left == right
    assert {"dense", "sharing"} <= by_name.keys()


def test_a_fault_is_caught_and_an_honest_path_passes():
    name = "clipped_in_silence"
    assert tried(name, FAULTS[name].config("llama", **SMALL)).outcome == "caught"
    honest = CaseConfig(
        arch="llama", candidate="lsverify.faults.honest:dense", require="gradient", **SMALL
    )
    assert tried("dense", honest).outcome == "passed"


def test_a_fault_that_does_nothing_is_not_eligible_and_a_blind_ladder_misses(monkeypatch):
    fault = FAULTS["clipped_high_only"]
    one = fault.config("llama", prompt_length=9, group_size=1, response_lengths=(1,))
    assert tried(fault.name, one).outcome == "ineligible"
    other = FAULTS["negative_advantages_dropped"]
    case = other.config("llama", **SMALL)
    assert effect(other, case) > 1e-3
    blind = detection.judge(
        CaseConfig(arch="llama", candidate="lsverify.faults.honest:dense", **SMALL)
    )
    monkeypatch.setattr(detection, "judge", lambda _: blind)
    assert tried(other.name, case).outcome == "miss"


def test_the_matrix_counts_misses_wrong_rungs_and_alarms():
    trials = [
        trial(),
        trial(outcome="elsewhere", refused_by="forward", pointed=False),
        trial(outcome="miss", refused_by=None, pointed=False),
        trial(outcome="ineligible", refused_by=None, pointed=False),
        trial(fault="dense", expected="", refused_by="forward", outcome="alarm", pointed=False),
        trial(fault="dense", expected="", refused_by=None, outcome="passed", pointed=False),
    ]
    made = matrix(trials, seed=0)
    assert made.summary() == (
        "1 faults on 3 eligible problems: 33.33% caught by the rung that must, 33.33% pointed at the right place; "
        "1 false alarms in 2 honest runs"
    )
    cells = [next(iter(column.cells)) for column in made.table().columns]
    assert cells == ["signs_only", "gradient", "4", "3", "", "1", "1", "", "33.33%", "33.33%"]


def test_the_command_writes_all_trials_and_tells_by_its_code(tmp_path, capsys):
    file = tmp_path / "faults.json"
    given = ["faults", "--fault", "signs_only", "--out", str(file)]
    assert run(given) == 0
    assert {t["outcome"] for t in json.loads(file.read_text())["trials"]} == {"caught", "passed"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--fault", "none"], "fault 'none' is not known"),
        (["--problems", "0"], "problems 0"),
        (["--share", "0"], "share 0.0 is not allowed"),
        (["--dtype", "bfloat16"], "dtype 'bfloat16' is not allowed"),
    ],
)
def test_bad_input_is_one_line_and_two(given, told, capsys):
    assert run(["faults", *given]) == 2
    assert told in capsys.readouterr().err
