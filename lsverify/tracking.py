"""A gate's or an ablation's run in W&B: tables, scalars per case, the whole as a file. Offline unless asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lsverify.ablation_records import Ablation
from lsverify.ablation_records import Row as AblationRow
from lsverify.errors import InputError
from lsverify.evidence import CaseReceipt, Receipt, as_json, exit_code
from lsverify.report import HEADERS, row
from lsverify.whole_files import write_whole

MODES = ("offline", "online", "disabled")
UPLOAD_SECONDS = 120  # without a limit a run whose network is lost waits for it for ever


def check_mode(mode: str) -> None:
    """Raises `InputError` for an unknown mode, or when wandb is wanted and not installed."""
    if mode not in MODES:
        raise InputError(f"wandb {mode!r} is not known: use one of {', '.join(MODES)}")
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "wandb is not installed: pip install 'lsverify[wandb]', or use --wandb disabled"
        )


def log(
    receipt: Receipt, *, mode: str, folder: Path | None = None, project: str = "lsverify"
) -> Path | None:
    """Log a receipt; returns the run's folder, None when disabled. The folder holds all of the run, receipt included.

    Raises `InputError` when wandb refuses to start a run, for instance online without a key.
    """
    if mode == "disabled":
        return None
    config = {
        "command": list(receipt.command),
        "environment": receipt.environment.model_dump(),
        "cases": [case.config.model_dump() for case in receipt.cases],
    }
    scalars = {k: v for case in receipt.cases for k, v in _scalars(case).items()}
    with started(mode, folder, project, "gate", config) as run:
        import wandb

        cases = wandb.Table(columns=list(HEADERS), data=[row(case) for case in receipt.cases])
        run.log({"gate": cases, **scalars})
        run.summary["exit_code"] = exit_code(receipt.cases)
        return _kept(run, "receipt.json", as_json(receipt))


def log_ablation(
    ablation: Ablation, *, mode: str, folder: Path | None = None, project: str = "lsverify"
) -> Path | None:
    """The same for an ablation: its tables, scalars per row, ablation.json as a file. Raises as `log` does."""
    if mode == "disabled":
        return None
    from lsverify.ablation_report import sheets

    config = {
        "command": list(ablation.command),
        "environment": ablation.environment.model_dump(),
        "dtype": ablation.dtype,
        "objective": ablation.objective,
    }
    scalars = {k: v for found in ablation.rows for k, v in _of_row(found).items()}
    with started(mode, folder, project, "ablate", config) as run:
        import wandb

        tables = {
            sheet.key: wandb.Table(columns=list(sheet.headers), data=[*map(list, sheet.rows)])
            for sheet in sheets(ablation)
        }
        run.log({**tables, **scalars})
        run.summary["exit_code"] = ablation.exit_code
        return _kept(run, "ablation.json", ablation.model_dump_json(indent=1) + "\n")


@contextmanager
def started(
    mode: str,
    folder: Path | None,
    project: str,
    job: str,
    config: dict[str, Any],
    **named: str,
) -> Iterator[Any]:
    """A run that is finished at the end, whatever happens inside; `named`: its group, name or id. Raises `InputError`."""
    import wandb

    where = folder or Path.cwd()
    where.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            settings=wandb.Settings(
                silent=True,
                console="off",
                finish_timeout=UPLOAD_SECONDS,
                finish_timeout_raises=True,
            ),
            project=project,
            job_type=job,
            mode=mode,  # type: ignore[arg-type]
            dir=str(where),
            config=config,
            **named,  # type: ignore[arg-type]
        )
    except wandb.Error as error:
        raise InputError(f"wandb {mode}: {error} (--wandb offline needs no network)") from None
    try:
        yield run
    finally:
        try:
            run.finish()
        except TimeoutError:
            raise InputError(
                f"wandb {mode}: not all was sent in {UPLOAD_SECONDS} s: wandb sync {Path(run.dir).parent} sends the rest"
            ) from None


def _kept(run: Any, name: str, content: str | bytes) -> Path:
    """Keep a file in the run; returns the run's folder."""
    write_whole(Path(run.dir) / name, content)
    run.save(str(Path(run.dir) / name), base_path=run.dir)
    return Path(run.dir).parent


def keep_files(run: Any, name: str, kind: str, files: Sequence[Path]) -> Path:
    """Keep copies of files in the run and log them as one artifact; returns the run's folder."""
    import wandb

    copies = [_kept(run, file.name, file.read_bytes()) / "files" / file.name for file in files]
    artifact = wandb.Artifact(name, kind)
    for copy in copies:
        # By default wandb makes a second copy of what may change.
        artifact.add_file(str(copy), policy="immutable", skip_cache=True)
    run.log_artifact(artifact)
    return Path(run.dir).parent


def _of_row(row: AblationRow) -> dict[str, Any]:
    """Numbers of one row under `arch/policy/prompt/seed/...`; a number that does not exist is left out."""
    name = f"{row.arch}/{row.policy}/{row.length}/{row.seed}"
    fields = ("rel_l2", "cosine", "norm_ratio", "to_claim", "tokens", "live_bytes", "seconds")
    numbers = {field: getattr(row, field) for field in (*fields, "variance")}
    return {f"{name}/{field}": value for field, value in numbers.items() if value is not None}


def _scalars(case: CaseReceipt) -> dict[str, Any]:
    """Numbers of one case under `arch/policy/...`; a number that does not exist is left out."""
    name = "/".join(filter(None, (case.arch, case.candidate, case.policy)))
    numbers: dict[str, Any] = {"reached": int(case.reached)}
    numbers |= {f"{rung.name}/measure": rung.measure for rung in case.rungs}
    for side, distance in (("gradient", case.gradient), ("bias", case.bias)):
        if distance is not None:
            fields = ("rel_l2", "cosine", "norm_ratio")
            numbers |= {f"{side}/{field}": getattr(distance, field) for field in fields}
    numbers |= {f"accounting/{key}": value for key, value in case.accounting.items()}
    return {f"{name}/{key}": value for key, value in numbers.items() if value is not None}
