from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from lsverify import benchmark
from lsverify.benchmark import (
    Report,
    Row,
    Workload,
    count_step,
    run,
    summary,
    table,
    time_step,
    write,
)
from lsverify.errors import InputError

SMALL = Workload(
    paths=("full_batched", "exact", "detach"),
    prompt_length=40,
    group_sizes=(2, 3),
    response_length=6,
    chunk=16,
    layers=2,
    width=16,
    heads=2,
    vocabulary=50,
)
LOAD = SMALL.model_dump(mode="json")
PATHS = ("full_batched", "full_serial", "exact", "detach", "window:8")


def in_this_process(target, *args):
    return getattr(benchmark, target.partition(":")[2])(*json.loads(json.dumps(args)))


@pytest.fixture(scope="module")
def report():
    patch = pytest.MonkeyPatch()
    patch.setattr(benchmark, "in_fresh_process", in_this_process)
    announced = []
    measured = run(SMALL, announced.append)
    patch.undo()
    assert len(announced) == 6
    return measured


@pytest.mark.parametrize("path", PATHS)
def test_tokens_forwarded_are_counted_against_the_ideal(path):
    timed, ideal = time_step(LOAD, path, 3), SMALL.ideal(path, 3)
    # A batch may carry the last token of each row along.
    extra = timed["tokens_forwarded"] - ideal.tokens
    assert 0 <= extra <= (3 if path == "full_batched" else 0)
    assert timed["tokens_forwarded_grad"] == ideal.tokens_grad + extra


def test_phases_make_up_the_time():
    timed = time_step(LOAD, "exact", 2)
    assert list(timed["phase_seconds"]) == ["prepare", "capture", "replay", "sweep"]
    assert timed["seconds"] == pytest.approx(sum(timed["phase_seconds"].values()))
    assert list(time_step(LOAD, "full_batched", 2)["phase_seconds"]) == ["prepare", "whole"]


def test_live_bytes_repeat_and_end_with_the_gradients():
    counted = count_step(LOAD, "exact", 3)
    assert counted == count_step(LOAD, "exact", 3)
    gradients = sum(p.nbytes for p in SMALL.model().parameters())
    assert gradients <= counted["live_bytes_left"] < counted["live_bytes_peak"]


def test_the_report_compares_with_full_batched_and_between_group_sizes(report):
    exact, full = report.row("exact", 3), report.row("full_batched", 3)
    against = report.against_full_batched(exact)
    assert against["live"] == full.live_bytes_peak / exact.live_bytes_peak > 1
    assert against["speed"] == full.seconds / exact.seconds
    small = report.row("exact", 2)
    assert report.growth("exact") == exact.live_bytes_peak / small.live_bytes_peak - 1
    assert report.growth("full_batched") > 0.3
    assert min(report.times_ideal(row) for row in report.rows) == 1.0


def test_without_full_batched_or_a_second_size_nothing_is_claimed(report):
    alone = report.model_copy(
        update={
            "rows": (report.row("exact", 2),),
            "workload": SMALL.model_copy(update={"group_sizes": (2,), "paths": ("exact",)}),
        }
    )
    assert set(alone.against_full_batched(alone.rows[0]).values()) == {None}
    assert alone.growth("exact") is None
    assert summary(alone) == ["exact, 2 responses:"]


def test_the_table_and_the_summary_show_every_row(report):
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(report))
    shown = console.export_text()
    for path in SMALL.paths:
        assert shown.count(path) == 2
    lines = summary(report)
    assert [line.split(",")[0] for line in lines] == ["exact", "detach"]
    assert "times full batched's speed at 1/" in lines[0]
    assert "from 2 responses to 3" in lines[0]


def test_what_was_not_measured_is_said(report):
    blind = report.rows[0].model_copy(update={"resident_baseline": None, "resident_peak": None})
    console = Console(width=200, record=True, file=StringIO())
    console.print(table(report.model_copy(update={"rows": (blind,)})))
    assert "not measured" in console.export_text()


def test_the_report_survives_its_file(report, tmp_path):
    write(report, tmp_path / "benchmark.json")
    assert Report.model_validate_json((tmp_path / "benchmark.json").read_text()) == report
    assert [file.name for file in tmp_path.iterdir()] == ["benchmark.json"]


def test_a_row_knows_extra_tokens(report):
    row: Row = report.rows[0]
    assert row.model_copy(update={"tokens_forwarded": 2 * row.ideal_tokens}).tokens_ratio == 2.0


def test_a_real_run_uses_fresh_processes():
    measured = run(SMALL.model_copy(update={"paths": ("detach",), "group_sizes": (2,)}))
    assert measured.rows[0].live_bytes_peak == count_step(LOAD, "detach", 2)["live_bytes_peak"]


def test_an_unknown_path_is_refused_before_anything_runs():
    with pytest.raises(InputError, match="policy 'fast' is not known"):
        run(SMALL.model_copy(update={"paths": ("exact", "fast")}))
