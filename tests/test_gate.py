from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree

import pytest
from judged import judged, rung

from lsverify import gate, ladder
from lsverify.cases import QUICK, SMOLLM2, Options, group_sizes, load_candidate
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig

LLAMA = Options(archs=("llama",), policies=("exact",), quick=True)


def options(**fields):
    return Options(**{"archs": ("llama",), "policies": ("exact",), "quick": True, **fields})


def test_defaults_are_four_architectures_and_two_policies():
    cases = Options().cases()
    assert [(case.arch, case.policy) for case in cases] == [
        (arch, policy)
        for arch in ("llama", "mistral", "qwen3_5", "glm_moe_dsa")
        for policy in ("exact", "detach")
    ]
    assert {(case.dtype, case.reference, case.require) for case in cases} == {
        ("float64", "declared", "optimizer_delta")
    }


def test_a_candidate_is_judged_once_for_each_architecture_unless_policies_are_named():
    assert [c.policy for c in Options(archs=("llama",), candidate="m:n").cases()] == [None]
    named = Options(archs=("llama",), candidate="m:n", policies=("exact", "detach")).cases()
    assert [case.policy for case in named] == ["exact", "detach"]


def test_quick_is_a_starting_point_for_what_is_named():
    case = options(response_length="2", group_size=3).cases()[0]
    assert (case.prompt_length, case.group_size, case.response_lengths) == (12, 3, (2,))
    assert group_sizes(case) == (3, 2)


def test_real_text_is_asked_for_less_by_default():
    case = Options(archs=(SMOLLM2,)).cases()[0]
    assert (case.require, case.chunk, len(case.response_lengths)) == ("gradient", 512, 4)
    assert group_sizes(case) == (4,)
    assert (
        Options(archs=(SMOLLM2,), require="optimizer_delta").cases()[0].require == "optimizer_delta"
    )


def test_a_folder_is_an_architecture(tmp_path):
    assert Options(archs=(str(tmp_path),)).cases()[0].arch == str(tmp_path)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"archs": ("llama", "lama")}, "architecture 'lama' is not known: use one of bamba"),
        ({"policies": ("exact", "windows:3")}, "policy 'windows:3' is not known"),
        ({"prompt_length": -3}, "prompt length -3 is not allowed: Input should be greater"),
        ({"group_size": 0}, "group size 0 is not allowed"),
        ({"chunk": 0}, "chunk 0 is not allowed"),
        ({"branches": 0}, "branches 0 is not allowed"),
        ({"seed": -1}, "seed -1 is not allowed"),
        ({"seed": 2**53}, "seed 9007199254740992 is not allowed"),
        ({"response_length": "3,x"}, "response length '3,x' is not allowed: use one length or"),
        ({"response_length": ""}, "response length '' is not allowed"),
        ({"response_length": "3,,1"}, "response length '3,,1' is not allowed"),
        ({"response_length": "0"}, "response length '0' is not allowed"),
        ({"dtype": "float16"}, "dtype 'float16' is not known: use one of float64, float32"),
        ({"objective": "ppo"}, "objective 'ppo' is not known; choose from grpo, dr_grpo"),
        ({"require": "learning"}, "require 'learning' is not known: use one of objective, exec"),
        ({"reference": "half"}, "reference 'half' is not known: use one of declared, full"),
    ],
)
def test_bad_options_are_refused_before_anything_is_built(fields, told, monkeypatch):
    monkeypatch.setattr(ladder, "make_setting", pytest.fail)
    monkeypatch.setattr(pytest, "main", pytest.fail)
    with pytest.raises(InputError, match=told) as caught:
        gate.run_gate(options(**fields))
    assert "\n" not in str(caught.value)


