"""The detection matrix tells a caught fault from a missed one, and one that did nothing from both."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_subtle_candidates import CALLS

from lsverify import detection
from lsverify.cli import run
from lsverify.detection import Trial, cases, effect, tried
from lsverify.detection_record import Record, markdown
from lsverify.detection_runs import PATIENCE, continued, rerun
from lsverify.evidence import CaseConfig
from lsverify.faults import FAULTS
from lsverify.whole_files import read_record

SMALL = {"prompt_length": 9, "group_size": 2, "response_lengths": (3, 1)}


def trial(**fields):
    given = {
        "fault": "signs_only",
        "arch": "llama",
        "dtype": "float64",
        "number": 0,
        **SMALL,
        "expected": "gradient",
        "refused_by": "gradient",
        "outcome": "caught",
        "pointed": True,
    }
    return Trial(**(given | fields))


def test_cases_are_drawn_by_their_number_and_shared_by_faults():
    chosen = [FAULTS["signs_only"], FAULTS["clipped_in_silence"], FAULTS["adapters_not_reduced"]]
    found = list(cases(chosen, range(3, 7)))
    assert found == [case for number in range(3, 7) for case in cases(chosen, [number])]
    by_name = {
        name: [case for its, _, case in found if its == name]
        for name in {name for name, _, _ in found}
    }
    assert [len(by_name[fault.name]) for fault in chosen] == [4, 4, 4]
    same = {"candidate": None, "require": "gradient"}
    left, right = (
        [case.model_copy(update=same) for case in by_name[name]]
        for name in ("signs_only", "clipped_in_silence")
    )
    assert left == right
    assert {"full_padded_left", "longstraw_exact"} <= by_name.keys()


def test_a_fault_is_caught_and_an_honest_path_passes():
    name = "clipped_in_silence"
    assert tried(name, 0, FAULTS[name].config("llama", **SMALL)).outcome == "caught"
    honest = CaseConfig(
        arch="llama", candidate="lsverify.faults.honest:dense", require="gradient", **SMALL
    )
    assert tried("dense", 0, honest).outcome == "passed"


def test_a_fault_that_does_nothing_is_not_eligible_and_a_blind_ladder_misses(monkeypatch):
    fault = FAULTS["clipped_high_only"]
    one = fault.config("llama", prompt_length=9, group_size=1, response_lengths=(1,))
    assert tried(fault.name, 0, one).outcome == "ineligible"
    other = FAULTS["negative_advantages_dropped"]
    case = other.config("llama", **SMALL)
    assert effect(other, case) > 1e-3
    blind = detection.judge(
        CaseConfig(arch="llama", candidate="lsverify.faults.honest:dense", **SMALL)
    )
    monkeypatch.setattr(detection, "judge", lambda _, brief: blind)
    assert tried(other.name, 0, case).outcome == "miss"


@pytest.mark.parametrize(
    "name", ["signs_only", "negative_advantages_dropped", "shared_path_never_entered"]
)
def test_a_brief_verdict_is_the_ladders_up_to_the_rung_that_refuses(name):
    case = FAULTS[name].config("llama", **SMALL)
    whole, brief = detection.judge(case), detection.judge(case, brief=True)
    refused = next(i for i, rung in enumerate(whole.rungs) if not rung.holds)
    assert brief.rungs[: refused + 1] == whole.rungs[: refused + 1]
    assert {rung.status for rung in brief.rungs[refused + 1 :]} <= {"not_run"}
    assert brief.accounting == {}


def test_a_brief_verdict_runs_a_second_time_what_holds_the_first():
    CALLS.clear()
    candidate = "test_subtle_candidates:leaves_eval_mode_the_second_time"
    case = CaseConfig(arch="llama", candidate=candidate, training=True, **SMALL)
    rungs = {rung.name: rung for rung in detection.judge(case, brief=True).rungs}
    assert rungs["execution"].detail.startswith("in run 2: training was True and is False")
    assert rungs["optimizer_delta"].status == "not_run"


def test_a_brief_verdict_tells_noise_from_a_wrong_gradient():
    case = FAULTS["noise_in_the_gradient"].config("llama", **SMALL)
    assert detection.judge(case, brief=True).rungs[3].status == "nondeterministic"


def test_the_record_counts_misses_wrong_rungs_and_alarms():
    record = Record(dtype="float64")
    record.add(
        [
            trial(),
            trial(number=1, outcome="elsewhere", refused_by="forward", pointed=False),
            trial(number=2, outcome="miss", refused_by=None, pointed=False),
            trial(number=3, outcome="ineligible", refused_by=None, pointed=False),
            trial(number=4, pointed=False),
            trial(fault="dense", expected="", refused_by="forward", outcome="alarm", pointed=False),
            trial(fault="dense", expected="", refused_by=None, outcome="passed", pointed=False),
        ]
    )
    assert record.faults["signs_only"].letters == "cemin"
    assert [shown.outcome for shown in record.shown] == ["elsewhere", "miss", "caught", "alarm"]
    assert (len(record.misses), len(record.alarms), record.honest) == (2, 1, 2)
    assert record.summary() == (
        "1 faults on 4 eligible problems: 50% caught by the rung that must (the least 50%), 25% pointed at the right "
        "place; 1 false alarms in 2 honest runs"
    )
    cells = [next(iter(column.cells)) for column in record.table().columns]
    assert cells == ["signs_only", "gradient", "5", "4", "", "1", "2", "", "50%", "25%"]
    with pytest.raises(ValueError, match="problem 7 after 5"):
        record.add([trial(number=7)])


def test_runs_go_on_where_a_record_ends_and_give_up_on_a_fault_that_does_nothing(monkeypatch):
    fault = FAULTS["signs_only"]

    def told(name, number, case):
        outcome = "caught" if number % 3 == 0 else "ineligible"
        return trial(fault=name, number=number, outcome=outcome)

    monkeypatch.setattr("lsverify.detection_runs.tried", told)
    monkeypatch.setattr("lsverify.detection_runs.cases", _without_honest(cases))
    whole, parts = Record(dtype="float64"), Record(dtype="float64")
    *_, whole = continued(whole, [fault], 7, 1, lambda _: None)
    for problems in (2, 7):
        *_, parts = continued(parts, [fault], problems, 1, lambda _: None)
    assert whole.faults[fault.name].eligible >= 7
    letters = whole.faults[fault.name].letters, parts.faults[fault.name].letters
    assert letters[0].startswith("ciicii")
    assert letters[1].startswith("ciicii")
    monkeypatch.setattr(
        "lsverify.detection_runs.tried",
        lambda name, number, case: told(name, 1, case).model_copy(update={"number": number}),
    )
    *_, idle = continued(Record(dtype="float64"), [fault], 3, 1, lambda _: None)
    assert idle.faults[fault.name].letters == "i" * 3 * PATIENCE


def _without_honest(drawn):
    def without(faults, numbers, *, dtype="float64"):
        return (case for case in drawn(faults, numbers, dtype=dtype) if case[0] in FAULTS)

    return without


def test_a_share_of_a_record_run_again_agrees_with_it_and_a_changed_letter_does_not(
    tmp_path, capsys
):
    file = tmp_path / "record.json"
    given = ["faults", "--fault", "signs_only", "--problems", "2", "--out", str(file)]
    assert run(given) == 0
    again = ["faults", "--again", str(file), "--share", "0.5"]
    assert run(again) == 0
    assert "2 trials run again, 0 differ from the record" in capsys.readouterr().out
    record = read_record(Record, file)
    record.faults["signs_only"].letters = "mm"
    count, differing = rerun(record, None, 0.5, 0, 1, lambda _: None)
    assert (count, [trial.fault for trial in differing]) == (2, ["signs_only"])
    file.write_text(record.model_dump_json())
    assert run(again) == 1
    record.faults["gone"] = record.faults["signs_only"]
    file.write_text(record.model_dump_json())
    assert run(again) == 2
    assert "'gone', which is no fault any more" in capsys.readouterr().err


def test_the_command_writes_a_record_and_goes_on_with_it(tmp_path, capsys):
    file = tmp_path / "faults.json"
    given = ["faults", "--fault", "signs_only", "--out", str(file)]
    assert run(given) == 0
    assert read_record(Record, file).faults["signs_only"].letters == "c"
    assert run([*given, "--dtype", "float32"]) == 2
    assert "is of float64, not float32" in capsys.readouterr().err
    file.write_text("{}")
    assert run(given) == 2
    assert "cannot be read" in capsys.readouterr().err


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


def test_the_matrix_that_is_read_is_that_of_the_records():
    folder = Path(__file__).parent.parent
    records = [read_record(Record, file) for file in sorted(folder.glob("fixtures/faults/*.json"))]
    assert records
    assert (folder / "docs/detection.md").read_text() == markdown(records)
    for record in records:
        assert record.faults.keys() == FAULTS.keys()
        assert not record.misses
        assert not record.alarms
        assert min(row.caught / row.eligible for row in record.faults.values()) >= 0.99
