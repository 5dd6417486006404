"""Paths by others and their verdicts, each with a fault planted in it; and the names that they are installed under."""

from __future__ import annotations

import json
import logging
import sys
import tomllib
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from judged import receipt_of, rung, statuses
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from lsverify import candidate_names, evidence
from lsverify.candidates import checkpointed, compiled, prefix_grouper
from lsverify.cases import QUICK, load_candidate
from lsverify.cli import run
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig
from lsverify.families import TINY
from lsverify.ladder import judge
from lsverify.models import tiny
from lsverify.observe import recorded
from lsverify.paths import full_autograd
from lsverify.repeat import differences, run_again
from lsverify.setting import make_setting
from lsverify.untouched import Untouched

ROOT = Path(__file__).parent.parent
PROVEN = dict.fromkeys(RUNGS, "proven")
SIZES = {**QUICK, "response_lengths": (3, 2)}


def verdict(candidate, arch="llama", **fields):
    return judge(CaseConfig(arch=str(arch), candidate=candidate, **{**SIZES, **fields}))


def planted(name):
    """The name of a path of this module."""
    return f"{__name__}:{name}"


# prefix-grouper -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "mistral"])
def test_prefix_grouper_has_the_full_gradient_and_forwards_a_prompt_once(arch):
    receipt = verdict("prefix-grouper", arch)
    assert statuses(receipt) == PROVEN
    assert (receipt.policy, receipt.reference) == ("exact", "full")
    problem = make_setting(receipt.config).problem
    longest = max(len(each.prompt) + sum(map(len, each.responses)) for each in problem.groups)
    # Two rows, padded to the longer one.
    assert receipt.accounting["tokens_forwarded"] == 2 * longest


def test_prefix_grouper_in_float32():
    receipt = verdict("prefix-grouper", dtype="float32", require="gradient")
    assert statuses(receipt) == PROVEN | {"optimizer_delta": "not_run"}


def reads_its_sibling(module, query, key, value, attention_mask, **kwargs):
    if key.shape[2] > query.shape[2]:  # responses over their prompts
        key, value = key.roll(1, 0), value.roll(1, 0)
    return prefix_grouper.padded_causal(module, query, key, value, attention_mask, **kwargs)


def reads_what_follows(module, query, key, value, attention_mask, **kwargs):
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return sdpa(module, query, key, value, attention_mask[:, None, None, :], **kwargs)


AttentionInterface.register("reads_its_sibling", reads_its_sibling)
AttentionInterface.register("reads_what_follows", reads_what_follows)
sibling = partial(prefix_grouper.step, attention="reads_its_sibling")
ahead = partial(prefix_grouper.step, attention="reads_what_follows")
as_shipped_over_sdpa = partial(prefix_grouper.step, attention="sdpa")


@pytest.mark.parametrize("fault", ["sibling", "ahead"])
def test_a_packed_response_that_reads_what_it_may_not_is_refused(fault):
    receipt = verdict(planted(fault), require="forward")
    assert statuses(receipt) == PROVEN | {
        "forward": "failed",
        "gradient": "not_run",
        "optimizer_delta": "not_run",
    }


def test_packed_positions_that_are_off_by_one_are_refused(monkeypatch):
    honest = prefix_grouper.positions

    def late(starts, width):
        return honest([start + (start > 0) for start in starts], width)

    monkeypatch.setattr(prefix_grouper, "positions", late)
    assert rung(verdict("prefix-grouper", require="forward"), "forward").status == "failed"


def test_prefix_grouper_lets_a_recurrent_state_run_from_sibling_to_sibling():
    receipt = verdict("prefix-grouper", "mamba2", require="forward")
    found = rung(receipt, "forward")
    assert found.status == "failed"
    assert "response 1 token 1" in found.detail


def test_prefix_grouper_needs_the_mask_of_flash_attention():
    """The registered attention hands sdpa one row of padding for each sequence where it reads one for each query."""
    found = rung(verdict(planted("as_shipped_over_sdpa"), require="execution"), "execution")
    assert found.status == "error"
    assert "size of tensor" in found.detail


@pytest.mark.parametrize(
    "fields",
    [
        {"spans": "image", "prompt_length": 24},
        {"arch": "mixtral", "objective": "grpo,aux_coef=0.1"},
    ],
)
def test_prefix_grouper_refuses_what_it_knows_nothing_of(fields):
    with pytest.raises(InputError, match="neither spans nor a load-balancing loss"):
        verdict("prefix-grouper", require="execution", **fields)


def test_without_the_package_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prefix_grouper", None)
    monkeypatch.delitem(sys.modules, prefix_grouper.__name__)
    with pytest.raises(InputError) as caught:
        load_candidate("prefix-grouper")
    assert str(caught.value) == (
        "candidate 'prefix-grouper': prefix-grouper is not installed: pip install 'lsverify[prefix-grouper]'"
    )


# Gradient checkpointing ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed-reentrant"])
def test_checkpointing_keeps_the_gradient_and_leaves_nothing_behind(name):
    assert statuses(verdict(name)) == PROVEN


@pytest.mark.parametrize("path", [checkpointed.step, checkpointed.reentrant])
def test_under_checkpointing_every_layer_runs_twice(path):
    setting = make_setting(CaseConfig(arch="llama", candidate="a:b", **SIZES))
    step = (setting.model, setting.problem, setting.objective)
    once, twice = (recorded(each, *step).watch.layer_tokens for each in (full_autograd, path))
    assert {name: 2 * seen.total for name, seen in once.items()} == {
        name: seen.total for name, seen in twice.items()
    }


