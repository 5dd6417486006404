from __future__ import annotations

import itertools
import json
import sys

import pytest
from small_nights import ENDS, PROMPTS, code_is, curve, entry, made_up, rewrite, spend, suite
from small_trainings import SMALL, cluster_of_one, shorter_test

from lsverify.curves import Curve
from lsverify.errors import InputError
from lsverify.looking import level
from lsverify.nightly import night, read_ledger
from lsverify.nightly_record import LEDGER, RECORD, Nightly
from lsverify.sweeps import folder_of
from lsverify.whole_files import read_record


class Killed(BaseException):
    """Ends a night where it stands: nothing of ours catches it."""


def alone(record):
    """The only entry of a night."""
    (found,) = record.entries
    return found


def with_ends(**ends):
    return lambda training: curve(training, ENDS | ends)


def read(out):
    return read_record(Nightly, out / RECORD)


def test_a_night_decides_about_each_arm_and_leaves_its_record(tmp_path, monkeypatch):
    begun = made_up(monkeypatch)
    record = spend(tmp_path, command=("nightly",))
    found = alone(record)
    assert len(begun) == 5 * 4
    assert found.verdicts == {"exact": "equivalent", "detach": "different"}
    assert found.standing == found.verdicts
    assert (record.exit_code, record.failures) == (0, ())
    assert found.exact.equal
    assert found.gain.value == pytest.approx(0.2, abs=0.02)
    assert read(tmp_path) == record
    assert read_record(Nightly, tmp_path / "nights/0001.json") == record
    assert (record.number, record.version.name, record.command) == (1, "v1", ("nightly",))
    assert list(found.curves(tmp_path).values()) == [curve(each) for each in begun]


def test_numbers_of_an_arm_are_those_of_its_curves(tmp_path, monkeypatch):
    begun = made_up(monkeypatch)
    arms = {arm.arm: arm for arm in alone(spend(tmp_path)).arms}
    ends = {
        arm: [curve(each).end.reward for each in begun if each.arm == arm]
        for arm in ("full", "detach")
    }
    gaps = [a - b for a, b in zip(ends["detach"], ends["full"], strict=True)]
    detach = arms["detach"]
    assert detach.bias.by_seed == pytest.approx([1 - end for end in ends["detach"]])
    assert detach.bias.gap_by_seed == pytest.approx(gaps)
    assert detach.bias.steps == 2
    assert detach.difference.value == pytest.approx(sum(gaps) / 4)
    assert detach.distribution.mean.value == pytest.approx(sum(ends["detach"]) / 4)
    # Every prompt of a seed has one reward, so the share of (seed, prompt) below any value is that of seeds.
    assert detach.distances.ks.value == 1
    assert arms["full"].difference is arms["full"].distances is None
    assert (detach.cost.tokens_per_second, detach.cost.seconds_per_step) == (2000, 0.5)
    assert detach.cost.peak_resident == 2**29


def test_bias_is_held_beside_the_gap_over_arms_and_entries(tmp_path, monkeypatch):
    made_up(monkeypatch, with_ends(**{"window:8": 0.55}))
    arms = ("full", "exact", "detach", "window:8", "other_seeds", "scrambled")
    other = entry("other", task="needle", arms=arms)
    record = spend(tmp_path, suite(entry(arms=arms), other))
    # A larger distance goes with a larger loss here, in every arm and seed.
    assert {found.correlation.over_arms.rho for found in record.entries} == {1}
    assert [one.points for one in record.entries[0].correlation.over_seeds] == [4, 4, 4]
    assert (record.correlation.points, record.correlation.rho > 0.9) == (6, True)


def test_gaps_are_told_by_distance_of_the_evidence_and_by_length(tmp_path, monkeypatch):
    made_up(monkeypatch)
    found = alone(spend(tmp_path))
    spans = [span for span in found.spans if span.of == "distance"]
    assert len(spans) == 4
    assert sum(span.prompts for span in spans) == PROMPTS
    assert all(one.high < other.low for one, other in itertools.pairwise(spans))
    gap = next(v.gap for v in found.comparison.arms if v.arm == "detach")
    assert all(span.gaps["detach"].value == pytest.approx(gap) for span in found.spans)


