from __future__ import annotations

import re

import pytest
from small_nights import entry, suite

from lsverify.errors import InputError
from lsverify.nightly_suite import Suite, read_suite, shipped

GOOD = """
seeds = 3
rotating = 1
[[entries]]
name = "one"
arch = "warm:llama"
options = { steps = 4, lr = 1e-3 }
[[entries]]
name = "two"
arch = "warm:qwen3_5"
rotates = true
"""


def written(tmp_path, text):
    file = tmp_path / "suite.toml"
    file.write_text(text)
    return file


def test_a_file_says_what_is_trained(tmp_path):
    found = read_suite(written(tmp_path, GOOD))
    assert [each.name for each in found.entries] == ["one", "two"]
    (training, *_) = found.entries[0].sweep((7,)).trainings()
    assert (training.arch, training.task, training.arm) == ("warm:llama", "recall", "full")
    assert (training.seed, training.steps, training.lr) == (7, 4, 1e-3)


def test_the_shipped_suites_are_what_the_documents_say():
    nightly = read_suite(shipped())
    assert [each.name for each in nightly.tonight(0) if not each.rotates] == [
        "llama-recall",
        "qwen3_5-recall",
    ]
    turning = {nightly.tonight(night)[-1].name for night in range(4)}
    assert turning == {each.name for each in nightly.entries if each.rotates}
    assert len(turning) == 4
    assert [each.kind for each in nightly.entries].count("drift") == 1
    for arm in ("exact", "detach", "window:8"):
        assert all(arm in each.arms for each in nightly.entries if each.kind == "comparison")
    (quick,) = read_suite(shipped("quick")).entries
    assert "exact" in quick.arms


REFUSED = [
    (GOOD.replace("steps", "stepz"), "training: no option 'stepz'; there are arch, task,"),
    (GOOD + "everynight = true\n", "no key 'entries.1.everynight'; there are name, arch, task,"),
    ("nights = 3\n" + GOOD, "no key 'nights'; there are seeds, rotating, entries"),
    (GOOD.replace('"two"', '"one"'), "two entries are named 'one': give each a name of its own"),
    (GOOD.replace('"two"', '"../two"'), "entries.1.name: String should match pattern"),
    (GOOD.replace("seeds = 3", "seeds = 1"), "seeds: Input should be greater than or equal to 2"),
    (GOOD.replace('"warm:qwen3_5"', '"warm:qwen"'), "warm start 'warm:qwen' is not known"),
    (GOOD + 'arms = ["full", "exact"]\n', "entry 'two' compares full, exact: give it full, other"),
    (GOOD + 'arms = ["full", "other_seeds", "scrambled"]\n', "and at least one more arm"),
    (GOOD + 'kind = "drift"\n', "entry 'two' is of drift: give it no arms but stale:N"),
    (GOOD + 'arms = ["full", "exacto", "other_seeds", "scrambled"]\n', "arm 'exacto' is neither"),
    ("seeds = 3\n", "entries: Field required"),
    ("seeds = \n", "cannot be read"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_a_file_that_is_no_suite_is_refused_in_one_line(tmp_path, text, message):
    with pytest.raises(InputError) as refused:
        read_suite(written(tmp_path, text))
    assert re.match(r"suite '.*suite.toml'", line := str(refused.value))
    assert message in line
    assert "\n" not in line


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"cannot be read .*: give a TOML file like .*nightly.toml"
    ):
        read_suite(tmp_path / "none.toml")


def test_two_entries_must_not_train_the_same():
    with pytest.raises(ValueError, match="entries 'one' and 'two' train the same: leave one out"):
        suite(entry("one"), entry("two", arms=("full", "detach", "other_seeds", "scrambled")))


def test_seeds_belong_together_whatever_the_order_of_arms_or_the_turn():
    assert entry().trains == entry("other", arms=entry().arms[::-1], rotates=True).trains
    assert entry().trains != entry(options={}).trains


def test_seeds_may_be_another_number():
    assert suite(seeds=2).with_seeds(9) == suite(seeds=9)
    assert suite().with_seeds(None) == suite()
    with pytest.raises(InputError, match="seeds 1 is not allowed: give 2 or more"):
        suite().with_seeds(1)


def test_all_take_their_turn_when_more_are_asked_for_than_there_are():
    wanted = Suite(seeds=2, rotating=5, entries=(entry(rotates=True),))
    assert [each.name for each in wanted.tonight(3)] == ["small"]