def test_a_model_that_was_checkpointed_before_still_is(oracle):
    model = oracle("llama")
    with checkpointed.checkpointing(model, use_reentrant=False):
        before = Untouched(model)
        with checkpointed.checkpointing(model, use_reentrant=True):
            assert before.changes()
        assert before.changes() == []


def left_on(model, problem, objective):
    model.activation_checkpointing_enable()
    return full_autograd(model, problem, objective)


def test_checkpointing_that_is_left_on_is_refused():
    found = rung(verdict(planted("left_on"), require="execution"), "execution")
    assert found.status == "failed"
    assert "gradient_checkpointing was False and is True" in found.detail


# torch.compile ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_trace_of_the_compiler(monkeypatch):
    """Pytest listens to every logger, and torch would write down all that it compiles."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)


# Torch's own, while it traces.
tracing = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    """A folder with a llama of one layer: each layer is compiled for itself, which takes seconds."""
    config = TINY["llama"]()
    config.num_hidden_layers = 1
    folder = tmp_path_factory.mktemp("one_layer")
    tiny(config, seed=0, dtype="float64").save_pretrained(folder)
    return folder


@tracing
def test_compiled_code_has_the_full_gradient_and_really_runs(one_layer):
    from torch._dynamo.utils import counters

    counters.clear()
    before = compiled.AOT_EAGER.runs
    receipt = verdict("compiled", one_layer)
    assert statuses(receipt) == PROVEN
    # Compiled for the watched run and for the others, not once more for each pass of the watched one.
    assert 0 < counters["frames"]["ok"] <= 5
    assert not counters["graph_break"]
    # Watched, timed and weighed, and three steps under each of two optimizers, of three responses and more.
    assert compiled.AOT_EAGER.runs - before >= 9 * 3


def test_a_path_whose_layers_were_not_compiled_says_so(monkeypatch, one_layer):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    found = rung(verdict("compiled", one_layer, require="execution"), "execution")
    assert found.status == "error"
    assert "no code that aot_eager compiled was run" in found.detail


def slightly_off(graph, inputs):
    def off(each):
        return each + 1e-6 * each.roll(1, -1) if getattr(each, "ndim", 0) else each

    return lambda *args: [off(each) for each in graph(*args)]


def miscompiled(model, problem, objective):
    with compiled.compiling(model, slightly_off):
        return full_autograd(model, problem, objective)


@tracing
def test_wrong_compiled_code_is_refused(one_layer):
    found = rung(verdict(planted("miscompiled"), one_layer, require="forward"), "forward")
    assert found.status == "failed"
    assert 1e-8 < found.measure < 1e-3


def test_without_a_compiler_inductor_is_refused_in_one_line(one_layer):
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(
            InputError, match=r"needs a C\+\+ compiler and there is none: install g"
        ):
            verdict("compiled-inductor", one_layer)


# Names --------------------------------------------------------------------------------------------


def test_what_is_installed_under_a_name_is_what_the_project_says():
    """If this fails, run `bash ci/setup.sh`: names are read from the metadata of the installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {
        point.name: point.value
        for point in candidate_names.registered()
        if point.value.startswith("lsverify.")
    }
    assert ours == project["entry-points"]["lsverify.candidates"]
    assert load_candidate("checkpointed-reentrant") is checkpointed.reentrant


def test_an_unknown_name_lists_what_there_is(capsys):
    assert run(["gate", "--arch", "llama", "--candidate", "prefix"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(
        "lsverify: candidate 'prefix' is not of the form MODULE:NAME, for instance"
    )
    assert "nor an installed name: checkpointed, checkpointed-reentrant, compiled, " in line
    assert line.count("\n") == 1


def registered(monkeypatch, *pairs):
    points = [EntryPoint(name, value, candidate_names.GROUP) for name, value in pairs]
    monkeypatch.setattr(candidate_names, "entry_points", lambda group: points)


def test_a_name_that_two_packages_register_differently_is_refused(monkeypatch):
    registered(monkeypatch, ("mine", "b:step"), ("mine", "a:step"), ("yours", "json:dumps"))
    with pytest.raises(InputError, match="is registered more than once: use one of a:step, b:step"):
        load_candidate("mine")
    registered(monkeypatch, ("yours", "json:dumps"), ("yours", "json:dumps"))
    assert load_candidate("yours") is json.dumps


def test_without_any_name_the_refusal_says_so(monkeypatch):
    registered(monkeypatch)
    with pytest.raises(InputError, match="nor an installed name: there is none"):
        load_candidate("")


def test_the_list_tells_what_is_ready_and_what_is_missing(monkeypatch, capsys):
    registered(monkeypatch, ("here", "json:dumps"), ("gone", "nowhere_at_all:step"))
    assert run(["candidates", "--json"]) == 0
    assert [list(row.values()) for row in json.loads(capsys.readouterr().out)] == [
        [
            "gone",
            "nowhere_at_all:step",
            "",
            "no module 'nowhere_at_all' in the current directory or installed",
        ],
        ["here", "json:dumps", "", "ready"],
    ]
    assert run(["candidates"]) == 0
    assert "nowhere_at_all:step" in capsys.readouterr().out


def test_a_receipt_of_a_named_candidate_repeats_to_the_bit(tmp_path):
    case = verdict("checkpointed", require="execution")
    evidence.save(receipt_of(case), tmp_path / "receipt.json")
    before = evidence.load(tmp_path / "receipt.json")
    assert before.cases[0].candidate == "checkpointed"
    assert differences(before.cases, run_again(before)) == []
