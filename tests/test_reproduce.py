"""A property that fails leaves a folder, and the folder fails again by itself."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lsverify.errors import InputError
from lsverify.objective import preset
from lsverify.paths import longstraw
from lsverify.problem_files import load as load_problem
from lsverify.problems import ProblemSpec
from lsverify.reproduce import folder_of, load_step, write
from lsverify.steps import Step, StepFailed, hold

pytest_plugins = ["pytester"]
SMALL = Step(
    spec=ProblemSpec(prompt_lengths=(5,), group_sizes=(2,), response_lengths=(2, 1), seed=3),
    objective=preset("dapo", beta=0.04),
    chunk=4,
)


def claims_too_much(model, problem, objective):
    """A path that drops the state term and claims the whole gradient."""
    return replace(longstraw(model, problem, objective, policy="detach"), reference="exact")


def failure():
    with pytest.raises(StepFailed) as caught:
        hold("llama", SMALL, claims_too_much)
    return caught.value


def test_a_folder_has_problem_configuration_receipt_and_a_script_that_fails_again(tmp_path):
    failed = failure()
    script = write(failed, "tests.test_reproduce:claims_too_much", tmp_path / "failure")
    assert len(script.read_text().splitlines()) <= 12
    assert load_problem(script.parent).content_hash() == (
        SMALL.referee("llama").setting.problem.content_hash()
    )
    receipt = json.loads((script.parent / "receipt.json").read_text())
    assert receipt["status"] == "failed"
    assert receipt["rel_l2"] > 0.01
    assert receipt["rolled_rel_l2"] > receipt["rel_l2"]
    assert {row["status"] for row in receipt["parameters"]} >= {"mismatch"}
    arch, step, path = load_step(script.parent)
    assert (arch, step, path.__name__) == ("llama", SMALL, "claims_too_much")
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert again.returncode == 1
    assert again.stderr.strip() == str(failed)


def test_without_a_candidate_it_runs_the_steps_own_policy_and_passes_once_mended(tmp_path, capsys):
    script = write(failure(), None, tmp_path)
    exec(compile(script.read_text(), str(script), "exec"), {"__file__": str(script)})
    assert capsys.readouterr().out == "proven\n"


def test_a_failing_property_names_the_command_and_leaves_the_smallest_step(pytester, monkeypatch):
    monkeypatch.setenv("LSVERIFY_PROFILE", "ci")
    pytester.makepyfile(
        test_wrong="""
        from hypothesis import given
        from lsverify.strategies import register_profiles, steps
        from lsverify.steps import hold
        from tests.test_reproduce import claims_too_much
        register_profiles()
        @given(drawn=steps(longest=3))
        def test_it(drawn):
            hold("llama", drawn, claims_too_much)
        """
    )
    result = pytester.runpytest("--lsv-candidate", "tests.test_reproduce:claims_too_much")
    result.stdout.fnmatch_lines(
        ["*run it again: python lsverify-out?failures?test_wrong.py-test_it?run.py"]
    )
    _, step, path = load_step(pytester.path / "lsverify-out/failures/test_wrong.py-test_it")
    assert path.__name__ == "claims_too_much"
    assert step.spec.prompt_lengths == (2,)


def test_folders_are_named_by_their_test():
    name = folder_of("suites/test_parity.py::test_it[llama-window:3]").name
    assert name == "suites-test_parity.py-test_it-llama-window-3"


@pytest.mark.parametrize("text", [None, "{}", "[", '{"arch": "lama"}'])
def test_a_folder_that_is_none_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "step.json").write_text(text)
    with pytest.raises(InputError, match=r"step\.json' cannot be read") as told:
        load_step(tmp_path)
    assert "\n" not in str(told.value)
