"""The catalogue of planted faults is sound: honest pieces, named entries, and a refusal that must fit to count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from judged import made_up

from lsverify.cases import QUICK, load_candidate
from lsverify.evidence import RUNGS, CaseConfig, Rung
from lsverify.faults import FAULTS, honest
from lsverify.faults.catalogue import spec_of
from lsverify.ladder import judge
from lsverify.models import TINY

DOCS = Path(__file__).parent.parent / "docs"
FAULT = FAULTS["divided_twice"]


def receipt(**details):
    """A receipt in which the rungs named fail with this text and all others hold."""
    case = made_up(config=FAULT.config("llama", **QUICK))
    rungs = tuple(
        Rung(name=name, status="failed", detail=details[name])
        if name in details
        else Rung(name=name, status="proven")
        for name in RUNGS
    )
    return case.model_copy(update={"rungs": rungs})


def test_there_are_faults_of_many_kinds_for_every_rung_above_the_objective():
    assert len(FAULTS) >= 14
    assert len({fault.kind for fault in FAULTS.values()}) >= 8
    assert {fault.rung for fault in FAULTS.values()} == set(RUNGS[1:])


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_every_fault_can_be_named_on_the_command_line(fault):
    assert load_candidate(spec_of(fault.path)) is fault.path
    assert set(fault.architectures) <= set(TINY)
    assert fault.path.__doc__


def test_every_fault_is_listed_in_the_docs_with_its_rung():
    lines = (DOCS / "faults.md").read_text(encoding="utf-8").splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    assert rows.keys() == {f"{fault.kind}:{fault.name}" for fault in FAULTS.values()}
    for fault in FAULTS.values():
        row = rows[f"{fault.kind}:{fault.name}"]
        assert f"| `{fault.rung}` | {fault.report or '-'} |" in row


def test_a_refusal_by_the_right_rung_in_the_right_words_counts():
    found = receipt(gradient="every gradient is 1/3 times the reference")
    assert list(FAULT.missed(found)) == []


@pytest.mark.parametrize(
    ("details", "said"),
    [
        ({}, "gradient is proven"),
        ({"gradient": "only kind o differs"}, "gradient does not point at"),
        ({"optimizer_delta": "every gradient is 1/3 times the reference"}, "gradient is proven"),
        (
            {"forward": "too early", "gradient": "every gradient is 1/3 times the reference"},
            "forward refused it before gradient: too early",
        ),
    ],
)
def test_any_other_outcome_is_a_miss(details, said):
    assert any(said in line for line in FAULT.missed(receipt(**details)))


def test_an_honest_path_in_a_faults_place_is_a_miss():
    right = replace(FAULT, path=FAULTS["noise_in_the_gradient"].path, points_at="no such words")
    assert "does not point at" in next(right.missed(judge(right.config("llama", **QUICK))))


@pytest.mark.parametrize("name", honest.HONEST)
def test_honest_names_are_paths(name):
    assert load_candidate(f"lsverify.faults.honest:{name}") is getattr(honest, name)


@pytest.mark.usefixtures("my_path_anew")
@pytest.mark.parametrize(
    ("arch", "name"), [("llama", "step"), ("llama", "share"), ("qwen3_5", "share")]
)
def test_the_paths_of_the_docs_reach_their_claims(arch, name, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    case = judge(CaseConfig(arch=arch, candidate=f"my_path:{name}", **QUICK))
    assert case.reached, [rung.detail for rung in case.rungs if not rung.holds]
    assert case.reference == ("full" if name == "step" else "stopped at B")
