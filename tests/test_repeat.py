from __future__ import annotations

import math

import pytest
from judged import judged, made_up, receipt_of

from lsverify import evidence, ladder
from lsverify.evidence import Rung
from lsverify.repeat import differences, elsewhere, run_again


def test_every_number_repeats_to_the_bit_from_the_configs_alone(tmp_path, monkeypatch):
    evidence.save(receipt_of(judged(policy="exact"), judged(policy="detach")), tmp_path / "r.json")
    before = evidence.load(tmp_path / "r.json")
    monkeypatch.setattr(ladder, "_referee", ladder._referee.__wrapped__)
    after = run_again(before)
    assert differences(before.cases, after) == []
    assert [p.rel_l2 for p in after[0].parameters] == [p.rel_l2 for p in before.cases[0].parameters]
    assert after[0].accounting["seconds"] != before.cases[0].accounting["seconds"]


def test_a_difference_in_the_last_bit_is_told_with_both_values():
    old = made_up(number=0.1)
    new = made_up(number=math.nextafter(0.1, 1))
    found = differences([old], [new])
    assert "llama exact: gradient.rel_l2 was 0.1 and is 0.10000000000000002" in found
    assert len(found) == 2 * 4 + 4


def test_other_statuses_texts_and_lengths_are_told():
    rungs = made_up().rungs
    new = made_up(rungs=(Rung(name="objective", status="failed", detail="no"), *rungs[1:]))
    new = new.model_copy(update={"warnings": ("odd",), "response_lengths": (3, 1)})
    found = differences([made_up()], [new])
    assert "llama exact: rungs.0.status was proven and is failed" in found
    assert "llama exact: warnings.0 was None and is odd" in found
    assert "llama exact: response_lengths.2 was 3 and is None" in found


def test_time_may_differ_and_bytes_may_not():
    accounting = {"tokens_forwarded": 41, "seconds": 9.0, "live_bytes_peak": 8}
    found = differences([made_up()], [made_up(accounting=accounting)])
    assert found == ["llama exact: accounting.live_bytes_peak was None and is 8"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_not_finite_equals_itself(number):
    assert differences([made_up(number=number)], [made_up(number=number)]) == []
    assert differences([made_up(number=number)], [made_up(number=0.5)])


def test_another_environment_is_told():
    here = evidence.environment()
    packages = here.packages | {"torch": "1.0", "extra": "2.0"}
    there = here.model_copy(update={"threads": here.threads + 1, "packages": packages})
    assert elsewhere(here, here) == []
    assert elsewhere(there, here) == [
        "environment: packages.extra was 2.0 and is None",
        f"environment: packages.torch was 1.0 and is {here.packages['torch']}",
        f"environment: threads was {here.threads + 1} and is {here.threads}",
    ]


def test_a_receipt_with_other_cases_cannot_be_compared():
    with pytest.raises(ValueError, match="shorter"):
        differences([made_up()], [])
