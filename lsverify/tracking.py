"""A gate's run in W&B: one table of cases, scalars per case, the receipt as a file. Offline unless asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lsverify.errors import InputError
from lsverify.evidence import CaseReceipt, Receipt, as_json, exit_code
from lsverify.report import HEADERS, row
from lsverify.whole_files import write_whole

MODES = ("offline", "online", "disabled")


def check_mode(mode: str) -> None:
    """Raises `InputError` for an unknown mode, or when wandb is wanted and not installed."""
    if mode not in MODES:
        raise InputError(f"wandb {mode!r} is not known: use one of {', '.join(MODES)}")
    if mode != "disabled" and importlib.util.find_spec("wandb") is None:
        raise InputError(
            "wandb is not installed: pip install 'lsverify[wandb]', or leave --wandb out"
        )


def log(
    receipt: Receipt, *, mode: str, folder: Path | None = None, project: str = "lsverify"
) -> Path | None:
    """Log a receipt; returns the run's folder, None when disabled. The folder holds all of the run, receipt included.

    Raises `InputError` when wandb refuses to start a run, for instance online without a key.
    """
    if mode == "disabled":
        return None
    import wandb

    where = folder or Path.cwd()
    where.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            settings=wandb.Settings(silent=True, console="off"),
            project=project,
            job_type="gate",
            mode=mode,  # type: ignore[arg-type]
            dir=str(where),
            config={
                "command": list(receipt.command),
                "environment": receipt.environment.model_dump(),
                "cases": [case.config.model_dump() for case in receipt.cases],
            },
        )
    except wandb.Error as error:
        raise InputError(f"wandb {mode}: {error} (--wandb offline needs no network)") from None
    try:
        cases = wandb.Table(columns=list(HEADERS), data=[row(case) for case in receipt.cases])
        run.log(
            {"gate": cases, **{k: v for case in receipt.cases for k, v in _scalars(case).items()}}
        )
        run.summary["exit_code"] = exit_code(receipt.cases)
        # A file of the run, not an artifact: offline, an artifact is staged outside the run's folder.
        file = Path(run.dir) / "receipt.json"
        write_whole(file, as_json(receipt))
        run.save(str(file), base_path=run.dir)
        return Path(run.dir).parent
    finally:
        run.finish()


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
