from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from judged import judged

from lsverify import ladder
from lsverify.cases import Options
from lsverify.errors import InputError
from lsverify.pytest_plugin import as_arguments

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent
SUITE = "def test_rung(evidence):\n    evidence.require('gradient')\n"


@pytest.fixture
def project(pytester, monkeypatch):
    """A user's project with our plugin loaded, and nothing judged in earnest; runs pytest there."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(
        ladder, "judge", lambda config: judged(policy="detach", reference=config.reference)
    )
    pytester.makeini("[pytest]\n")

    def run(*arguments):
        return pytester.runpytest_inprocess(
            "-p", "lsverify.pytest_plugin", "-p", "no:cacheprovider", *arguments
        )

    return run


def test_a_suite_runs_on_every_case_that_the_options_name(project, pytester):
    pytester.makepyfile(SUITE)
    ran = project("-v", "--lsv-arch=llama", "--lsv-arch=mistral", "--lsv-policy=detach")
    ran.assert_outcomes(passed=2)
    ran.stdout.fnmatch_lines(["*test_rung[[]llama-detach[]]*", "*test_rung[[]mistral-detach[]]*"])


def test_a_rung_that_does_not_hold_fails_with_its_detail_and_no_traceback(project, pytester):
    pytester.makepyfile(SUITE)
    ran = project("--lsv-arch=llama", "--lsv-policy=detach", "--lsv-reference=full")
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["gradient: failed. gradient comparison: failed"])
    assert "Traceback" not in ran.stdout.str()
    assert "pytest_plugin.py" not in ran.stdout.str()


def test_a_case_is_judged_once_for_all_tests(project, pytester, monkeypatch):
    calls = []

    def judge(config):
        calls.append(config)
        return judged(policy="exact")

    monkeypatch.setattr(ladder, "judge", judge)
    pytester.makepyfile(
        SUITE + SUITE.replace("test_rung", "test_again").replace("gradient", "forward")
    )
    project("--lsv-arch=llama", "--lsv-policy=exact").assert_outcomes(passed=2)
    assert len(calls) == 1


def test_a_rung_above_what_is_required_is_let_be(project, pytester, monkeypatch):
    monkeypatch.setattr(ladder, "judge", lambda c: judged(policy="exact", require="execution"))
    pytester.makepyfile(SUITE)
    arguments = ["--lsv-arch=llama", "--lsv-policy=exact"]
    project(*arguments, "--lsv-require=execution").assert_outcomes(passed=1)
    project(*arguments).assert_outcomes(failed=1)


def test_a_rung_that_is_missing_fails(project, pytester, monkeypatch):
    case = judged(policy="exact")
    monkeypatch.setattr(
        ladder, "judge", lambda c: case.model_copy(update={"rungs": case.rungs[:2]})
    )
    pytester.makepyfile(SUITE)
    ran = project("--lsv-arch=llama", "--lsv-policy=exact")
    ran.assert_outcomes(failed=1)
    ran.stdout.fnmatch_lines(["gradient: missing. *"])


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--lsv-arch=lama", "architecture 'lama' is not known"),
        ("--lsv-policy=windows:3", "policy 'windows:3' is not known"),
        ("--lsv-objective=ppo", "objective 'ppo' is not known"),
        ("--lsv-group-size=0", "group size 0 is not allowed"),
    ],
)
def test_bad_options_end_the_run_in_one_line(project, pytester, option, told):
    pytester.makepyfile(SUITE)
    ran = project(option)
    assert ran.ret == 2
    lines = [line for line in ran.stdout.lines + ran.stderr.lines if told in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"lsverify: {told}")
    assert "lsverify/pytest_plugin.py" not in ran.stdout.str()


@pytest.mark.parametrize(("error", "code"), [(InputError("mend it"), 2), (ZeroDivisionError(), 3)])
def test_bad_input_and_faults_of_ours_end_the_run(project, pytester, monkeypatch, error, code):
    def judge(config):
        raise error

    monkeypatch.setattr(ladder, "judge", judge)
    pytester.makepyfile(SUITE * 2)
    ran = project("--lsv-arch=llama")
    assert ran.ret == code
    assert f"lsverify: {type(error).__name__}" in ran.stdout.str()


def test_a_projects_own_evidence_stays_its_own(project, pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def evidence():
            return 42

        def test_fixture(evidence):
            assert evidence == 42
        """
    )
    project().assert_outcomes(passed=1)


def test_a_projects_own_parameters_stay_its_own(project, pytester):
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("evidence", [1, 2])
        def test_one(evidence):
            assert evidence in (1, 2)

        @pytest.mark.parametrize(("evidence", "more"), [(1, 1)])
        def test_two(evidence, more):
            assert evidence == more
        """
    )
    project().assert_outcomes(passed=3)


def test_tests_without_evidence_are_left_alone(project, pytester):
    pytester.makepyfile("def test_one(tmp_path): pass")
    project("--lsv-arch=no-such-thing").assert_outcomes(passed=1)


def test_rungs_of_a_case_stay_on_one_worker(project, pytester):
    pytester.makepyfile(
        SUITE
        + """
import pytest

@pytest.mark.parametrize("evidence", [1])
def test_own(evidence):
    pass

def test_groups(request):
    groups = {
        item.name: [mark.args for mark in item.iter_markers("xdist_group")]
        for item in request.session.items
    }
    assert groups == {
        "test_rung[llama-exact]": [("llama-exact",)], "test_own[1]": [], "test_groups": [],
    }
"""
    )
    ran = project("-p", "xdist", "--lsv-arch=llama", "--lsv-policy=exact")
    ran.assert_outcomes(passed=3)


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(archs=("llama", "/tmp/a folder"), policies=("exact", "window:3"), quick=True),
        Options(
            archs=("llama",),
            candidate="m:n",
            reference="full",
            require="forward",
            dtype="float32",
            prompt_length=-3,
            group_size=0,
            response_length="3,1",
            objective="dapo",
            seed=7,
            chunk=5,
            lora=True,
            quantised=True,
            tied=True,
            spans="image",
        ),
    ],
)
def test_options_survive_the_way_through_pytest(project, pytester, options):
    pytester.makeconftest(
        f"""
        from lsverify.pytest_plugin import options_of

        def pytest_configure(config):
            from lsverify.cases import Options
            assert options_of(config) == {options!r}
        """
    )
    pytester.makepyfile("def test_one(): pass")
    project(*as_arguments(options)).assert_outcomes(passed=1)


def test_loading_the_plugin_costs_a_project_nothing():
    heavy = "torch transformers wandb numpy scipy peft pydantic typer rich hypothesis".split()
    code = f"import lsverify.pytest_plugin, sys; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert ran.stdout == "[]\n"


def test_the_suites_run_with_plain_pytest(tmp_path):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "lsverify.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["suites/test_gradient.py", "-q", "--lsv-arch=llama", "--lsv-quick"]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 passed" in ran.stdout
