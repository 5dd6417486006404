from __future__ import annotations

import io
import math

import pytest
from judged import judged, made_up
from rich.console import Console

from lsverify import report
from lsverify.evidence import RUNGS, CaseConfig, Rung


def shown(*cases):
    printed = io.StringIO()
    report.show(cases, Console(width=240, file=printed))
    return printed.getvalue()


def test_the_table_shows_reference_statuses_distance_and_bias():
    cells = dict(zip(report.HEADERS, report.row(judged(policy="detach")), strict=True))
    assert cells["architecture"] == "llama"
    assert cells["policy"] == "detach"
    assert cells["reference"] == "stopped at B"
    assert [cells[name.replace("_", " ")] for name in RUNGS] == ["proven"] * 5
    assert float(cells["rel L2"]) < 1e-12
    assert 0.1 < float(cells["bias rel L2"]) < 1
    assert 0.5 < float(cells["cosine"]) < 0.999
    assert cells["ours / paper"] == "pass / fail"
    assert not cells["worst parameter"].startswith("model.layers.")


def test_a_case_without_gradients_has_dashes():
    cells = dict(zip(report.HEADERS, report.row(judged(candidate="raises")), strict=True))
    assert cells["policy"] == "candidates:raises"
    assert cells["execution"] == "error"
    assert [cells[name] for name in ("rel L2", "worst parameter", "bias rel L2", "cosine")] == [
        "-"
    ] * 4
    assert cells["ours / paper"] == "FAIL / -"


def test_a_rung_that_is_not_in_the_receipt_was_not_run():
    row = report.row(made_up(rungs=()))
    assert row[3:8] == ["not_run"] * 5


def test_a_bias_without_cosine_keeps_its_distance():
    case = made_up()
    bias = case.bias.model_copy(update={"cosine": None, "norm_ratio": None})
    assert report.row(case.model_copy(update={"bias": bias}))[-4:-1] == ["0.1", "-", "-"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (1.23e-15, "1.2e-15"),
        (-1.23e-15, "-1.2e-15"),
        (0.56345, "0.563"),
        (12345.0, "1.23e+04"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_numbers_are_short(value, text):
    assert report.number(value) == text


def test_names_lose_what_all_of_them_share():
    assert (
        report.short("base_model.model.model.layers.3.mlp.up_proj.weight") == "3.mlp.up_proj.weight"
    )
    assert report.short(None) == "-"


def test_markdown_has_one_line_for_each_case():
    lines = report.markdown([made_up(), made_up(status="failed")]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "pass / pass" in lines[2]
    assert "FAIL / pass" in lines[3]


def test_failures_are_told_in_words_and_counted():
    text = shown(made_up(), judged(candidate="drops_a_gradient"))
    assert "llama candidates:drops_a_gradient: gradient failed" in text
    assert "model.norm.weight: no gradient" in text
    assert "1 of 2 cases reached their claim" in text


def test_a_rung_that_was_not_asked_for_is_no_failure():
    config = CaseConfig(arch="llama", policy="exact", require="execution")
    rungs = [Rung(name=name, status="proven") for name in RUNGS[:2]]
    rungs += [Rung(name=name, status="not_run") for name in RUNGS[2:]]
    assert report.failures([made_up(config=config, rungs=tuple(rungs))]) == []


def test_text_of_others_is_never_read_as_markup():
    odd = "shape [2, 3] [/bold] [red]"
    rungs = (Rung(name="objective", status="error", detail=odd),)
    case = made_up(rungs=rungs).model_copy(update={"warnings": (odd,), "arch": "/tmp/[red]"})
    text = shown(case)
    assert text.count(odd) == 2
    assert "/tmp/[red] exact: objective error" in text


def test_a_warning_of_several_cases_is_told_once():
    case = made_up().model_copy(update={"warnings": ("odd",)})
    assert shown(case, case).count("warning odd") == 1


def test_the_table_is_not_folded_where_nobody_looks(capsys):
    report.wide_console().print(report.table([judged(policy="detach")]))
    report.wide_console(stderr=True).print("to the other side")
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5
    assert printed.err == "to the other side\n"


def test_a_terminal_keeps_its_own_width(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "77")
    assert report.wide_console().width == 77
