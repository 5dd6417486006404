"""What a step costs: full batched, full serial, `exact` and `detach`, each in fresh processes, beside their ideal.

Each path runs in two processes: one takes time, tokens and resident memory and tracks no tensors; the other counts live
bytes and takes no time. Both load weights and data and run one small step before anything is measured, so that the
libraries' one-off costs are charged to no path.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from rich.table import Table
from torch import nn
from transformers import LlamaConfig

from lsverify.errors import InputError
from lsverify.fresh_process import in_fresh_process
from lsverify.ledger import PathName, Shared, Work, ideal_work, phase_of
from lsverify.memory import LiveBytes, Phases, Resident
from lsverify.models import tiny
from lsverify.objective import preset
from lsverify.paths import CHUNK, full_autograd, longstraw
from lsverify.policies import Policy, parse_policy
from lsverify.problems import Problem, ProblemSpec, draw
from lsverify.watch import Watch
from lsverify.whole_files import write_whole

MIB = 2**20
FULL = ("full_batched", "full_serial")


class Workload(BaseModel):
    """What is run: a llama-like model in float32, one prompt, responses of equal length; sizes in tokens or units."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paths: tuple[str, ...] = Field((*FULL, "exact", "detach"), min_length=1)
    """`full_batched`, `full_serial`, or a policy."""
    prompt_length: PositiveInt = 4096
    group_sizes: tuple[PositiveInt, ...] = Field((2, 8), min_length=1)
    response_length: PositiveInt = 64
    chunk: PositiveInt = CHUNK
    layers: PositiveInt = 4
    width: PositiveInt = 256
    heads: PositiveInt = 4
    vocabulary: int = Field(1024, ge=2)
    objective: str = "grpo"
    seed: int = 0

    def problem(self, group_size: int, prompt_length: int | None = None) -> Problem:
        """Random tokens; old log-probs of zero cost as much as any."""
        spec = ProblemSpec(
            prompt_lengths=(prompt_length or self.prompt_length,),
            group_sizes=(group_size,),
            response_lengths=(self.response_length,),
            seed=self.seed,
        )
        return draw(spec, self.vocabulary)

    def model(self) -> nn.Module:
        """Keys and values as wide as queries, a gated MLP of 8/3 the width, untied embeddings, as llama has them."""
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=8 * self.width // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=self.prompt_length + self.response_length,
            tie_word_embeddings=False,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: nn.Module = tiny(config, seed=self.seed, dtype="float32")
        return model

    def ideal(self, path: str, group_size: int) -> Work:
        """What the path costs when it does nothing twice."""
        prompts = [Shared(self.prompt_length, (self.response_length,) * group_size)]
        name, policy = _read(path)
        return ideal_work(name, prompts, policy)

    def flop(self, work: Work) -> float:
        """Floating-point operations of `work` in the layers: 2 per weight and token, 4 x width per pair and layer."""
        weights = 4 * self.width**2 + 3 * self.width * (8 * self.width // 3)
        return work.cost(
            per_token=2.0 * weights * self.layers, per_pair=4.0 * self.width * self.layers
        )


class Row(BaseModel):
    """One path at one group size. Bytes; None where this system cannot tell. Resident bytes are over the baseline."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    group_size: int
    seconds: float
    cpu_seconds: float
    phase_seconds: dict[str, float]
    resident_baseline: int | None
    resident_peak: int | None
    phase_resident_peak: dict[str, int | None]
    live_bytes_peak: int
    live_bytes_left: int
    tokens_forwarded: int
    tokens_forwarded_grad: int
    ideal_tokens: int
    ideal_flop: float

    @property
    def tokens_ratio(self) -> float:
        """Tokens forwarded over those of the path's ideal schedule."""
        return self.tokens_forwarded / self.ideal_tokens

    @property
    def rate(self) -> float:
        """Operations of ideal work per second."""
        return self.ideal_flop / self.seconds


class Report(BaseModel):
    """Everything that a benchmark measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workload: Workload
    threads: int
    torch: str
    rows: tuple[Row, ...]

    def row(self, path: str, group_size: int) -> Row | None:
        """The measurement of a path at a group size, if there is one."""
        return next((r for r in self.rows if (r.path, r.group_size) == (path, group_size)), None)

    def against_full_batched(self, row: Row) -> dict[str, float | None]:
        """How many times faster and smaller than full batched at the same group size."""
        full = self.row("full_batched", row.group_size)
        if full is None:
            return {"speed": None, "live": None, "resident": None}
        resident = None
        if full.resident_peak is not None and row.resident_peak:
            resident = full.resident_peak / row.resident_peak
        return {
            "speed": full.seconds / row.seconds,
            "live": full.live_bytes_peak / row.live_bytes_peak,
            "resident": resident,
        }

    def growth(self, path: str) -> float | None:
        """Relative growth of the live peak from the smallest group to the largest."""
        small = self.row(path, min(self.workload.group_sizes))
        large = self.row(path, max(self.workload.group_sizes))
        if small is None or large is None or small is large:
            return None
        return large.live_bytes_peak / small.live_bytes_peak - 1

    def times_ideal(self, row: Row) -> float:
        """Seconds over those that the path's ideal work takes at the best rate seen in this run."""
        return max(each.rate for each in self.rows) / row.rate


def workload(**sizes: Any) -> Workload:
    """A workload of these sizes, the rest by default. Raises InputError, one line, for a size that is not allowed."""
    try:
        return Workload(**sizes)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InputError(f"{name} {first['input']!r} is not allowed: {first['msg']}") from None


def run(workload: Workload, announce: Callable[[str], None] = lambda _: None) -> Report:
    """Measure every path at every group size. Raises InputError for a path that is neither full nor a policy."""
    for path in workload.paths:
        _read(path)
    rows: list[Row] = []
    for size in workload.group_sizes:
        for path in workload.paths:
            announce(f"{path}, {size} responses")
            job = (workload.model_dump(mode="json"), path, size)
            timed = in_fresh_process(f"{__name__}:time_step", *job)
            counted = in_fresh_process(f"{__name__}:count_step", *job)
            ideal = workload.ideal(path, size)
            rows.append(
                Row(
                    path=path,
                    group_size=size,
                    ideal_tokens=ideal.tokens,
                    ideal_flop=workload.flop(ideal),
                    **timed,
                    **counted,
                )
            )
    return Report(
        workload=workload,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        rows=tuple(rows),
    )


def time_step(workload: dict[str, Any], path: str, group_size: int) -> dict[str, Any]:
    """Seconds, tokens and resident memory of one step. To be called in a fresh process."""
    setup = Workload(**workload)
    model, problem = _ready(setup, path, group_size)
    phases = Phases()
    with Watch(model, on_forward=lambda event: phases.begin(phase_of(event, problem))) as watch:
        cpu = process_time()
        phases.begin("prepare")
        _step(setup, path, model, problem)
        phases.end()
        cpu = process_time() - cpu
    tokens = watch.tokens()
    baseline = next(iter(phases.resident.values())).baseline
    peaks = {name: _over(baseline, resident) for name, resident in phases.resident.items()}
    return {
        "seconds": sum(phases.seconds.values()),
        "cpu_seconds": cpu,
        "phase_seconds": phases.seconds,
        "resident_baseline": baseline,
        "resident_peak": None if baseline is None else max(peak or 0 for peak in peaks.values()),
        "phase_resident_peak": peaks,
        "tokens_forwarded": tokens.total,
        "tokens_forwarded_grad": tokens.grad,
    }


def count_step(workload: dict[str, Any], path: str, group_size: int) -> dict[str, Any]:
    """Live bytes of one step. To be called in a fresh process."""
    setup = Workload(**workload)
    model, problem = _ready(setup, path, group_size)
    with LiveBytes() as live:
        _step(setup, path, model, problem)
    return {"live_bytes_peak": live.peak, "live_bytes_left": live.left}


def table(report: Report) -> Table:
    """The report for people: one row per path and group size."""
    load = report.workload
    drawn = Table(
        title=f"one GRPO step: prompt {load.prompt_length}, responses of {load.response_length}, "
        f"{load.layers} layers of {load.width}, float32, {report.threads} threads",
        caption="memory over the loaded weights and data; x ideal: seconds over those of the path's ideal work at "
        "the best rate in this table",
    )
    for head in ("path", "G"):
        drawn.add_column(head, justify="left" if head == "path" else "right")
    for head in (
        "s",
        "faster",
        "live MiB",
        "smaller",
        "resident MiB",
        "tokens",
        "x ideal tokens",
        "x ideal",
    ):
        drawn.add_column(head, justify="right")
    for row in report.rows:
        against = report.against_full_batched(row)
        drawn.add_row(
            row.path,
            str(row.group_size),
            f"{row.seconds:.2f}",
            _times(against["speed"]),
            f"{row.live_bytes_peak / MIB:.1f}",
            _times(against["live"]),
            "not measured" if row.resident_peak is None else f"{row.resident_peak / MIB:.1f}",
            str(row.tokens_forwarded),
            f"{row.tokens_ratio:.3f}",
            f"{report.times_ideal(row):.2f}",
        )
    return drawn


def summary(report: Report) -> list[str]:
    """One line per LongStraw path: what it gains at the largest group, and how its live peak grows with the group."""
    lines = []
    for path in report.workload.paths:
        row, growth = report.row(path, max(report.workload.group_sizes)), report.growth(path)
        if row is None or path in FULL:
            continue
        against = report.against_full_batched(row)
        parts = [f"{path}, {row.group_size} responses:"]
        if against["speed"] is not None and against["live"] is not None:
            parts.append(
                f"{against['speed']:.1f} times full batched's speed at 1/{against['live']:.1f} of its live bytes;"
            )
        if growth is not None:
            sizes = report.workload.group_sizes
            parts.append(f"live peak {growth:+.3%} from {min(sizes)} responses to {max(sizes)}")
        lines.append(" ".join(parts))
    return lines


def write(report: Report, path: Path) -> None:
    """Write the report as JSON, whole or not at all."""
    write_whole(path, report.model_dump_json(indent=2) + "\n")


def _read(path: str) -> tuple[PathName, Policy | None]:
    if path == "full_batched":
        return "full_batched", None
    if path == "full_serial":
        return "full_serial", None
    try:
        return "longstraw", parse_policy(path)
    except InputError as error:
        raise InputError(f"path {path!r} is neither {' nor '.join(FULL)}, and {error}") from None


def _ready(workload: Workload, path: str, group_size: int) -> tuple[nn.Module, Problem]:
    """Weights and data, after one step on a short prompt whose gradients are dropped."""
    model, problem = workload.model(), workload.problem(group_size)
    _step(workload, path, model, workload.problem(2, prompt_length=min(workload.prompt_length, 64)))
    model.zero_grad(set_to_none=True)
    return model, problem


def _step(workload: Workload, path: str, model: nn.Module, problem: Problem) -> None:
    objective = preset(workload.objective)
    if path in FULL:
        full_autograd(model, problem, objective, batched=path == "full_batched")
    else:
        longstraw(model, problem, objective, policy=path, chunk=workload.chunk)


def _over(baseline: int | None, resident: Resident) -> int | None:
    return None if baseline is None or resident.peak is None else resident.peak - baseline


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}x"
