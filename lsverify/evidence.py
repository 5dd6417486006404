"""The evidence of a run: rungs, statuses, cases, and the receipt that holds the whole truth of it.

A claim holds only if every rung up to the required one holds. Passing must be shown: a rung that compared nothing, or
did not run, is not a pass.
"""

from __future__ import annotations

import json
import math
import platform
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    WithJsonSchema,
)

from lsverify.errors import InputError
from lsverify.spans import SpanKind
from lsverify.whole_files import write_whole

SCHEMA_VERSION = 1
RungName = Literal["objective", "execution", "forward", "gradient", "optimizer_delta"]
RUNGS: tuple[RungName, ...] = get_args(RungName)
Status = Literal[
    "proven",
    "proven_zero",
    "failed",
    "vacuous",
    "nondeterministic",
    "reference_inconsistent",
    "undecidable",
    "not_applicable",
    "derived",
    "error",
    "not_run",
]
# `undecidable` is given only where values are equal under the reference's decisions; a flip that matters is `failed`.
HOLDS: frozenset[str] = frozenset(
    {"proven", "proven_zero", "not_applicable", "derived", "undecidable"}
)
PACKAGES = ("lsverify", "torch", "transformers", "numpy", "scipy", "peft", "hypothesis", "pytest")


# JSON has no NaN: a number that is not finite is written as a string, which reads back as the number.
Real = Annotated[
    float,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=True,
        json_schema_serialization_defaults_required=True,
    )


class Rung(_Record):
    """One equality. In a pass, `measure` is at most `limit`: relative errors, or faults counted with limit 0.

    They are of all parameters together, `limit` the largest of any; a failure may be of one alone, which `detail` names.
    """

    name: RungName
    status: Status
    measure: Real | None = None
    limit: Real | None = None
    detail: str = ""

    @property
    def holds(self) -> bool:
        return self.status in HOLDS


class Distance(_Record):
    """How far one gradient is from another, over all parameters; None where a norm is zero."""

    rel_l2: Real | None
    cosine: Real | None
    norm_ratio: Real | None
    worst_parameter: str | None
    worst_rel_l2: Real | None


class Parameter(_Record):
    """One parameter against the claimed reference, with its fused slices; `bias_rel_l2` is to full autograd."""

    name: str
    status: str
    rel_l2: Real | None
    cosine: Real | None
    norm_ratio: Real | None
    limit: Real | None
    bias_rel_l2: Real | None
    slices: dict[str, Real | None] = Field(default_factory=dict)


class CaseConfig(_Record):
    """Everything that makes a case; a receipt can be run again from this alone.

    `response_lengths` are cycled over the responses of all groups; lengths are in tokens. `spans` are prompt tokens that
    see each other both ways (see `lsverify.spans`).
    """

    arch: str
    policy: str | None = None
    candidate: str | None = None
    reference: Literal["declared", "full"] = "declared"
    dtype: str = "float64"
    prompt_length: int = Field(default=24, ge=1)
    group_size: int = Field(default=4, ge=1)
    response_lengths: tuple[PositiveInt, ...] = Field((5, 1, 7, 3), min_length=1)
    objective: str = "grpo"
    # Below 2**53, every reader of JSON keeps it to the last digit.
    seed: int = Field(default=0, ge=0, lt=2**53)
    chunk: int = Field(default=8, ge=1)
    branches: int = Field(default=1, ge=1)
    lora: bool = False
    quantised: bool = False
    tied: bool = False
    spans: SpanKind = "none"
    training: bool = True
    require: RungName = RUNGS[-1]


class FileEvidence(_Record):
    """Where a verdict rests on files (see `lsverify.check`): folder, gradients and map as given, sha256 of the gradients.

    A rung of `allow_missing` without evidence in the files does not keep the case from its claim.
    """

    folder: str
    gradients: str
    map: str | None
    sha256: str
    allow_missing: tuple[RungName, ...] = ()


