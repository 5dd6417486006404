"""What `--wandb offline` leaves on disk, read back from wandb's own file."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest
import wandb
from judged import made_up, receipt_of
from offline_runs import at_home, records

from lsverify import evidence, tracking
from lsverify.errors import InputError
from lsverify.report import HEADERS, row


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A receipt and the folder of its offline run."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        at_home(patch, home)
        receipt = receipt_of(
            made_up(), made_up(status="failed", number=math.nan), command=("gate", "--quick")
        )
        out = tmp_path_factory.mktemp("out")
        folder = tracking.log(receipt, mode="offline", folder=out)
        # wandb writes from a process of its own, which is only waited for when everything ends.
        wandb.teardown()
        yield receipt, folder, list(records(next(folder.glob("*.wandb"))))


def test_the_run_is_written_below_the_folder(logged):
    _, folder, _ = logged
    assert folder.name.startswith("offline-run-")
    assert folder.parent.name == "wandb"


def test_config_holds_command_environment_and_cases(logged):
    receipt, _, found = logged
    run = next(record.run for record in found if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["command"] == ["gate", "--quick"]
    assert config["cases"] == [json.loads(case.config.model_dump_json()) for case in receipt.cases]
    assert config["environment"]["packages"]["torch"]
    assert (run.project, run.job_type) == ("lsverify", "gate")


def test_scalars_are_logged_per_case_at_full_precision(logged):
    _, _, found = logged
    history = [r.history for r in found if r.WhichOneof("record_type") == "history"]
    assert len(history) == 1
    scalars = {"/".join(item.nested_key) or item.key: item.value_json for item in history[0].item}
    assert json.loads(scalars["llama/exact/reached"]) == 0
    assert json.loads(scalars["llama/exact/gradient/measure"]) == 1.5e-15
    assert json.loads(scalars["llama/exact/accounting/tokens_forwarded"]) == 41
    assert "llama/exact/accounting/live_bytes_peak" not in scalars


def test_the_table_is_in_the_run(logged):
    receipt, folder, _ = logged
    table = json.loads(next(folder.glob("files/media/table/gate_*.table.json")).read_text())
    assert table["columns"] == list(HEADERS)
    assert table["data"] == [row(case) for case in receipt.cases]


def test_the_exit_code_is_in_the_summary(logged):
    _, _, found = logged
    summaries = [r.summary for r in found if r.WhichOneof("record_type") == "summary"]
    values = {i.key or "/".join(i.nested_key): i.value_json for s in summaries for i in s.update}
    assert json.loads(values["exit_code"]) == 1


def test_the_receipt_is_a_file_of_the_run(logged):
    receipt, folder, _ = logged
    assert (folder / "files" / "receipt.json").read_text() == evidence.as_json(receipt)


def test_scalars_are_named_by_architecture_candidate_and_policy():
    case = made_up().model_copy(update={"candidate": "mine:step", "bias": None})
    scalars = tracking._scalars(case)
    assert scalars["llama/mine:step/exact/gradient/rel_l2"] == 0.1
    assert not any("/bias/" in name for name in scalars)
    assert all(isinstance(value, int | float) for value in scalars.values())


def test_disabled_writes_nothing(tmp_path):
    assert tracking.log(receipt_of(made_up()), mode="disabled", folder=tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_online_without_a_key_is_refused_in_one_line(tmp_path, monkeypatch):
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(
        InputError, match=r"wandb online: .*--wandb offline needs no network"
    ) as caught:
        tracking.log(receipt_of(made_up()), mode="online", folder=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_network_that_is_lost_is_not_waited_for(tmp_path, monkeypatch):
    class Run:
        dir = str(tmp_path / "run-1" / "files")

        def finish(self):
            raise TimeoutError

    begun = []
    monkeypatch.setattr(wandb, "init", lambda **named: begun.append(named["settings"]) or Run())
    with (
        pytest.raises(InputError, match=r"not all was sent in 120 s: wandb sync .*run-1 sends"),
        tracking.started("online", tmp_path, "lsverify", "gate", {}),
    ):
        pass
    assert (begun[0].finish_timeout, begun[0].finish_timeout_raises) == (120, True)


def test_unknown_modes_and_a_missing_package_are_refused(monkeypatch):
    for mode in tracking.MODES:
        tracking.check_mode(mode)
    with pytest.raises(
        InputError, match="wandb 'on' is not known: use one of offline, online, disabled"
    ):
        tracking.check_mode("on")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    tracking.check_mode("disabled")
    with pytest.raises(InputError, match=r"pip install 'lsverify\[wandb\]'"):
        tracking.check_mode("offline")
