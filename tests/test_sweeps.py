from __future__ import annotations

import sys

import pytest
from small_trainings import SMALL, cluster_of_one, curve_of, shorter_test, small

from lsverify import sweeps
from lsverify.curves import Curve, TestRow, read_curve
from lsverify.errors import InputError, TrainingBroke
from lsverify.sweeps import Sweep, folder_of, run

TINY = SMALL | {"steps": 2, "compare_every": 0}


def sweep(**fields):
    axes = {"archs": ("warm:llama",), "tasks": ("recall",), "arms": ("full",), "seeds": (0,)}
    return Sweep(**{**axes, "options": TINY, **fields})


@pytest.fixture
def ray(monkeypatch):
    shorter_test(monkeypatch)
    return cluster_of_one(monkeypatch)


def test_a_sweep_is_every_combination_each_in_a_folder_of_its_own():
    arms = ("full", "exact", "layers:0,2-3", "window:8+kinds:attention")
    trainings = sweep(arms=arms, seeds=(3, 1), tasks=("recall", "needle")).trainings()
    assert len(trainings) == 16
    assert len({folder_of(each) for each in trainings}) == 16
    assert folder_of(trainings[0]) == "warm-llama/recall/full/seed3"
    assert [(each.task, each.arm, each.seed) for each in trainings[:3]] == [
        ("recall", "full", 3),
        ("recall", "full", 1),
        ("recall", "exact", 3),
    ]
    assert {each.steps for each in trainings} == {2}


def test_processes_train_what_this_process_would(tmp_path):
    seen = []
    wanted = sweep(arms=("full", "detach"))
    found = run(wanted, tmp_path / "sweep", processes=1, progress=seen.append)
    assert list(found) == wanted.trainings()
    here = {arm: curve_of(tmp_path / arm, **TINY, arm=arm) for arm in wanted.arms}
    assert {each.arm: curve.repeatable() for each, curve in found.items()} == {
        arm: curve.repeatable() for arm, curve in here.items()
    }
    assert (seen[0].done, seen[0].left) == (0, None)
    assert (seen[-1].done, seen[-1].steps, seen[-1].left) == (4, 4, 0)
    assert (seen[-1].finished, seen[-1].trainings) == (2, 2)


def made_up(wanted):
    """A curve for each training: its rewards are its place in the sweep, halved at the start."""
    return {
        each: Curve(
            tuple(TestRow(step=2 * at, rewards=(place / 2 ** (1 - at), 0.0)) for at in (0, 1))
        )
        for place, each in enumerate(wanted.trainings())
    }


def test_rewards_go_to_the_comparison_by_arm_with_one_row_a_seed():
    curves = made_up(sweep(arms=("full", "exact"), seeds=(4, 2), tasks=("needle", "recall")))
    rewards, start = sweeps.rewards_by_arm(curves, "warm:llama", "recall")
    # full has places 4 and 5, exact 6 and 7, of seeds 4 and 2.
    assert {arm: found.tolist() for arm, found in rewards.items()} == {
        "full": [[5, 0], [4, 0]],
        "exact": [[7, 0], [6, 0]],
    }
    assert start.tolist() == [[2.5, 0], [2, 0]]


def test_an_arm_without_a_seed_of_another_is_refused():
    curves = made_up(sweep(arms=("full", "exact"), seeds=(0, 1)))
    curves.pop(next(each for each in curves if (each.arm, each.seed) == ("exact", 1)))
    with pytest.raises(InputError, match="recall: arm 'exact' has no curve of seed 1"):
        sweeps.rewards_by_arm(curves, "warm:llama", "recall")
    with pytest.raises(InputError, match="no curve of warm:llama on count: train some first"):
        sweeps.rewards_by_arm(curves, "warm:llama", "count")


def test_time_left_follows_from_the_steps_of_this_run_alone(tmp_path, monkeypatch):
    wanted = sweep(seeds=(0, 1, 2))
    lines = b'{"kind": "test"}\n{"kind": "step"}\n{"kind": "step"}\n'
    clock = iter([100.0, 100.0, 110.0])
    monkeypatch.setattr(sweeps.time, "perf_counter", lambda: next(clock))
    places = {each: tmp_path / folder_of(each) for each in wanted.trainings()}
    files = [place / "curve.jsonl" for place in places.values()]
    for file in files:
        file.parent.mkdir(parents=True)
    files[0].write_bytes(lines)
    watched = sweeps._Watched(places, lambda progress: None)
    files[1].write_bytes(lines[:-17])
    found = watched.look()
    assert (found.done, found.finished, found.steps) == (3, 1, 6)
    assert found.left == pytest.approx(30)


def test_the_bar_shows_steps_trainings_and_time(capsys):
    with sweeps.bar() as report:
        report(sweeps.Progress(done=3, steps=6, finished=1, trainings=3, left=3700.4))
    assert "3/6 steps, 1 of 3 trainings, 1:01:40 left" in " ".join(capsys.readouterr().err.split())


def test_the_same_sweep_goes_to_ray_and_is_not_sent_twice(tmp_path, ray):
    wanted = sweep(arms=("full", "detach"))
    found = run(wanted, tmp_path / "sweep", engine="ray")
    here = curve_of(tmp_path / "here", **TINY, arm="detach")
    assert found[wanted.trainings()[1]].repeatable() == here.repeatable()
    assert len(ray.begun) == 2
    for each, curve in found.items():
        assert read_curve(tmp_path / "sweep" / folder_of(each)) == curve
    assert run(wanted, tmp_path / "sweep", engine="ray") == found
    assert len(ray.begun) == 2


def test_a_training_that_breaks_gives_what_it_has_where_that_is_allowed(tmp_path, ray):
    wild = small(**TINY | {"lr": 1e300})
    with pytest.raises(TrainingBroke):
        sweeps.trained({wild: tmp_path / "refused"}, engine="ray")
    found = sweeps.trained({wild: tmp_path / "allowed"}, engine="ray", breaking=True)[wild]
    assert found.rows
    assert not found.reaches(wild.steps)


def test_without_ray_its_engine_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"^ray is not installed: pip install ray"):
        run(sweep(), tmp_path, engine="ray")


REFUSED = [
    ({"seeds": ()}, {}, "a sweep without any seed: give at least one"),
    ({"arms": ("full", "full")}, {}, "arm 'full' is given twice: give each once"),
    ({"options": {"seed": 3}}, {}, "option 'seed' is an axis of the sweep: give it there"),
    ({"arms": ("exact", "exacto")}, {}, "training: arm 'exacto' is neither full"),
    ({}, {"processes": 0}, "processes 0 is not allowed: use 1 or more"),
    ({}, {"engine": "rey"}, "engine 'rey' is not known: use local or ray"),
]


@pytest.mark.parametrize(("fields", "options", "message"), REFUSED)
def test_a_sweep_that_cannot_be_is_refused_before_anything_runs(tmp_path, fields, options, message):
    with pytest.raises(InputError) as refused:
        run(sweep(**fields), tmp_path / "sweep", **options)
    assert str(refused.value).startswith(message)
    assert not (tmp_path / "sweep").exists()