def test_the_next_night_adds_fresh_seeds_and_looks_more_strictly(tmp_path, monkeypatch):
    begun = made_up(monkeypatch)
    spend(tmp_path)
    begun.clear()
    found = alone(spend(tmp_path))
    assert {each.seed for each in begun} == {4, 5, 6, 7}
    assert (found.seeds, found.fresh) == (tuple(range(8)), (4, 5, 6, 7))
    assert (found.look, found.comparison.look) == (2, 2)
    assert found.comparison.level == level(0.05, 2) < level(0.05, 1)
    assert {verdict.seeds for verdict in found.comparison.arms} == {8}
    assert read(tmp_path).number == 2


def test_changed_code_begins_at_its_first_look_with_seeds_of_its_own(tmp_path, monkeypatch):
    made_up(monkeypatch)
    spend(tmp_path)
    code_is(monkeypatch, "v2")
    record = spend(tmp_path)
    found = alone(record)
    assert (found.look, found.seeds, record.number) == (1, (4, 5, 6, 7), 2)
    assert found.comparison.level == level(0.05, 1)
    code_is(monkeypatch, "v1")
    found = alone(spend(tmp_path))
    assert (found.look, found.seeds) == (2, (0, 1, 2, 3, 8, 9, 10, 11))


def test_a_verdict_that_another_night_contradicts_does_not_stand(tmp_path, monkeypatch):
    made_up(monkeypatch)
    spend(tmp_path)
    edit_ledger(
        tmp_path, lambda night: night["planned"][0]["decisions"].update(detach="equivalent")
    )
    found = alone(spend(tmp_path))
    assert found.verdicts == {"exact": "equivalent", "detach": "different"}
    assert found.standing == {"exact": "equivalent", "detach": "undecided"}


def edit_ledger(out, change):
    """Change its first night."""
    ledger = json.loads((out / LEDGER).read_text())
    change(ledger["nights"][0])
    (out / LEDGER).write_text(json.dumps(ledger))


def killed_at(place):
    """Trains by `curve` until the training in this place is to begin."""
    begun = []

    def train(training):
        if len(begun) == place:
            raise Killed
        begun.append(training)
        return curve(training)

    return train


def test_a_killed_night_goes_on_to_the_same_record(tmp_path, monkeypatch):
    made_up(monkeypatch)
    whole = spend(tmp_path / "whole")
    made_up(monkeypatch, killed_at(7))
    with pytest.raises(Killed):
        spend(tmp_path / "killed")
    assert not (tmp_path / "killed" / RECORD).exists()
    begun = made_up(monkeypatch)
    with pytest.raises(InputError, match=r"night 1 in .* is not finished: add --resume"):
        spend(tmp_path / "killed")
    assert begun == []
    with pytest.raises(InputError, match="was begun with another suite"):
        spend(tmp_path / "killed", suite(seeds=5), resume=True)
    assert spend(tmp_path / "killed", resume=True) == whole
    assert len(begun) == 5 * 4 - 7
    assert len(read_ledger(tmp_path / "killed").nights) == 1


def test_a_night_killed_after_its_record_is_the_same_night_again(tmp_path, monkeypatch):
    made_up(monkeypatch)

    def kill(record):
        raise Killed

    with pytest.raises(Killed):
        spend(tmp_path, finish=kill)
    before = read(tmp_path)
    assert spend(tmp_path, resume=True) == before
    assert alone(spend(tmp_path, resume=True)).look == 2


def test_a_night_of_other_code_is_given_up_and_is_no_look(tmp_path, monkeypatch):
    made_up(monkeypatch, killed_at(7))
    with pytest.raises(Killed):
        spend(tmp_path)
    made_up(monkeypatch, version="v2")
    record = spend(tmp_path)
    assert (record.number, alone(record).look, alone(record).seeds) == (2, 1, (4, 5, 6, 7))
    code_is(monkeypatch, "v1")
    assert (alone(found := spend(tmp_path)).look, alone(found).seeds) == (1, (8, 9, 10, 11))


