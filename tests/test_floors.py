"""Floors: what rounding does to a gradient, beside what a planted fault does."""

import pytest

from lsverify.cli import run
from lsverify.floors import COLUMNS, AllFloors, Floors, cells, markdown, measure
from lsverify.whole_files import read_record


@pytest.fixture(scope="module")
def rows():
    return {row.dtype: row for row in measure("llama", ("float64", "float32", "bfloat16"))}


def test_floors_grow_with_coarseness_and_the_fault_is_above_all_limits(rows):
    exact, single, half = rows["float64"], rows["float32"], rows["bfloat16"]
    assert exact.largest < 1e-13
    assert 1e-8 < single.median < 1e-5
    assert 1e-3 < half.median < 1e-1
    for row in rows.values():
        assert row.least <= row.median <= row.ninetieth <= row.largest
        assert row.gap > 1
    assert exact.gap > single.gap > half.gap
    assert exact.fault == single.fault > 0.01


def test_limits_are_eight_floors_or_the_cap(rows):
    assert (rows["float64"].limit, rows["float64"].capped) == (1e-12, 0)
    assert rows["float32"].limit == pytest.approx(8 * rows["float32"].largest)
    assert rows["float32"].capped == 0
    assert rows["bfloat16"].limit == 0.1
    assert 0 < rows["bfloat16"].capped <= rows["bfloat16"].tensors


def test_a_precision_that_the_library_does_not_run_in_has_no_row():
    assert measure("xlstm", ("bfloat16",)) == []


def test_the_page_has_a_line_for_each_row(rows):
    page = markdown(AllFloors(rows=tuple(rows.values())), "lsverify floors --arch llama")
    lines = [line for line in page.splitlines() if line.startswith("| llama")]
    assert len(lines) == 3
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines)
    assert "`lsverify floors --arch llama`" in page


def test_the_command_writes_both_files(tmp_path, capsys):
    given = ["floors", "--arch", "llama", "--dtype", "float64", "--out", str(tmp_path)]
    assert run(given) == 0
    (row,) = read_record(AllFloors, tmp_path / "floors.json").rows
    assert isinstance(row, Floors)
    assert cells(row)[:2] == ["llama", "float64"]
    assert "| llama | float64 |" in (tmp_path / "floors.md").read_text()
    assert run(["floors", "--dtype", "half"]) == 2
    assert "dtype 'half' is not known" in capsys.readouterr().err
