from __future__ import annotations

import re
from xml.etree import ElementTree

import demonstration_night
import numpy as np
import pytest
from looked_at import browser, faults, laid_out
from scipy import stats
from small_nights import ENDS, curve, entry, made_up, spend, suite

from lsverify import nightly_page, nightly_plots, nightly_summary, nightly_tables, pages
from lsverify.ablation_records import Ablation
from lsverify.cli import run
from lsverify.curves import Curve
from lsverify.errors import InputError
from lsverify.nightly_page import PAGE, read_night, write_page
from lsverify.sweeps import folder_of
from lsverify.whole_files import write_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield demonstration_night.make(tmp_path_factory.mktemp("night"), patch)


@pytest.fixture(scope="module")
def page(folder):
    return write_page(folder).read_text()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A night of one entry without anything beside it."""
    made_up(monkeypatch)
    spend(tmp_path / "out", suite(seeds=2))
    return tmp_path / "out"


def cells(page, first):
    """The rows of all tables that begin with this cell."""
    rows = re.findall(rf'<tr><th scope="row">{re.escape(first)}</th>(.*?)</tr>', page)
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in rows]


def test_the_page_stands_alone_and_every_plot_is_labelled(page):
    assert faults(page) == []
    labels = re.findall(r'<svg [^>]*aria-label="([^"]*)"', page)
    assert len(labels) > 40
    assert all(len(label) > 20 for label in labels)


FAULTY = {
    "<img> without alt text": ("</nav>", '</nav><img src="data:,">'),
    "<svg> without a label": ('role="img"', ""),
    "<img> refers to plot.png": ("</nav>", '</nav><img alt="a plot" src="plot.png">'),
    "<script> in a page that stands alone": ("</nav>", "</nav><script></script>"),
    "an address in the page": ("</nav>", "</nav>https://example.org"),
    "</section> closes nothing that is open": ("</table>", ""),
    "#curves is nowhere": ('id="curves"', ""),
    "id bias is given 2 times": ('id="curves"', 'id="bias"'),
    "a stand-in colour is left": ("var(--hue0)", "#0a0010"),
    "no prefers-color-scheme: dark": ("prefers-color-scheme", "prefers-contrast"),
    "no @media print": ("@media print", "@media speech"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_what_looks_at_pages_sees_faults(page, fault):
    old, new = FAULTY[fault]
    assert old in page
    assert fault in faults(page.replace(old, new, 1))


def test_the_page_fits_a_phone_and_a_desk_light_and_dark(page, tmp_path):
    """Without a browser what makes it fit is looked for in its style sheet."""
    if browser() is None:
        style = page.partition("</style>")[0]
        for rule in ("svg { display: block; width: 100%", ".table { overflow-x: auto", "min(100%,"):
            assert rule in style
        return
    assert laid_out(page, tmp_path) == []
    wide = page.replace("</nav>", '</nav><div style="width: 600px">wide</div>')
    lightless = wide.replace("prefers-color-scheme: dark", "prefers-color-scheme: no")
    found = laid_out(lightless, tmp_path)
    assert len([line for line in found if "px on a screen of 390" in line]) == 2
    assert found[-1].startswith("colours are")


def test_verdicts_come_first_in_points(folder, page):
    record = read_night(folder)
    assert page.index("Verdicts</h2>") < page.index("The ladder") < page.index("Curves</h2>")
    (verdict,) = [v for v in record.entries[0].comparison.arms if v.arm == "detach"]
    stands, gap, tonight, reward, *_ = cells(page, "detach")[0]
    assert gap.split(" ")[0] == f"{100 * verdict.gap:+.1f}"
    assert f"({100 * verdict.interval[0]:+.1f} to" in gap
    assert (stands, tonight) == (record.entries[0].standing["detach"], verdict.decision)
    assert reward == f"{100 * verdict.reward:.1f}"
    assert '<td class="different">different</td>' in page


def test_every_part_that_the_folder_has_is_there(page):
    for words in (
        "4 of 5 cases reached their claim",
        "Test reward (points) after so many optimizer steps",
        "interquartile mean",
        "Rank correlation of bias and lost reward over arms",
        "Over all entries and arms: rho",
        "Gap (points) by distance of the evidence",
        "Gap (points) by length of the prompt",
        "steps a capture serves",
        "tokens per second",
        "lsverify nightly --out lsverify-nightly",
        "How much of what detach loses lies within so many tokens",
        "warm:qwen3_5, prompt of 24 tokens: by layer",
    ):
        assert words in page
    assert '<td style="--share: 0.56">0.56</td>' in page


def test_it_says_what_is_not_there(small):
    page = write_page(small).read_text()
    assert faults(page) == []
    for words in ("The ladder", "Where the bias falls", "How much of what detach loses"):
        assert words not in page
    assert "No arm of this night keeps a state over optimizer steps." in page
    record = read_night(small)
    for training in record.entries[0].curves(small):
        write_whole(small / record.entries[0].folder / folder_of(training) / "curve.jsonl", "")
    assert "The folder holds no whole curve of this entry." in write_page(small).read_text()


def test_the_same_folder_makes_the_same_page(small):
    assert write_page(small).read_bytes() == write_page(small).read_bytes()


def test_bands_are_t_intervals_over_seeds():
    values = np.random.default_rng(0).normal(size=(5, 3))
    mean, half = nightly_plots.band(values)
    low, high = stats.t.interval(0.95, 4, values.mean(0), stats.sem(values))
    np.testing.assert_allclose([mean - half, mean + half], [low, high], rtol=1e-12)
    values[1:, 0] = values[:, 1] = np.nan
    mean, half = nightly_plots.band(values)
    assert mean[0] == values[0, 0]
    assert np.isnan(mean[1])
    assert list(np.isnan(half)) == [True, True, False]


def test_an_axis_shows_the_means_and_no_more_of_wide_bands():
    narrow, wide = np.array([[1.0, 3.0], [1.2, 3.2]]), np.array([[2.0, 2.0], [-90.0, 94.0]])
    low, high = nightly_plots._reach([narrow])
    assert -0.3 < low < 0 < 3.2 < high < 4.6
    low, high = nightly_plots._reach([wide])
    assert (low, high) == (-44 - 92 - 4.6, 48 + 92 + 4.6)
    assert np.isfinite(nightly_plots._reach([np.zeros((1, 3))])).all()


def test_steps_are_averaged_in_blocks(monkeypatch):
    monkeypatch.setattr(nightly_plots, "BLOCKS", 2)
    training = entry().sweep((0,)).trainings()[0]
    rows = [row.model_copy(update={"reward": float(row.step)}) for row in curve(training).steps]
    middles, values = nightly_plots.stepped({"full": [Curve(tuple(rows))]}, lambda row: row.reward)
    assert [row.step for row in rows] == [1, 2, 3, 4]
    assert middles.tolist() == [1.5, 3.5] == values["full"][0].tolist()
    _, values = nightly_plots.stepped({"full": [Curve(tuple(rows))]}, lambda row: None)
    assert np.isnan(values["full"]).all()


def test_an_arm_looks_the_same_everywhere():
    arms = ["full", "exact", "window:8", "kinds:recurrent", "other_seeds", "scrambled", "stale:8"]
    seen = nightly_plots.looks(arms)
    assert len({(look.colour, look.marker) for look in seen.values()}) == len(seen)
    assert {arm for arm, look in seen.items() if look.dashed} == {"other_seeds", "scrambled"}
    assert {look.colour for look in seen.values()} <= set(pages.VARIABLES)


def test_colours_stand_out_on_both_backgrounds():
    """At least 3 to 1, what graphics need (WCAG 2.2, 1.4.11); words 4.5 to 1."""
    style = (pages.FOLDER / "page.html").read_text()
    for scheme in re.findall(r":root \{(.*?)\}", style, flags=re.DOTALL):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", scheme))
        assert len(colours) == 17
        for name, colour in colours.items():
            if name not in ("paper", "panel", "grid", "heat"):
                least = 3 if name.startswith("hue") else 4.5
                assert _contrast(colour, colours["paper"]) >= least, name


def _contrast(one, other):
    def luminance(colour):
        parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_bias_that_does_not_exist_is_a_dash_in_the_heat_map():
    ablation = demonstration_night.ablation()
    row = ablation.rows[0]
    none = {
        name: group.model_copy(update={"rel_l2": None}) for name, group in row.per_layer.items()
    }
    changed = Ablation(**{**dict(ablation), "rows": (row.model_copy(update={"per_layer": none}),)})
    ((layers, kinds),) = nightly_page._heat(changed)
    assert {cell for _, found in layers["rows"] for cell in found} == {("-", 0.0)}
    assert layers["headers"] == ["0", "1", "2", "3", "outside layers"]
    assert kinds["rows"][0][1][0] == ("1.3e-15", 0.0)


def test_markdown_has_the_verdicts(folder):
    text = nightly_summary.markdown(read_night(folder))
    assert text.startswith("### lsverify: night 1 holds\n")
    assert "| arm | stands | gap (points) |" in text
    assert "- llama-recall: exact equivalent; detach different" in text
    assert "    lsverify nightly --out lsverify-nightly" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({line.count(" | ") for line in block.splitlines()}) == 1


def test_a_void_night_fails_in_every_form(tmp_path, monkeypatch):
    made_up(monkeypatch, lambda training: curve(training, ENDS | {"full": 0.4}))
    spend(tmp_path, suite(seeds=2))
    record = read_night(tmp_path)
    (found,) = ElementTree.fromstring(nightly_summary.junit(record))
    assert (found.get("tests"), found.get("failures"), found.get("skipped")) == ("3", "1", "2")
    assert "void: the reference is not better" in found.find("testcase/failure").text
    assert nightly_summary.junit(record).startswith("<?xml version='1.0' encoding='utf-8'?>")
    assert "night 1 fails" in nightly_summary.markdown(record)
    assert "**small: void:" in nightly_summary.markdown(record)
    page = write_page(tmp_path).read_text()
    assert "The night fails:" in page
    assert "small: void, nothing is concluded." in page


def test_junit_has_the_arms_verdicts(folder):
    first, _, stale = ElementTree.fromstring(nightly_summary.junit(read_night(folder)))
    assert (first.get("name"), first.get("tests"), first.get("failures")) == (
        "llama-recall",
        "4",
        "0",
    )
    assert [case.get("name") for case in first] == ["holds", "exact", "detach", "window:8"]
    assert (
        first[2].find("system-out").text.startswith("stands: different; tonight: different; gap -")
    )
    assert [case.get("name") for case in stale] == ["holds"]


def test_seeds_are_told_in_ranges():
    assert nightly_tables.ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_the_command_writes_the_page_or_prints_markdown(small, tmp_path, capsys):
    assert run(["report", str(small), "--markdown", "--junit", str(tmp_path / "junit.xml")]) == 0
    assert capsys.readouterr().out == nightly_summary.markdown(read_night(small))
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().tag == "testsuites"
    assert not (small / PAGE).exists()
    assert run(["report", str(small)]) == 0
    assert capsys.readouterr().out == f"{small / PAGE}\n"
    assert (small / PAGE).read_text().startswith("<!doctype html>")


def test_bad_input_is_one_line(small, tmp_path, monkeypatch, capsys):
    for arguments, line in (
        ([str(tmp_path)], f"folder {str(tmp_path)!r} has no nightly.json: give one that"),
        ([str(small), "--junit", str(tmp_path / "no" / "junit.xml")], "is not a file in a folder"),
    ):
        assert run(["report", *arguments]) == 2
        told = capsys.readouterr().err
        assert line in told
        assert len(told.splitlines()) == 1
    monkeypatch.setattr(pages, "PACKAGES", ("jinja2", "no_such_package"))
    with pytest.raises(InputError, match="no_such_package is missing: pip install"):
        write_page(small)
