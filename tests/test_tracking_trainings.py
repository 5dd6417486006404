"""What a night leaves in W&B, read back from wandb's own files without a network."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import wandb
from offline_runs import at_home, records
from small_nights import PROMPTS, curve, entry, made_up, spend, suite
from small_trainings import small

from lsverify import tracking_trainings
from lsverify.errors import InputError
from lsverify.tracking_trainings import VERDICTS, history, log_night, log_training, verdicts


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A night of two seeds, the folders of its runs, and where wandb would put what does not belong to a run."""
    with pytest.MonkeyPatch.context() as patch:
        home, out = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("out")
        at_home(patch, home)
        patch.delenv("WANDB_DATA_DIR")
        patch.setenv("XDG_DATA_HOME", str(home))
        made_up(patch)
        found = []

        def finish(record):
            page = out / "nightly.html"
            page.write_text("<p>night</p>")
            files = (out / "nightly.json", page)
            found.extend(log_night(record, out, mode="offline", files=files, warn=pytest.fail))

        record = spend(out, suite(seeds=2), finish=finish)
        # wandb writes from a process of its own, which is only waited for when everything ends.
        wandb.teardown()
        yield record, found, home


def of_kind(folder, kind):
    rows = records(next(folder.glob("*.wandb")))
    return [getattr(row, kind) for row in rows if row.WhichOneof("record_type") == kind]


def values(items):
    return {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items}


def run_of(folders, arm, seed):
    for folder in folders:
        (run,) = of_kind(folder, "run")
        if run.display_name == f"small/{arm}/seed{seed}":
            return folder, run
    raise AssertionError((arm, seed))


def test_every_training_is_a_run_in_its_entrys_group(logged):
    _, folders, _ = logged
    runs = [of_kind(folder, "run")[0] for folder in folders]
    *trainings, night = runs
    assert len(trainings) == 5 * 2
    assert {run.run_group for run in trainings} == {"small"}
    assert sorted({run.job_type for run in trainings}) == sorted(entry().arms)
    assert len({run.run_id for run in runs}) == len(runs)
    assert (night.job_type, night.display_name) == ("nightly", "night 1")


def test_config_is_the_training(logged):
    record, folders, _ = logged
    _, run = run_of(folders, "detach", 1)
    config = values(run.config.update)
    training = small(arm="detach", seed=1)
    assert {name: config[name] for name in training.model_dump()} == training.model_dump(
        mode="json"
    )
    assert (config["entry"], config["version"], config["night"]) == (
        "small",
        record.version.name,
        1,
    )


def test_history_has_the_curves_numbers(logged):
    _, folders, _ = logged
    folder, _ = run_of(folders, "detach", 1)
    rows = [values(row.item) for row in of_kind(folder, "history")]
    wanted = curve(small(arm="detach", seed=1))
    assert [row["_step"] for row in rows] == [0, 1, 2, 3, 4]
    for row, step in zip(rows[1:], wanted.steps, strict=True):
        assert row["reward/mean"] == step.reward
        assert row["reward/sd"] == step.reward_sd
        assert row["kl_to_start"] == step.kl_to_start
        assert row["entropy"] == step.entropy
        assert row["gradient_norm"] == step.gradient_norm
        assert row["response_length"] == step.response_length
        assert row["tokens_per_second"] == step.tokens_forwarded / step.seconds
        assert row["peak_resident_bytes"] == step.peak_resident
        assert row.get("to_full/cosine") == (step.to_full.cosine if step.to_full else None)
    assert [row.get("test/reward") for row in rows] == pytest.approx(
        [0.4, None, None, None, wanted.end.reward]
    )


def test_test_rewards_have_a_histogram(logged):
    _, folders, _ = logged
    folder, _ = run_of(folders, "full", 0)
    shown = values(of_kind(folder, "history")[-1].item)
    reward = curve(small(seed=0)).end.reward
    counts, edges = np.histogram([reward] * PROMPTS, 20, (0, 1))
    assert shown["test/rewards/_type"] == "histogram"
    assert shown["test/rewards/values"] == counts.tolist()
    assert shown["test/rewards/bins"] == pytest.approx(edges.tolist())


def test_kept_states_have_their_drift():
    training = small(arm="stale:2", rollouts_per_prompts=2)
    assert dict(history(curve(training)))[2]["drift/log_prob"] == 0.2