class CaseReceipt(_Record):
    """A case and what it proved.

    `gradient` is the distance to the claimed reference, `bias` to full autograd. `paper_gate` is LongStraw's own gate
    (cosine >= 0.999 and relative L2 <= 0.01) held to full autograd. `candidate_source` is the sha256 of the file that
    defines the candidate, its first 12 digits.
    """

    arch: str
    policy: str | None
    candidate: str | None
    candidate_source: str | None = None
    reference: str
    dtype: str
    prompt_length: int
    group_size: int
    response_lengths: tuple[int, ...]
    objective: str
    seed: int
    rungs: tuple[Rung, ...]
    gradient: Distance | None
    bias: Distance | None
    paper_gate: bool | None
    parameters: tuple[Parameter, ...]
    accounting: dict[str, Any]
    config: CaseConfig
    problem: str
    warnings: tuple[str, ...] = ()
    files: FileEvidence | None = None

    @property
    def reached(self) -> bool:
        """Whether every rung up to the required one holds, or lacks evidence that was said to be missing."""
        return {rung.name for rung in self.rungs} >= set(self.needed) and not self.unmet

    @property
    def needed(self) -> tuple[RungName, ...]:
        """The rungs up to the required one."""
        return RUNGS[: RUNGS.index(self.config.require) + 1]

    @property
    def unmet(self) -> tuple[Rung, ...]:
        """The rungs that keep the case from its claim."""
        missing = self.files.allow_missing if self.files else ()
        return tuple(
            rung
            for rung in self.rungs
            if rung.name in self.needed
            and not rung.holds
            and not (rung.status == "not_run" and rung.name in missing)
        )


class Environment(_Record):
    """Where a run was made: versions by package, threads, platform."""

    python: str
    platform: str
    threads: int
    deterministic: bool
    packages: dict[str, str]


class Receipt(_Record):
    """`DIR/receipt.json`: numbers at full precision, non-finite ones as the strings NaN, Infinity, -Infinity."""

    schema_version: Literal[1] = 1
    environment: Environment
    command: tuple[str, ...]
    cases: tuple[CaseReceipt, ...]


def environment() -> Environment:
    import torch

    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        packages=dict(_versions(PACKAGES)),
    )


def _versions(names: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def exit_code(cases: Sequence[CaseReceipt]) -> int:
    """0: every case reached its claim; 1: some did not, or nothing was run."""
    return 0 if cases and all(case.reached for case in cases) else 1


def schema() -> dict[str, Any]:
    """The JSON schema of a receipt, as published in docs/receipt.schema.json."""
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return dialect | Receipt.model_json_schema(mode="serialization")


def check_folder(folder: Path) -> None:
    """Make the folder for a receipt, before anything runs. Raises `InputError` when it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"out {str(folder)!r} cannot be written to ({error.strerror}): choose another folder"
        ) from None


def as_json(receipt: Receipt) -> str:
    """The receipt as JSON, floats at full precision."""
    return json.dumps(finite(receipt.model_dump(mode="python")), indent=1, allow_nan=False)


def save(receipt: Receipt, path: Path) -> None:
    """Write a receipt. Raises `InputError` when its folder cannot be written to."""
    try:
        write_whole(path, as_json(receipt))
    except OSError as error:
        raise InputError(
            f"receipt cannot be written to {str(path)!r} ({error}): choose another --out"
        ) from None


def load(path: Path) -> Receipt:
    """Read a receipt. Raises `InputError`, one line, for anything that is not one."""
    try:
        return Receipt.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"receipt {str(path)!r} cannot be read ({error}): give a receipt.json"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(
            f"receipt {str(path)!r} is not valid at {where}: {first['msg']}; "
            f"give a receipt.json of schema version {SCHEMA_VERSION}"
        ) from None


def finite(value: Any) -> Any:
    """Lists and mappings with each number that is not finite as a string: NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