def test_more_response_lengths_than_responses_are_refused():
    told = r"'1,2,3,4' names 4 lengths for 3 responses \(groups of 2 and 1\): name fewer"
    with pytest.raises(InputError, match=told):
        options(response_length="1,2,3,4", group_size=2).cases()
    assert options(response_length="1,2,3", group_size=2).cases()[0].response_lengths == (1, 2, 3)
    # Defaults are cycled and cut: nobody named them.
    assert options(group_size=1, quick=False).cases()[0].group_size == 1
    with pytest.raises(InputError, match=r"for 2 responses \(groups of 2\)"):
        options(archs=(SMOLLM2,), response_length="4,4,4", group_size=2).cases()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into an empty current directory; gives its name back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(os.sys.path))
    written = []

    def write(text):
        name = f"candidate_{os.getpid()}_{id(written)}_{len(written)}"
        written.append(name)
        (tmp_path / f"{name}.py").write_text(text)
        return name

    yield write
    for name in written:
        os.sys.modules.pop(name, None)


def test_a_candidate_comes_from_the_current_directory(module):
    name = module("def step(model, problem, objective): return 7")
    assert load_candidate(f"{name}:step")(None, None, None) == 7


@pytest.mark.parametrize(
    ("text", "attribute", "told"),
    [
        ("", "step", "has no 'step'"),
        ("step = 3", "step", "is not callable: give (model, problem, objective) -> result"),
        ("1 / 0", "step", "importing it raised ZeroDivisionError: division by zero"),
        ("def step(:", "step", "importing it raised SyntaxError"),
        ("import sys; sys.exit(0)", "step", "importing it raised SystemExit: 0"),
        ("import no_such_thing", "step", "no module 'no_such_thing'"),
        ("import os; os.no_such_name", "step", "importing it raised AttributeError"),
    ],
)
def test_a_candidate_that_cannot_be_used_is_refused(module, text, attribute, told):
    name = module(text)
    with pytest.raises(InputError) as caught:
        load_candidate(f"{name}:{attribute}")
    assert told in str(caught.value)
    assert f"candidate '{name}:{attribute}'" in str(caught.value)


@pytest.mark.parametrize("spec", ["", ":", "module", "module:", ":name"])
def test_a_malformed_candidate_is_refused(spec):
    with pytest.raises(InputError, match=r"not of the form MODULE:NAME, for instance my_path:step"):
        load_candidate(spec)


def test_an_interrupt_while_a_candidate_is_imported_is_one(module):
    with pytest.raises(KeyboardInterrupt):
        load_candidate(f"{module('raise KeyboardInterrupt')}:step")


