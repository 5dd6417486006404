from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from judged import judged, made_up, receipt_of
from pydantic import ValidationError

from lsverify import evidence
from lsverify.errors import InputError
from lsverify.evidence import CaseConfig, Receipt, Rung

PUBLISHED = Path(__file__).parent.parent / "docs" / "receipt.schema.json"
TOP = ["schema_version", "environment", "command", "cases"]
CASE = """arch policy candidate reference dtype prompt_length group_size response_lengths objective seed rungs
    gradient bias parameters accounting""".split()
DISTANCE = ["rel_l2", "cosine", "norm_ratio", "worst_parameter", "worst_rel_l2"]


@pytest.fixture(scope="module")
def real():
    return receipt_of(judged(policy="exact"), judged(candidate="raises"), judged(policy="detach"))


def test_a_receipt_has_the_fields_that_are_promised(real):
    written = json.loads(evidence.as_json(real))
    assert list(written) == TOP
    assert written["schema_version"] == 1
    case = written["cases"][0]
    assert set(CASE) <= set(case)
    assert list(case["gradient"]) == list(case["bias"]) == DISTANCE
    assert [list(rung) for rung in case["rungs"]] == [
        ["name", "status", "measure", "limit", "detail"]
    ] * 5
    assert [rung["name"] for rung in case["rungs"]] == list(evidence.RUNGS)
    assert case["response_lengths"] == [3, 1, 3]
    assert case["dtype"] == "float64"
    names = {parameter["name"] for parameter in case["parameters"]}
    assert case["gradient"]["worst_parameter"] in names


def test_a_receipt_names_versions_threads_and_platform(real):
    found = json.loads(evidence.as_json(real))["environment"]
    assert {"python", "platform", "threads", "deterministic", "packages"} == set(found)
    assert {"torch", "transformers", "numpy", "pytest"} <= set(found["packages"])


def test_a_package_that_is_not_installed_is_left_out():
    assert dict(evidence._versions(["torch", "no-such-package"])).keys() == {"torch"}


def test_the_published_schema_is_what_the_command_prints():
    assert json.loads(PUBLISHED.read_text(encoding="utf-8")) == evidence.schema()


def test_receipts_fit_the_published_schema(real):
    schema = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    odd = made_up(measure=math.nan, number=math.inf)
    for receipt in (real, receipt_of(odd), receipt_of()):
        jsonschema.validate(json.loads(evidence.as_json(receipt)), schema)


@pytest.mark.parametrize("missing", TOP)
def test_the_schema_refuses_a_receipt_that_lacks_a_field(missing):
    written = json.loads(evidence.as_json(receipt_of(made_up())))
    del written[missing]
    with pytest.raises(jsonschema.ValidationError, match=missing):
        jsonschema.validate(written, evidence.schema())


@pytest.mark.parametrize("missing", [*CASE, "config"])
def test_the_schema_refuses_a_case_that_lacks_a_field(missing):
    written = json.loads(evidence.as_json(receipt_of(made_up())))
    del written["cases"][0][missing]
    with pytest.raises(jsonschema.ValidationError, match=missing):
        jsonschema.validate(written, evidence.schema())


def test_the_schema_refuses_other_fields_and_statuses():
    for field, value in (("verdict", "fine"), ("status", "passed")):
        written = json.loads(evidence.as_json(receipt_of(made_up())))
        written["cases"][0]["rungs"][0][field] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(written, evidence.schema())


@given(st.floats(), st.floats())
def test_every_number_survives_to_the_last_bit(measure, number):
    before = receipt_of(made_up(measure=measure, number=number))
    text = evidence.as_json(before)
    json.loads(text, parse_constant=pytest.fail)
    after = Receipt.model_validate_json(text).cases[0]
    for old, new in (
        (measure, after.rungs[0].measure),
        (number, after.bias.rel_l2),
        (number, after.parameters[0].slices["q"]),
    ):
        assert old.hex() == new.hex()


