"""Remakes fixtures/golden_step: `python -m tests.make_golden_step` from the project's root."""

import json
from pathlib import Path

from lsverify.evidence import CaseConfig
from lsverify.precision import computing
from lsverify.problems import Problem
from lsverify.references import full_reference
from lsverify.setting import make_setting
from lsverify.whole_files import write_whole

FOLDER = Path(__file__).parent.parent / "fixtures" / "golden_step"


def numbers(model, problem: Problem, objective) -> dict:
    """Loss, log-probs and gradient norms of full autograd, floats at full precision."""
    with computing(model, "float64"):
        step = full_reference(model, problem, objective)
    norms = {n: None if g is None else float(g.norm()) for n, g in step.gradients.items()}
    return {
        "loss": step.loss,
        "log_probs": [row.tolist() for row in step.log_probs],
        "gradient_norms": norms,
    }


if __name__ == "__main__":
    setting = make_setting(CaseConfig(arch="llama"))
    setting.problem.save(FOLDER)
    found = numbers(setting.model, setting.problem, setting.objective)
    write_whole(FOLDER / "step.json", json.dumps(found, indent=1) + "\n")
