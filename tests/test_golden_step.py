"""A step whose numbers are on record: full autograd and `exact` still give them."""

import json

import pytest
import torch
from make_golden_step import FOLDER, numbers

from lsverify.models import build
from lsverify.objective import preset
from lsverify.paths import longstraw
from lsverify.precision import computing
from lsverify.problems import Problem
from lsverify.references import take_gradients

RECORDED = json.loads((FOLDER / "step.json").read_text())
# Another processor may sum in another order; a change of meaning is many digits larger.
CLOSE = {"rel": 1e-11, "abs": 1e-13}


def flat(numbers: dict) -> list[float]:
    norms = [n for n in numbers["gradient_norms"].values() if n is not None]
    log_probs = [value for row in numbers["log_probs"] for value in row]
    return [numbers["loss"], *log_probs, *norms]


def test_full_autograd_gives_the_recorded_numbers():
    found = numbers(build("llama", seed=0), Problem.load(FOLDER), preset("grpo"))
    assert found["gradient_norms"].keys() == RECORDED["gradient_norms"].keys()
    assert flat(found) == pytest.approx(flat(RECORDED), **CLOSE)


def test_exact_gives_the_recorded_numbers():
    model = build("llama", seed=0)
    with computing(model, "float64"):
        result = longstraw(model, Problem.load(FOLDER), preset("grpo"), chunk=8)
    norms = {n: float(g.norm()) for n, g in take_gradients(model).items() if g is not None}
    found = [result.loss, *torch.cat(result.log_probs).tolist(), *norms.values()]
    assert found == pytest.approx(flat(RECORDED), **CLOSE)
