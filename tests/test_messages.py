"""The wording of what people read when something is refused: name, value, what is allowed, what to do."""

from __future__ import annotations

import re

import pytest
from judged import judged, made_up, receipt_of, rung

from lsverify import evidence, gate, tracking
from lsverify.cases import Options, load_candidate
from lsverify.errors import InputError
from lsverify.families import TINY
from lsverify.inventory import rows_of
from lsverify.policies import parse_policy


def options(**fields):
    return Options(**{"archs": ("llama",), "quick": True, **fields})


REFUSED = [
    (
        lambda path: options(archs=("lama",)).cases(),
        f"architecture 'lama' is not known: use one of {', '.join(sorted(TINY))}, smollm2-135m, warm:llama and other warm starts, a local folder with "
        "config.json and safetensors weights, or a model type of transformers (lsverify archs lists them)",
    ),
    (
        lambda path: parse_policy("windows:3"),
        "policy 'windows:3' is not known: use exact, detach, window:M, tail:K, layers:0,2-3, kinds:attention,recurrent, "
        "roulette:P, stale:N, or several joined by +, as in tail:K+window:M+kinds:recurrent",
    ),
    (
        lambda path: options(prompt_length=-3).cases(),
        "prompt length -3 is not allowed: Input should be greater than or equal to 1",
    ),
    (
        lambda path: options(response_length="3,x").cases(),
        "response length '3,x' is not allowed: use one length or several as N,N,.. with each 1 or more",
    ),
    (
        lambda path: options(response_length="1,2,3,4").cases(),
        "response length '1,2,3,4' names 4 lengths for 3 responses (groups of 2 and 1): name fewer, "
        "or raise the group size",
    ),
    (
        lambda path: options(dtype="half").cases(),
        "dtype 'half' is not known: use one of float64, float32, bfloat16, bfloat16-autocast",
    ),
    (
        lambda path: options(objective="ppo").cases(),
        "objective 'ppo' is not known; choose from grpo, dr_grpo, dapo, bnpo, rloo, cispo, gspo, sapo, luspo, vespo, reinforce",
    ),
    (
        lambda path: options(require="all").cases(),
        "require 'all' is not known: use one of objective, execution, forward, gradient, optimizer_delta",
    ),
    (
        lambda path: options(reference="x").cases(),
        "reference 'x' is not known: use one of declared, full",
    ),
    (
        lambda path: load_candidate("mine:"),
        "candidate 'mine:' is not of the form MODULE:NAME, for instance my_path:step",
    ),
    (
        lambda path: load_candidate("nowhere:step"),
        "candidate 'nowhere:step': no module 'nowhere' in the current directory or installed",
    ),
    (
        lambda path: load_candidate("candidates:gone"),
        "candidate 'candidates:gone': module 'candidates' has no 'gone'",
    ),
    (
        lambda path: load_candidate("candidates:not_callable"),
        "candidate 'candidates:not_callable' is not callable: give (model, problem, objective) -> result",
    ),
    (
        lambda path: tracking.check_mode("on"),
        "wandb 'on' is not known: use one of offline, online, disabled",
    ),
    (
        lambda path: rows_of("llama", prompt_length=0, dtype="float32"),
        "prompt length 0 is not allowed: use 1 token or more",
    ),
    (
        lambda path: evidence.check_folder(path / "file"),
        "out '{path}/file' cannot be written to (File exists): choose another folder",
    ),
    (
        lambda path: evidence.save(receipt_of(made_up()), path / "file" / "receipt.json"),
        "receipt cannot be written to '{path}/file/receipt.json' "
        "([Errno 17] File exists: '{path}/file'): choose another --out",
    ),
    (
        lambda path: evidence.load(path / "file"),
        "receipt '{path}/file' is not valid at the file: Invalid JSON: EOF while parsing a value at line 1 "
        "column 0; give a receipt.json of schema version 1",
    ),
    (
        lambda path: gate.run_gate(options(), junit=path / "missing" / "gate.xml"),
        "junit '{path}/missing/gate.xml' is not a file in a folder that exists: create the folder, "
        "or choose another file",
    ),
]


@pytest.mark.parametrize(
    ("call", "told"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else ""
)
def test_what_is_refused_and_how(call, told, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        call(tmp_path)
    assert str(caught.value) == told.replace("{path}", str(tmp_path))


DETAILS = [
    ({"candidate": "raises"}, "execution", "the path raised RuntimeError: no such kernel"),
    (
        {"candidate": "never_enters"},
        "execution",
        "no token was forwarded through the model: the path never entered it",
    ),
    ({"candidate": "raises"}, "gradient", "the path raised an error"),
    ({"policy": "exact"}, "execution", "41 tokens forwarded, 24 of them under autograd"),
    (
        {"policy": "exact", "require": "objective"},
        "forward",
        "not asked for: --require objective",
    ),
]


@pytest.mark.parametrize(("case", "name", "told"), DETAILS)
def test_what_a_rung_says(case, name, told):
    assert rung(judged(**case), name).detail == told


def test_a_gradient_that_differs_is_told_with_place_values_and_allowance():
    text = rung(judged(policy="detach", reference="full"), "gradient").detail
    assert re.search(
        r"all parameters: relative L2 [\d.e-]+, cosine [\d.]+, norm ratio [\d.]+", text
    )
    assert re.search(r"model\.\S+: relative L2 [\d.e+-]+, cosine", text)
    assert re.search(r"error [\d.e+-]+, allowance [\d.e+-]+ \(limit", text)
    assert re.search(
        r"largest at \([\d, ]+\): expected [\d.e-]+, actual [\d.e-]+, difference", text
    )
