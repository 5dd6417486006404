import itertools

import pytest
from small_trainings import curve_of, shorter_test

from lsverify.stale_drift import Drift, drift_table


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorter_test(monkeypatch)


def drifts(folder, refresh, **options):
    options = {"steps_per_rollout": 4, "compare_every": 0, "test_every": 4} | options
    return curve_of(folder / f"{refresh}", arm=f"stale:{refresh}", **options).steps


def test_a_state_drifts_further_with_every_step_it_outlives(tmp_path):
    rows = drifts(tmp_path, 4)
    assert [row.drift.age for row in rows] == [1, 2, 3, 4]
    found = [row.drift.log_prob for row in rows]
    assert 1e-3 < found[0] < min(found[1:])


def test_what_is_kept_is_what_the_next_step_trains_on(tmp_path):
    rows = drifts(tmp_path, 4)
    for row, following in itertools.pairwise(rows):
        # The same rollout, weights and state, through the step itself.
        assert row.drift.loss_kept == pytest.approx(following.loss, abs=1e-12)
        assert abs(row.drift.loss_fresh - following.loss) > 1e-6


def test_a_fresh_capture_is_what_a_shorter_interval_trains_on(tmp_path):
    rows = drifts(tmp_path, 2)
    assert [row.drift.age for row in rows] == [1, 2, 1, 2]
    assert rows[1].drift.loss_fresh == pytest.approx(rows[2].loss, abs=1e-12)
    assert abs(rows[1].drift.loss_kept - rows[2].loss) > 1e-6


def test_without_an_update_nothing_drifts(tmp_path):
    assert max(row.drift.log_prob for row in drifts(tmp_path, 4, lr=1e-16)) < 1e-10


def test_arms_that_keep_nothing_have_no_drift(tmp_path):
    assert {row.drift for row in curve_of(tmp_path, arm="detach", steps=2).steps} == {None}


def test_the_table_averages_captures_of_one_interval_and_age():
    def drift(age, log_prob, kept, fresh):
        return Drift(age=age, log_prob=log_prob, loss_kept=kept, loss_fresh=fresh)

    rows = drift_table(
        [
            (2, drift(1, 0.1, 1.0, 2.0)),
            (1, drift(1, 0.5, 0.0, 0.0)),
            (2, drift(1, 0.3, -3.0, -2.0)),
            (2, drift(2, 0.4, 1.0, 1.0)),
        ]
    )
    assert [(row.refresh, row.age, row.captures) for row in rows] == [
        (1, 1, 1),
        (2, 1, 2),
        (2, 2, 1),
    ]
    assert [row.log_prob for row in rows] == pytest.approx([0.5, 0.2, 0.4])
    assert rows[0].loss_difference is None
    # |1 - 2| + |-3 + 2| over |2| + |-2|
    assert rows[1].loss_difference == pytest.approx(0.5)
    assert rows[2].loss_difference == 0
