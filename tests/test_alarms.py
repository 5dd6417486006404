from __future__ import annotations

import json
from itertools import islice

import pytest

from lsverify import alarms
from lsverify.cli import run
from lsverify.evidence import CaseConfig
from lsverify.honest_draws import CHANGES, FORMS, PER_PROBLEM, Honest, drawn_cases
from lsverify.ladder import judge
from lsverify.objective import PRESETS
from lsverify.whole_files import read_record


def test_honest_cases_take_every_architecture_before_the_next_seed():
    found = list(islice(alarms.honest_cases(("llama", "mamba"), ("float32",)), 9))
    assert [(c.arch, c.policy, c.seed) for c in found[:4]] == [
        ("llama", "exact", 0),
        ("llama", "detach", 0),
        ("mamba", "exact", 0),
        ("mamba", "detach", 0),
    ]
    assert found[4].seed == found[7].seed == 1
    assert found[8].seed == 2


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16-autocast"),
        ("llama", "bfloat16"),
        ("glm_moe_dsa", "float32"),
    ],
)
def test_honest_runs_pass_and_a_lost_state_does_not(arch, dtype):
    runs = list(alarms.counted(2, (arch,), (dtype,)))
    assert [(run.honest, run.reached) for run in runs] == [(True, True)] * 2 + [(False, False)] * 2
    assert [run.policy for run in runs[2:]] == [fault.__name__ for fault in alarms.FAULTY]
    for faulty in runs[2:]:
        assert faulty.statuses == ("proven", "proven", "proven", "failed")


@pytest.mark.parametrize("dtype", ["bfloat16-autocast", "bfloat16"])
def test_a_precision_too_coarse_for_a_model_accuses_no_honest_run_and_still_the_fault(dtype):
    *honest, layer, whole = alarms.counted(2, ("glm_moe_dsa",), (dtype,))
    assert all("failed" not in run.statuses for run in honest)
    assert not layer.wrong
    assert not whole.wrong


def test_a_fault_is_caught_by_a_failed_gradient_alone():
    fault = alarms.Alarm(
        arch="llama",
        dtype="bfloat16",
        policy="whole_state_lost",
        seed=0,
        honest=False,
        reached=False,
        statuses=("proven", "proven", "proven", "failed"),
    )
    assert not fault.wrong
    others = (
        ("error",),
        ("proven", "failed", "proven", "failed"),
        ("proven", "proven", "proven", "reference_inconsistent"),
        ("proven", "proven", "proven", "undecidable"),
    )
    for statuses in others:
        assert fault.model_copy(update={"statuses": statuses}).wrong


def test_a_precision_that_cannot_tell_is_neither_an_alarm_nor_a_catch():
    coarse = alarms.Alarm(
        arch="llama",
        dtype="bfloat16",
        policy="exact",
        seed=0,
        honest=True,
        reached=False,
        statuses=("proven", "proven", "undecidable", "reference_inconsistent"),
    )
    assert (coarse.wrong, coarse.too_coarse) == (False, True)
    assert coarse.model_copy(update={"statuses": ("proven", "failed")}).wrong
    assert coarse.model_copy(update={"honest": False}).wrong


def test_a_model_that_the_library_does_not_run_in_a_precision_is_refused_in_one_line():
    found = alarms.alarm(CaseConfig(arch="xlstm", dtype="bfloat16", policy="exact"))
    assert (found.refused, found.wrong) == (True, False)
    assert "xlstm does not run in bfloat16" in found.detail


def test_a_run_that_breaks_is_counted_and_said():
    broken = alarms.alarm(CaseConfig(arch="llama", policy="kinds:latent", require="gradient"))
    assert broken.wrong
    assert "no kind 'latent'" in broken.detail


def test_the_tally_counts_both_mistakes():
    right = alarms.Alarm(
        arch="llama",
        dtype="float32",
        policy="exact",
        seed=0,
        honest=True,
        reached=True,
        statuses=("proven", "undecidable"),
    )
    alarm, miss = (
        right.model_copy(update={"reached": False}),
        right.model_copy(update={"honest": False}),
    )
    tally = alarms.tally([right, alarm, miss])
    assert tally.wrong(honest=True) == [alarm]
    assert tally.wrong(honest=False) == [miss]
    cells = [list(column.cells) for column in tally.table().columns]
    honest_and_faulty = [
        ["float32"] * 2,
        ["2", "1"],
        ["honest", "exact"],
        ["1", "1"],
        ["2", "1"],
        ["0", "0"],
        ["0", "0"],
    ]
    assert cells == honest_and_faulty


def test_the_command_writes_all_runs_and_tells_by_its_code(tmp_path, capsys):
    file = tmp_path / "alarms.json"
    given = ["alarms", "--arch", "llama", "--runs", "1", "--dtype", "float32", "--out", str(file)]
    assert run(given) == 0
    assert [one["honest"] for one in json.loads(file.read_text())["runs"]] == [True, False, False]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--runs", "0"], "runs 0 and workers 1 are not allowed"),
        (["--dtype", "half"], "dtype 'half' is not known"),
        (["--arch", "lama"], "architecture 'lama' is not known"),
    ],
)
def test_bad_input_is_one_line_and_two(given, told, capsys):
    assert run(["alarms", *given]) == 2
    assert told in capsys.readouterr().err


def test_drawn_cases_are_honest_and_the_record_goes_on(tmp_path, capsys):
    file = tmp_path / "honest.json"
    given = ["alarms", "--drawn", "--arch", "llama", "--out", str(file)]
    assert run([*given, "--runs", "6"]) == 0
    assert run([*given, "--runs", "7"]) == 0
    record = read_record(Honest, file)
    assert (record.cases, record.problems, record.wrong) == (12, {"llama": 2}, [])
    assert "0 false alarms in 12 honest cases" in capsys.readouterr().out
    assert run([*given, "--dtype", "float32"]) == 2
    assert run([*given, "--dtype", "float32", "--dtype", "bfloat16"]) == 2


def test_a_drawn_case_that_is_refused_is_an_alarm(tmp_path, monkeypatch, capsys):
    def blind(case, *, brief):
        receipt = judge(case.model_copy(update={"require": "objective"}), brief=brief)
        return receipt.model_copy(update={"config": case})

    monkeypatch.setattr("lsverify.honest_draws.judge", blind)
    file = tmp_path / "honest.json"
    given = ["alarms", "--drawn", "--arch", "llama", "--runs", "6", "--out", str(file)]
    assert run(given) == 1
    assert len(read_record(Honest, file).wrong) == PER_PROBLEM
    assert "execution not_run" in capsys.readouterr().err


def test_drawn_cases_are_of_every_form_and_follow_from_their_number():
    drawn = [case for number in range(40) for case in drawn_cases("llama", "float64", number)]
    assert drawn[:PER_PROBLEM] == list(drawn_cases("llama", "float64", 0))
    assert {case.policy for case in drawn} == {None} | {spec for form in FORMS for spec in form}
    assert {str(case.candidate).rpartition(":")[2] for case in drawn if case.candidate} == set(
        CHANGES
    )
    assert {case.objective.partition(",")[0] for case in drawn} == set(PRESETS)