def test_the_night_has_its_verdicts(logged):
    record, folders, _ = logged
    table = json.loads(
        next(folders[-1].glob("files/media/table/verdicts_*.table.json")).read_text()
    )
    assert table["columns"] == list(VERDICTS)
    assert table["data"] == json.loads(json.dumps(verdicts(record)))
    assert [row[1] for row in table["data"]] == ["exact", "detach", "other_seeds", "scrambled"]
    summary = {}
    for update in of_kind(folders[-1], "summary"):
        summary |= values(update.update)
    assert summary["exit_code"] == record.exit_code
    assert summary["failures"] == list(record.failures)
    (run,) = of_kind(folders[-1], "run")
    config = values(run.config.update)
    assert config["suite"] == record.model_dump(mode="json")["suite"]


def test_record_and_page_are_an_artifact_that_stays_in_the_run(logged):
    record, folders, home = logged
    kept = folders[-1].absolute() / "files"
    assert json.loads((kept / "nightly.json").read_text()) == record.model_dump(mode="json")
    artifacts = {each.name: each for each in of_kind(folders[-1], "artifact")}
    artifact = artifacts["night-1"]
    places = {each.path: each.local_path for each in artifact.manifest.contents}
    assert places == {name: str(kept / name) for name in ("nightly.json", "nightly.html")}
    # wandb itself makes an artifact of the table; it lies below OUT too.
    assert list((folders[-1].parent / "artifacts").rglob("tmp*"))
    assert "WANDB_DATA_DIR" not in os.environ
    assert not [file for file in home.rglob("*") if file.is_file() and "artifacts" in file.parts]


def refusing(*modes):
    """`log_training` that fails in these modes, and the modes that it was called with."""
    seen = []

    def log(*given, mode, folder, **named):
        seen.append(mode)
        if mode in modes:
            raise InputError("wandb: no route\nto host")
        return folder

    return log, seen


@pytest.fixture
def night(tmp_path, monkeypatch):
    """A night that is done, and what writes its own run taken out."""
    made_up(monkeypatch)
    monkeypatch.setattr(tracking_trainings, "_log_summary", lambda record, out, mode, files: out)
    return spend(tmp_path, suite(seeds=2)), tmp_path


def test_without_network_the_rest_is_written_offline(night, monkeypatch):
    record, out = night
    log, seen = refusing("online")
    monkeypatch.setattr(tracking_trainings, "log_training", log)
    told = []
    assert len(log_night(record, out, mode="online", warn=told.append)) == 11
    assert seen == ["online", *["offline"] * 10]
    assert told == [
        f"wandb online: wandb: no route: from here on offline below {out / 'wandb'}, wandb sync sends it"
    ]


def test_what_cannot_be_logged_is_told_and_the_rest_is(night, monkeypatch):
    record, out = night
    log, _ = refusing("offline")
    monkeypatch.setattr(tracking_trainings, "log_training", log)
    told = []
    assert log_night(record, out, mode="offline", warn=told.append) == [out]
    assert len(told) == 10
    assert told[0] == "wandb: small full seed 0 is not logged: wandb: no route"


def test_wandb_itself_may_fail(tmp_path, monkeypatch):
    """As where its process cannot be started."""
    record_of = made_up(monkeypatch)
    record = spend(tmp_path, suite(seeds=2))
    assert record_of

    def init(**named):
        raise RuntimeError("service did not start")

    monkeypatch.setattr(wandb, "init", init)
    told = []
    assert log_night(record, tmp_path, mode="offline", warn=told.append) == []
    assert len(told) == 11
    assert told[-1] == "wandb: the night is not logged: service did not start"


def test_disabled_logs_nothing(night):
    record, out = night
    assert log_night(record, out, mode="disabled", warn=pytest.fail) == []
    assert not (out / "wandb").exists()


def test_a_training_has_the_same_run_whenever_it_is_logged(monkeypatch, tmp_path):
    begun = []

    class Run:
        dir = str(tmp_path / "run" / "files")
        summary: dict[str, object] = {}  # noqa: RUF012

        def log(self, *given, **named): ...
        def finish(self): ...

    monkeypatch.setattr(wandb, "init", lambda **named: begun.append(named["id"]) or Run())
    for seed, version in ((0, "v1"), (0, "v1"), (1, "v1"), (0, "v2")):
        training = small(arm="window:8", seed=seed)
        named = {"entry": "small", "version": version, "number": 1, "mode": "offline"}
        log_training(training, curve(training), folder=tmp_path, **named)
    assert begun[0] == begun[1]
    assert len(set(begun)) == 3
    assert begun[0].startswith("small-window-8-seed0-")