def test_saving_and_loading_gives_the_same_receipt(tmp_path, real):
    evidence.save(real, tmp_path / "deep" / "receipt.json")
    assert evidence.load(tmp_path / "deep" / "receipt.json") == real
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["receipt.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "receipt.json"
    evidence.save(receipt_of(made_up()), path)
    before = path.read_text()

    def full_disk(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(InputError, match=r"No space left on device.*choose another --out"):
        evidence.save(receipt_of(), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path):
    evidence.check_folder(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match=r"cannot be written to .*: choose another folder"):
            evidence.check_folder(folder)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "not valid at the file"),
        (b"\xff\xfe", "cannot be read"),
        (b"{}", "not valid at environment"),
        (b'{"schema_version": 2}', "not valid at schema_version: Input should be 1"),
    ],
)
def test_what_is_no_receipt_is_refused_in_one_line(tmp_path, content, told):
    path = tmp_path / "receipt.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=told) as caught:
        evidence.load(path)
    assert "\n" not in str(caught.value)
    assert "give a receipt.json" in str(caught.value)


def test_a_receipt_with_a_changed_case_is_refused(tmp_path):
    for field, value in (("require", "learning"), ("response_lengths", []), ("seed", -1)):
        written = json.loads(evidence.as_json(receipt_of(made_up())))
        written["cases"][0]["config"][field] = value
        path = tmp_path / "receipt.json"
        path.write_text(json.dumps(written))
        with pytest.raises(InputError, match=f"not valid at cases.0.config.{field}"):
            evidence.load(path)


HOLDING = ["proven", "proven_zero", "not_applicable", "derived", "undecidable"]
REFUSING = ["failed", "vacuous", "nondeterministic", "reference_inconsistent", "error", "not_run"]


@pytest.mark.parametrize("status", HOLDING)
def test_statuses_that_hold(status):
    assert Rung(name="gradient", status=status).holds
    assert made_up(status=status).reached


@pytest.mark.parametrize("status", REFUSING)
def test_statuses_that_do_not(status):
    assert not Rung(name="gradient", status=status).holds
    assert not made_up(status=status).reached


def test_these_are_all_statuses():
    with pytest.raises(ValidationError) as caught:
        Rung(name="gradient", status="passed")
    allowed = caught.value.errors()[0]["ctx"]["expected"]
    assert all(f"'{status}'" in allowed for status in HOLDING + REFUSING)
    assert allowed.count("'") == 2 * len(HOLDING + REFUSING)


def test_a_rung_above_what_is_required_does_not_count_and_a_missing_one_does():
    config = CaseConfig(arch="llama", policy="exact", require="forward")
    rungs = made_up().rungs
    worse = Rung(name="gradient", status="failed")
    assert made_up(config=config, rungs=(*rungs[:3], worse)).reached
    assert not made_up(config=config, rungs=rungs[:2]).reached
    assert not made_up(config=config, rungs=()).reached


def test_nothing_run_is_not_a_success():
    assert evidence.exit_code([]) == 1
    assert evidence.exit_code([made_up()]) == 0
    assert evidence.exit_code([made_up(), made_up(status="vacuous")]) == 1


def test_records_are_frozen_and_closed():
    rung = Rung(name="gradient", status="failed")
    with pytest.raises(ValidationError, match="frozen"):
        rung.status = "proven"
    with pytest.raises(ValidationError, match="Extra inputs"):
        Rung(name="gradient", status="failed", verdict="fine")
    with pytest.raises(ValidationError, match="Input should be 'objective'"):
        Rung(name="gradients", status="failed")


def test_numbers_that_are_not_finite_become_words_wherever_they_are():
    nested = {"a": [math.nan, (math.inf, -math.inf)], "b": 1e-300, "c": "NaN", "d": None, "e": 3}
    assert evidence.finite(nested) == {
        "a": ["NaN", ["Infinity", "-Infinity"]],
        "b": 1e-300,
        "c": "NaN",
        "d": None,
        "e": 3,
    }