def test_real_trainings_that_are_killed_go_on_to_the_same_record(tmp_path, monkeypatch):
    """Tiny ones in this process; what does not repeat, seconds and memory, is left out."""
    shorter_test(monkeypatch)
    cluster_of_one(monkeypatch)
    # The test is cut to 12 tasks, so there are no places of the whole one.
    monkeypatch.setattr("lsverify.nightly_analysis._spans", lambda *given: ())
    arms = ("full", "exact", "other_seeds", "scrambled")
    options = SMALL | {"steps": 2, "test_every": 2, "compare_every": 2}
    wanted = suite(entry(arms=arms, options=options), seeds=2)
    whole = spend(tmp_path, wanted)
    found = alone(whole)
    assert found.exact.equal
    assert found.exact.seeds == 2
    # As a kill in the last training leaves it.
    edit_ledger(tmp_path, lambda night: night.update(finished=False))
    gone = tmp_path / found.folder / "warm-llama/recall/exact/seed1"
    (gone / "curve.jsonl").write_bytes((gone / "curve.jsonl").read_bytes()[:500])
    assert repeatable(spend(tmp_path, wanted, resume=True)) == repeatable(whole)


def repeatable(record):
    return record.model_dump(exclude={"entries": {"__all__": {"arms": {"__all__": {"cost"}}}}})


def changed(field, by):
    def change(row):
        if row.kind != "step" or row.step != 3:
            return row
        return row.model_copy(update={field: getattr(row, field) * by})

    return change


@pytest.mark.parametrize(
    ("field", "by", "equal"),
    [("gradient_norm", 1 + 1e-9, True), ("gradient_norm", 1 + 1e-5, False), ("reward", 1 + 1e-15, False)],
)  # fmt: skip
def test_exact_that_parts_from_full_at_one_step_is_seen(tmp_path, monkeypatch, field, by, equal):
    begun = made_up(monkeypatch)
    spend(tmp_path)
    training = next(each for each in begun if (each.arm, each.seed) == ("exact", 2))
    rewrite(tmp_path / "v1/small" / folder_of(training), changed(field, by))
    record = spend(tmp_path)
    found = alone(record)
    assert found.exact.equal is equal
    assert getattr(found.exact, field) == pytest.approx(by - 1, rel=0.2)
    assert record.exit_code == (0 if equal else 1)
    if not equal:
        assert record.failures[0].startswith("small: exact parts from full: test rewards by 0,")


def test_exact_in_float32_is_left_to_its_verdict(tmp_path, monkeypatch):
    made_up(monkeypatch, lambda training: curve(training.model_copy(update={"arm": "detach"})))
    wanted = suite(entry(options=SMALL | {"dtype": "float32"}))
    record = spend(tmp_path, wanted)
    assert alone(record).exact.equal is None
    assert not any("parts" in failure for failure in record.failures)


def test_exact_that_is_decided_different_fails_the_night(tmp_path, monkeypatch):
    made_up(
        monkeypatch,
        lambda each: curve(each, ENDS | {"full": 0.5}) if each.arm == "exact" else curve(each),
    )
    record = spend(tmp_path)
    parts, decided = record.failures
    assert parts.startswith("small: exact parts from full: test rewards by 0.1,")
    assert decided.startswith("small: exact is decided different from full: gap -0.1")
    assert record.exit_code == 1


def test_nothing_learned_is_void(tmp_path, monkeypatch):
    made_up(monkeypatch, with_ends(full=0.4, other_seeds=0.4))
    record = spend(tmp_path)
    assert alone(record).verdicts == {"exact": "void", "detach": "void"}
    assert record.exit_code == 1
    assert record.failures[0].startswith(
        "small: void: the reference is not better than its untrained start"
    )


