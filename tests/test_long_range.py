import numpy as np
import pytest
from scipy import stats
from small_trainings import curve_of, shorter_test, small

from lsverify import convergence
from lsverify.convergence import trained_policy
from lsverify.courses import course_of
from lsverify.curves import Cell, Curve, LongRangeRow, TestRow, read_curve
from lsverify.distance_bias import bias_by_distance
from lsverify.errors import InputError
from lsverify.long_range import by_distance, distance_of, gaps, table
from lsverify.tasks import KINDS

FAR = {"long_range": (24, 60), "long_range_prompts": 3, "steps": 2, "compare_every": 0}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorter_test(monkeypatch)


@pytest.mark.parametrize("kind", [*KINDS])
def test_thirds_hold_tasks_of_their_distance(kind):
    for length in (30, 90):
        found = by_distance(course_of("warm:llama", kind), length, 4)
        assert list(found) == sorted(found)
        for (above, upto), tasks in found.items():
            assert 0 < len(tasks) <= 4
            assert {len(task.prompt) for task in tasks} == {length}
            assert all(above < distance_of(task) <= upto for task in tasks)
    if kind in ("recall", "needle", "copy_edited"):
        assert [len(tasks) for tasks in found.values()] == [4, 4, 4]


def test_tasks_far_back_are_none_of_a_training_or_of_the_test():
    course = course_of("warm:llama", "recall")
    far = {task.prompt for task in course.at(24, 50)}
    seen = {task.prompt for turn in range(9) for task in course.tasks(0, turn, 8)}
    assert not far & (seen | {task.prompt for task in course.test})
    assert len(course.at(24, 50)) == len(far)


def test_a_window_of_a_recipe_bounds_the_distances():
    found = by_distance(course_of("warm:mistral", "recall"), 60, 4)
    assert max(upto for _, upto in found) <= 16


def test_the_first_and_the_last_test_have_rows_and_nothing_else_moves(tmp_path):
    with_rows = curve_of(tmp_path / "with", **FAR)
    without = curve_of(tmp_path / "without", steps=2, compare_every=0)
    assert [row.step for row in with_rows.long_range] == [0, 2]
    rest = [row for row in with_rows.repeatable() if row["kind"] != "long_range"]
    assert rest == without.repeatable()
    assert read_curve(tmp_path / "with") == with_rows
    assert with_rows.reaches(2)
    cells = with_rows.long_range[0].cells
    assert {cell.length for cell in cells} == {24, 60}
    assert {len(cell.rewards) for cell in cells} == {3}
    again = curve_of(tmp_path / "again", arm="detach", **FAR)
    assert again.long_range[0] == with_rows.long_range[0]


def curve(start, end):
    """Of a training whose cells have these mean rewards."""
    rows = [
        LongRangeRow(
            step=step,
            cells=tuple(
                Cell(length=24, above=above, upto=above + 8, rewards=(value - 0.1, value + 0.1))
                for above, value in zip((0, 8), values, strict=True)
            ),
        )
        for step, values in ((0, start), (4, end))
    ]
    return Curve((*rows, TestRow(step=4, rewards=(0.5,))))


def test_gaps_are_paired_by_seed():
    full = [(0.6, 0.5), (0.7, 0.6), (0.8, 0.4)]
    detach = [(0.6, 0.3), (0.6, 0.3), (0.8, 0.2)]
    curves = {
        small(arm=arm, seed=seed): curve((0.2, 0.1), end)
        for arm, ends in (("full", full), ("detach", detach))
        for seed, end in enumerate(ends)
    }
    found = gaps(curves, alpha=0.05)
    assert [(row.arm, row.above, row.upto) for row in found] == [
        ("full", 0, 8),
        ("full", 8, 16),
        ("detach", 0, 8),
        ("detach", 8, 16),
    ]
    far = found[3]
    apart = np.array([-0.2, -0.3, -0.2])
    assert (far.seeds, far.start) == (3, pytest.approx(0.1))
    assert far.gap == pytest.approx(apart.mean())
    expected = stats.t.interval(0.9, 2, loc=apart.mean(), scale=stats.sem(apart))
    assert far.interval == pytest.approx(expected)
    assert found[0].gap == 0
    assert "| warm:llama | recall | detach | 24 | 9 to 16 | 3 | 0.100 | 0.267 | -0.233 (" in table(
        found
    )
    one = {training: each for training, each in curves.items() if training.seed == 0}
    assert gaps(one)[3].interval is None
    del curves[small(arm="full", seed=2)]
    with pytest.raises(InputError, match="arm 'detach' has seed 2, its reference has not"):
        gaps(curves)


def test_a_length_without_tasks_is_refused(tmp_path):
    own = course_of("warm:llama", "recall")

    class Empty:
        def at(self, length, number):
            return []

    assert by_distance(own, 24, 1)
    with pytest.raises(InputError, match="long_range 24: there are no tasks of this prompt length"):
        by_distance(Empty(), 24, 1)


def test_bias_lies_at_the_distances_that_a_window_leaves_out():
    training = small(responses=8)
    arms = ("exact", "window:12", "detach")
    found = bias_by_distance(training, arms, (24, 40), problems=2)
    by_arm = {arm: [row for row in found if row.arm == arm] for arm in arms}
    assert {len(rows) for rows in by_arm.values()} == {6}
    assert {row.problems for row in found} == {2}
    assert max(row.rel_l2 for row in by_arm["exact"]) < 1e-12
    assert min(row.cosine for row in by_arm["exact"]) > 1 - 1e-12
    assert min(row.rel_l2 for row in by_arm["detach"]) > 0.05
    with pytest.raises(InputError, match="problems 0 is not allowed"):
        bias_by_distance(training, arms, (24,), problems=0)


def test_bias_of_a_trained_policy_is_that_of_its_folder(tmp_path):
    training = small(steps=2, compare_every=0, lr=1e-2)
    with pytest.raises(InputError, match="has no checkpoint: train there first"):
        bias_by_distance(training, ("detach",), (24,), problems=1, folder=tmp_path)
    convergence.train(training, tmp_path)
    (at_start, *_), (after, *_) = (
        bias_by_distance(training, ("detach",), (24,), problems=1, folder=folder)
        for folder in (None, tmp_path)
    )
    assert at_start.rel_l2 != after.rel_l2
    with trained_policy(training, tmp_path) as model, trained_policy(training, None) as start:
        names = dict(start.named_parameters())
        assert all(not p.equal(names[name]) for name, p in model.named_parameters())