def test_a_candidate_is_imported_before_anything_runs(monkeypatch):
    monkeypatch.setattr(pytest, "main", pytest.fail)
    with pytest.raises(InputError, match="no module 'nowhere'"):
        gate.run_gate(options(candidate="nowhere:step"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One gate over an honest and a dishonest case: receipts, progress, JUnit."""
    told = []
    junit = tmp_path_factory.mktemp("junit") / "gate.xml"
    receipts = gate.run_gate(
        options(policies=("detach", "exact"), reference="full"),
        junit=junit,
        progress=lambda case, rung: told.append((case, rung.name, rung.status)),
    )
    return receipts, told, junit


def test_receipts_come_in_the_order_of_the_cases(run):
    receipts, _, _ = run
    assert [receipt.policy for receipt in receipts] == ["detach", "exact"]
    assert [receipt.reached for receipt in receipts] == [False, True]


def test_the_gate_says_what_judging_by_hand_says(run):
    receipts, _, _ = run
    by_hand = judged(policy="detach", reference="full")
    assert receipts[0].gradient == by_hand.gradient
    assert [r.status for r in receipts[0].rungs] == [r.status for r in by_hand.rungs]


def test_progress_names_every_rung_of_every_case(run):
    receipts, told, _ = run
    assert set(told) == {
        (f"llama-{receipt.policy}", rung.name, rung.status)
        for receipt in receipts
        for rung in receipt.rungs
    }
    assert len(told) == 2 * len(RUNGS)


def test_junit_has_a_test_for_each_rung_and_the_failures(run):
    _, _, junit = run
    assert [path.name for path in junit.parent.iterdir()] == ["gate.xml"]
    suite = ElementTree.parse(junit).getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("10", "2", "0")
    failed = {
        case.get("name"): case.find("failure").get("message")
        for case in suite.iter("testcase")
        if case.find("failure") is not None
    }
    assert sorted(failed) == [
        "test_gradient_equals_the_claimed_reference[llama-detach]",
        "test_parameters_move_as_the_reference_would[llama-detach]",
    ]
    assert all("relative L2" in message for message in failed.values())
    assert {case.get("classname") for case in suite.iter("testcase")} == {
        f"suites.test_{name}" for name in RUNGS
    }


def test_cases_named_twice_are_judged_once(monkeypatch):
    seen = []

    def judge(config):
        seen.append(config)
        return judged(policy="exact")

    monkeypatch.setattr(ladder, "judge", judge)
    assert len(gate.run_gate(options(policies=("exact", "exact")))) == 1
    assert len(seen) == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"PYTEST_ADDOPTS": "-k nothing"},
        {"PYTEST_ADDOPTS": "--collect-only"},
        {"PYTEST_ADDOPTS": "--no-such-option"},
        {"PYTEST_PLUGINS": "no_such_plugin"},
    ],
)
def test_the_users_pytest_settings_drop_no_case(setting, monkeypatch):
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ladder, "judge", lambda config: judged(policy="exact"))
    assert len(gate.run_gate(LLAMA)) == 1
    assert {name: os.environ[name] for name in setting} == setting
    assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ


def test_a_fault_of_ours_is_raised_and_leaves_no_junit(tmp_path, monkeypatch):
    def broken(config):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ladder, "judge", broken)
    with pytest.raises(ZeroDivisionError, match="planted"):
        gate.run_gate(LLAMA, junit=tmp_path / "gate.xml")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit()])
def test_a_case_that_gets_no_receipt_is_a_fault(error, monkeypatch):
    def broken(config):
        raise error

    monkeypatch.setattr(ladder, "judge", broken)
    with pytest.raises(RuntimeError, match="no receipt for llama-exact"):
        gate.run_gate(LLAMA)


def test_an_interrupt_is_passed_on_and_leaves_no_junit(tmp_path, monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "judge", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gate.run_gate(LLAMA, junit=tmp_path / "gate.xml")
    assert list(tmp_path.iterdir()) == []


def test_pytest_ending_in_another_way_is_a_fault(monkeypatch):
    monkeypatch.setattr(pytest, "main", lambda *a, **k: pytest.ExitCode.NO_TESTS_COLLECTED)
    with pytest.raises(RuntimeError, match="pytest ended with"):
        gate.run_gate(LLAMA)


def test_junit_needs_a_folder_and_a_name(tmp_path):
    for file in (tmp_path, tmp_path / "missing" / "gate.xml"):
        with pytest.raises(InputError, match="is not a file in a folder that exists"):
            gate.run_gate(LLAMA, junit=file)
    assert list(tmp_path.iterdir()) == []


def test_suites_are_found_beside_the_package_and_missed_when_they_are_not(tmp_path, monkeypatch):
    assert (gate.suites_folder() / "test_gradient.py").is_file()
    monkeypatch.setattr(gate, "__file__", str(tmp_path / "lsverify" / "gate.py"))
    with pytest.raises(InputError, match="install lsverify from a wheel or a whole checkout"):
        gate.suites_folder()
    inside = tmp_path / "lsverify" / "suites"
    inside.mkdir(parents=True)
    (inside / "test_gradient.py").write_text("")
    assert gate.suites_folder() == inside


def test_what_a_candidate_raises_ends_in_a_verdict():
    for name in ("exits", "skips"):
        receipts = gate.run_gate(options(policies=(), candidate=f"candidates:{name}"))
        assert [receipt.reached for receipt in receipts] == [False]
        assert rung(receipts[0], "execution").status == "error"


def test_a_bad_answer_of_a_candidate_is_bad_input():
    with pytest.raises(InputError, match="objective has beta"):
        gate.run_gate(options(policies=(), candidate="candidates:wants_a_reference"))


def test_the_quick_problem_is_the_one_named():
    config = CaseConfig(arch="llama", policy="exact", **QUICK)
    assert LLAMA.cases() == [config]