def test_what_detach_loses_fails_nothing_and_an_unseen_control_does(tmp_path, monkeypatch):
    made_up(monkeypatch, with_ends(detach=0.2))
    assert spend(tmp_path / "loss").exit_code == 0
    made_up(monkeypatch, with_ends(scrambled=0.6))
    record = spend(tmp_path / "control")
    assert "the control 'scrambled' is not seen as different" in record.failures[0]


def test_a_training_that_broke_off_counts_as_nothing_learned(tmp_path, monkeypatch):
    def breaking(training):
        made = curve(training)
        broke = (training.arm, training.seed) == ("detach", 1)
        return Curve(made.rows[:2]) if broke else made

    made_up(monkeypatch, breaking)
    found = alone(spend(tmp_path))
    detach = next(arm for arm in found.arms if arm.arm == "detach")
    assert detach.broken == (1,)
    assert detach.distribution.seed_quantiles[0] == 0
    # The next night counts it as it did then.
    assert next(a for a in alone(spend(tmp_path)).arms if a.arm == "detach").broken == (1,)


def test_a_curve_that_lost_its_end_is_no_training_that_broke_off(tmp_path, monkeypatch):
    begun = made_up(monkeypatch)
    spend(tmp_path)
    file = tmp_path / "v1/small" / folder_of(begun[0]) / "curve.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(InputError, match="full/seed0 is not whole any more"):
        spend(tmp_path)


def test_entries_take_turns_and_full_runs_them_all(tmp_path, monkeypatch):
    made_up(monkeypatch)
    turning = [entry(f"turn{n}", rotates=True, task=task) for n, task in enumerate(("needle", "chain", "count"))]  # fmt: skip
    wanted = suite(entry(), *turning, rotating=2, seeds=2)

    def names(**options):
        return [found.entry.name for found in spend(tmp_path, wanted, **options).entries]

    assert names() == ["small", "turn0", "turn1"]
    assert names() == ["small", "turn0", "turn2"]
    assert names(full=True) == ["small", "turn0", "turn1", "turn2"]
    found = read(tmp_path).entries
    assert [each.look for each in found] == [3, 3, 2, 2]
    assert [len(each.seeds) for each in found] == [6, 6, 4, 4]


def test_kept_states_have_a_table_and_no_verdict(tmp_path, monkeypatch):
    made_up(monkeypatch)
    arms = ("stale:1", "stale:2")
    options = SMALL | {"rollouts_per_prompts": 4}
    record = spend(tmp_path, suite(entry(kind="drift", arms=arms, options=options), seeds=2))
    found = alone(record)
    assert (found.comparison, found.verdicts, record.exit_code) == (None, {}, 0)
    assert [(row.refresh, row.age, row.captures) for row in found.drift] == [
        (refresh, age, 2) for refresh in (1, 2) for age in (1, 2, 3, 4)
    ]
    assert found.drift[1].log_prob == pytest.approx(0.2)
    assert found.drift[1].loss_difference == pytest.approx(0.5)


def test_a_night_that_cannot_begin_is_not_in_the_way(tmp_path, monkeypatch):
    made_up(monkeypatch)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="ray is not installed"):
        spend(tmp_path)
    with pytest.raises(InputError, match="the suite has nothing for tonight"):
        night(suite(entry(rotates=True)), tmp_path)
    made_up(monkeypatch)
    assert spend(tmp_path).number == 1


def test_an_entry_that_changed_is_not_added_to_what_it_was(tmp_path, monkeypatch):
    made_up(monkeypatch)
    spend(tmp_path)
    with pytest.raises(InputError, match="entry 'small' was trained with other options or arms"):
        spend(tmp_path, suite(entry(options=SMALL | {"lr": 1e-4})))
    spend(tmp_path, suite(entry(rotates=True), rotating=1))


def test_two_nights_in_two_folders_are_equal(tmp_path, monkeypatch):
    made_up(monkeypatch)
    assert spend(tmp_path / "one") == spend(tmp_path / "two")
