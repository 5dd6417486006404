"""A property test's failure as a folder that runs it again: problem, configuration, receipt, and a script of ten lines."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lsverify import problem_files
from lsverify.cases import load_candidate, require_known
from lsverify.errors import InputError
from lsverify.evidence import Environment, Parameter, Real, environment, finite
from lsverify.objective import Objective
from lsverify.paths import Path as StepPath
from lsverify.problems import ProblemSpec
from lsverify.steps import Step, StepFailed
from lsverify.whole_files import write_whole

FOLDER = Path("lsverify-out/failures")
SCRIPT = '''"""The smallest step that failed: exit code 1 with what differs, while it does."""

from pathlib import Path

from lsverify.reproduce import load_step
from lsverify.steps import StepFailed, hold

try:
    print(hold(*load_step(Path(__file__).parent)).status)
except StepFailed as failed:
    raise SystemExit(str(failed)) from None
'''


class Configuration(BaseModel):
    """`step.json`: what makes the step. `candidate` None stands for LongStraw with the step's policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    arch: str
    candidate: str | None
    spec: ProblemSpec
    objective: Objective
    policy: str
    chunk: int
    branches: int
    training: bool

    def step(self) -> Step:
        names = [each.name for each in dataclasses.fields(Step)]
        return Step(**{name: getattr(self, name) for name in names})


class StepReceipt(BaseModel):
    """`receipt.json`: what was found, every parameter of it, and where."""

    environment: Environment
    failure: str
    status: str | None
    rel_l2: Real | None
    rolled_rel_l2: Real | None
    parameters: tuple[Parameter, ...]


def write(failed: StepFailed, candidate: str | None, folder: Path) -> Path:
    """Write a failure's folder, replacing what an earlier one left there; returns the script."""
    step = failed.step
    made = {each.name: getattr(step, each.name) for each in dataclasses.fields(step)}
    configuration = Configuration(arch=failed.arch, candidate=candidate, **made)
    folder.mkdir(parents=True, exist_ok=True)
    problem_files.save(step.referee(failed.arch).setting.problem, folder)
    write_whole(folder / "step.json", configuration.model_dump_json(indent=1))
    receipt = finite(_receipt(failed).model_dump(mode="python"))
    write_whole(folder / "receipt.json", json.dumps(receipt, indent=1, allow_nan=False))
    write_whole(folder / "run.py", SCRIPT)
    return folder / "run.py"


def folder_of(test: str) -> Path:
    """Where the failure of a test goes, by the test's id: one folder for each test."""
    return FOLDER / re.sub(r"[^\w.=-]+", "-", test).strip("-")


def load_step(folder: Path) -> tuple[str, Step, StepPath | None]:
    """What `lsverify.steps.hold` takes, from a folder that `write` made. Raises `InputError` for anything else."""
    try:
        text = (folder / "step.json").read_text(encoding="utf-8")
        found = Configuration.model_validate_json(text)
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        said = str(error).splitlines()[0]
        raise InputError(
            f"{str(folder / 'step.json')!r} cannot be read ({said}): give a folder of {FOLDER}"
        ) from None
    require_known(found.arch)
    return found.arch, found.step(), load_candidate(found.candidate) if found.candidate else None


def _receipt(failed: StepFailed) -> StepReceipt:
    found = failed.comparison
    numbers: dict[str, Any] = {"status": None, "rel_l2": None, "rolled_rel_l2": None}
    if found is not None:
        numbers = {name: getattr(found, name) for name in numbers}
    parameters = tuple(
        Parameter(
            name=tensor.name,
            status=tensor.verdict,
            rel_l2=tensor.rel_l2,
            cosine=tensor.cosine,
            norm_ratio=tensor.norm_ratio,
            limit=tensor.limit,
            bias_rel_l2=None,
            slices={part.slice or "": part.rel_l2 for part in tensor.parts},
        )
        for tensor in (found.tensors if found else ())
    )
    return StepReceipt(
        environment=environment(), failure=str(failed), parameters=parameters, **numbers
    )
