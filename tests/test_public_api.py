from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lsverify

ROOT = Path(__file__).parent.parent


def test_public_names_are_pinned():
    assert lsverify.__all__ == [
        "Group",
        "InputError",
        "NotShareable",
        "Objective",
        "Plan",
        "Problem",
        "ProblemSpec",
        "PromptState",
        "Response",
        "Scores",
        "StalePromptState",
        "StepResult",
        "Update",
        "__version__",
        "build",
        "draw",
        "full_autograd",
        "longstraw",
        "off_policy",
        "prepare",
        "preset",
        "score",
    ]
    assert lsverify.__all__ == sorted(lsverify.__all__)
    assert dir(lsverify) == lsverify.__all__


def test_every_public_name_resolves_and_has_a_docstring():
    for name in lsverify.__all__:
        value = getattr(lsverify, name)
        assert name == "__version__" or value.__doc__, name


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="has no attribute 'longstraws'"):
        lsverify.longstraws  # noqa: B018  # the access is what is tested


def test_star_import_brings_exactly_the_public_names():
    found: dict[str, object] = {}
    exec("from lsverify import *", found)
    assert sorted(set(found) - {"__builtins__"}) == lsverify.__all__


@pytest.mark.parametrize("module", ["lsverify", "lsverify.errors", "lsverify.pytest_plugin"])
def test_import_leaves_heavy_packages_out(module):
    assert _imported_with(f"import {module}") == "[]"


def test_the_check_for_heavy_packages_sees_one():
    assert "torch" in _imported_with("import lsverify; lsverify.Problem")


def _imported_with(statement: str) -> str:
    heavy = "torch numpy scipy transformers peft wandb hypothesis pydantic rich typer".split()
    code = f"{statement}; import sys; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return ran.stdout.strip()


def test_every_requirement_has_a_pin_that_satisfies_it():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "ci" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    extras = [entry for group in project["optional-dependencies"].values() for entry in group]
    wanted = [Requirement(entry) for entry in project["dependencies"] + extras]
    for requirement in wanted:
        if requirement.name != "lsverify":
            assert pins[requirement.name.lower()] in requirement.specifier, requirement
