"""Proves or refuses that a LongStraw GRPO step trains the policy that ordinary GRPO would have trained."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsverify.errors import InputError, NotShareable, StalePromptState
    from lsverify.models import build
    from lsverify.objective import Objective, Plan, Scores, prepare, preset
    from lsverify.paths import StepResult, Update, full_autograd, longstraw, score
    from lsverify.problems import Group, Problem, ProblemSpec, Response, draw, off_policy
    from lsverify.prompt import PromptState

__version__ = "0.1.0"

__all__ = [
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

_HOME = {
    "Group": "problems",
    "InputError": "errors",
    "NotShareable": "errors",
    "Objective": "objective",
    "Plan": "objective",
    "Problem": "problems",
    "ProblemSpec": "problems",
    "PromptState": "prompt",
    "Response": "problems",
    "Scores": "objective",
    "StalePromptState": "errors",
    "StepResult": "paths",
    "Update": "paths",
    "build": "models",
    "draw": "problems",
    "full_autograd": "paths",
    "longstraw": "paths",
    "off_policy": "problems",
    "prepare": "objective",
    "preset": "objective",
    "score": "paths",
}


def __getattr__(name: str) -> Any:
    # pytest loads our plugin, and with it this package, in every project: torch must wait until a name is used.
    if name in _HOME:
        return getattr(import_module(f"lsverify.{_HOME[name]}"), name)
    raise AttributeError(f"module 'lsverify' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
