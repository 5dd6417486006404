from __future__ import annotations

import sys

import pytest

from lsverify.cases import DEFAULT_ARCHS, DTYPES, SMOLLM2, Options, group_sizes, load_candidate
from lsverify.errors import InputError
from lsverify.evidence import RUNGS, CaseConfig
from lsverify.models import TINY
from lsverify.precision import DTYPES as PRECISIONS
from lsverify.pretrained import SMOLLM2 as PRETRAINED


@pytest.fixture(autouse=True)
def _own_modules(monkeypatch, tmp_path):
    """A current directory of the test's own, and nothing imported from it afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("candidate_"):
            del sys.modules[name]


def written(tmp_path, text, name="candidate_path"):
    (tmp_path / f"{name}.py").write_text(text)
    return name


# Options ------------------------------------------------------------------------------------------


def test_the_default_is_four_architectures_and_two_policies_at_oracle_precision():
    cases = Options().cases()
    assert [(case.arch, case.policy) for case in cases] == [
        (arch, policy) for arch in DEFAULT_ARCHS for policy in ("exact", "detach")
    ]
    assert {(case.dtype, case.reference, case.require) for case in cases} == {
        ("float64", "declared", "optimizer_delta")
    }
    assert cases[0] == CaseConfig(arch="llama", policy="exact")


def test_what_is_known_here_is_what_is_known_there():
    """Names that are repeated so that the command line starts without torch."""
    assert set(DEFAULT_ARCHS) <= set(TINY)
    assert tuple(PRECISIONS) == DTYPES
    assert SMOLLM2 == PRETRAINED


def test_every_option_reaches_the_case():
    (case,) = Options(
        archs=("mistral",),
        policies=("window:3",),
        reference="full",
        require="gradient",
        dtype="float32",
        prompt_length=7,
        group_size=3,
        response_length="2, 4",
        objective="dapo",
        seed=11,
        chunk=2,
        lora=True,
        quantised=True,
        tied=True,
        spans="image",
    ).cases()
    assert case == CaseConfig(
        arch="mistral",
        policy="window:3",
        reference="full",
        require="gradient",
        dtype="float32",
        prompt_length=7,
        group_size=3,
        response_lengths=(2, 4),
        objective="dapo",
        seed=11,
        chunk=2,
        lora=True,
        quantised=True,
        tied=True,
        spans="image",
    )


def test_quick_is_smaller_and_gives_way_to_what_is_asked_for():
    (quick,) = Options(archs=("llama",), policies=("exact",), quick=True).cases()
    assert (quick.prompt_length, quick.group_size, quick.response_lengths) == (12, 2, (3, 1))
    (asked,) = Options(archs=("llama",), policies=("exact",), quick=True, prompt_length=40).cases()
    assert (asked.prompt_length, asked.group_size) == (40, 2)


def test_a_candidate_has_no_policy_unless_one_is_named():
    assert {case.policy for case in Options(candidate="a:b").cases()} == {None}
    assert {case.policy for case in Options(candidate="a:b", policies=("exact",)).cases()} == {
        "exact"
    }
    assert {case.candidate for case in Options(candidate="a:b").cases()} == {"a:b"}


def test_the_pretrained_model_has_sizes_of_its_own():
    (case,) = Options(archs=(SMOLLM2,), policies=("exact",)).cases()
    assert (case.response_lengths, case.chunk, case.require) == ((16, 24, 32, 20), 512, "gradient")
    assert group_sizes(case) == (4,)
    (asked,) = Options(
        archs=(SMOLLM2,), policies=("exact",), chunk=9, response_length="5", require="forward"
    ).cases()
    assert (asked.response_lengths, asked.chunk, asked.require) == ((5,), 9, "forward")


@pytest.mark.parametrize(("size", "groups"), [(4, (4, 3)), (2, (2, 1)), (1, (1, 1))])
def test_the_second_group_is_smaller_by_one(size, groups):
    assert group_sizes(CaseConfig(arch="llama", group_size=size)) == groups


def test_a_folder_is_an_architecture(tmp_path):
    assert Options(archs=(str(tmp_path),)).cases()[0].arch == str(tmp_path)


def test_equal_cases_are_judged_once(tmp_path):
    options = Options(archs=("llama", "llama"), policies=("exact", "detach", "exact"))
    assert len(options.cases()) == 6
    assert [case.policy for case in options.checked()] == ["exact", "detach"]


def test_a_candidate_is_imported_before_anything_is_judged(tmp_path):
    with pytest.raises(InputError, match="no module 'candidate_missing'"):
        Options(candidate="candidate_missing:step").checked()
    name = written(tmp_path, "def step(model, problem, objective): ...")
    assert len(Options(candidate=f"{name}:step").checked()) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"archs": ("lama",)}, "architecture 'lama' is not known: use one of"),
        ({"policies": ("exact", "half")}, "policy 'half' is not known: use exact, detach"),
        ({"dtype": "float16"}, "dtype 'float16' is not known: use one of float64, float32"),
        ({"reference": "half"}, "reference 'half' is not known: use one of declared, full"),
        ({"require": "learning"}, "require 'learning' is not known: use one of objective, exec"),
        ({"objective": "ppo"}, "objective 'ppo' is not known; choose from grpo, dr_grpo"),
        ({"prompt_length": 0}, "prompt length 0 is not allowed: Input should be greater than"),
        ({"group_size": 0}, "group size 0 is not allowed: Input should be greater than"),
        ({"chunk": -1}, "chunk -1 is not allowed: Input should be greater than"),
        ({"seed": -1}, "seed -1 is not allowed: Input should be greater than"),
        ({"response_length": "0"}, "response length '0' is not allowed: use one length or several"),
        ({"response_length": "3,"}, "response length '3,' is not allowed: use one length or"),
        ({"response_length": ""}, "response length '' is not allowed: use one length or several"),
        ({"response_length": "-2"}, "response length '-2' is not allowed: use one length or"),
        ({"response_length": "1.5"}, "response length '1.5' is not allowed: use one length or"),
        ({"response_length": "\u00b2"}, "response length '\u00b2' is not allowed: use one length"),
        (
            {"group_size": 1, "response_length": "1,2,3"},
            r"response length '1,2,3' names 3 lengths for 2 responses \(groups of 1 and 1\)",
        ),
    ],
)
def test_a_value_that_is_not_allowed_gets_one_line(given, message):
    with pytest.raises(InputError, match=message) as caught:
        Options(**given).cases()
    assert "\n" not in str(caught.value)


def test_every_rung_may_be_required():
    for name in RUNGS:
        assert {case.require for case in Options(require=name).cases()} == {name}


# Candidates ---------------------------------------------------------------------------------------


def test_a_candidate_is_found_in_the_current_directory(tmp_path):
    name = written(tmp_path, "def step(model, problem, objective): return 'mine'")
    assert load_candidate(f"{name}:step")(None, None, None) == "mine"
    assert sys.path.count(str(tmp_path)) == 1
    load_candidate(f"{name}:step")
    assert sys.path.count(str(tmp_path)) == 1


def test_a_candidate_is_found_where_it_is_installed():
    from lsverify.paths import longstraw

    assert load_candidate("lsverify.paths:longstraw") is longstraw


@pytest.mark.parametrize("spec", ["", ":", "step", "module:", ":step"])
def test_a_candidate_of_another_form_is_refused(spec):
    with pytest.raises(InputError, match="is not of the form MODULE:NAME, for instance my_path:st"):
        load_candidate(spec)


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        ("step = 3", "step", "is not callable: give .model, problem, objective. -> result"),
        ("", "step", "module 'candidate_path' has no 'step'"),
        ("step = None", "step", "module 'candidate_path' has no 'step'"),
        ("import candidate_nowhere", "step", "no module 'candidate_nowhere' in the current"),
        ("1 / 0", "step", "importing it raised ZeroDivisionError: division by zero"),
        ("def step(:", "step", "importing it raised SyntaxError"),
        # Not its own missing name: something that its import needed.
        ("import os; os.nothing", "step", "importing it raised AttributeError: module 'os'"),
        ("import sys; sys.exit(0)", "step", "importing it raised SystemExit: 0"),
    ],
)
def test_a_candidate_that_cannot_be_had_is_refused_in_one_line(tmp_path, text, wanted, message):
    name = written(tmp_path, text)
    with pytest.raises(InputError, match=message) as caught:
        load_candidate(f"{name}:{wanted}")
    assert str(caught.value).startswith(f"candidate '{name}:{wanted}'")


def test_an_interrupt_while_a_candidate_is_imported_is_an_interrupt(tmp_path):
    name = written(tmp_path, "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load_candidate(f"{name}:step")
