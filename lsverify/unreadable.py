"""The receipt of a candidate after which the model or the process can no longer be read."""

from __future__ import annotations

import os.path
import traceback

from lsverify.evidence import RUNGS, CaseConfig, CaseReceipt, Rung
from lsverify.setting import Setting


def unreadable(config: CaseConfig, setting: Setting, error: Exception) -> CaseReceipt:
    """What is known of the case when judging itself ended with `error`; `setting` is a fresh one."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    detail = (
        f"judging ended with {type(error).__name__} ({_text(error)}) in {where.name}, {os.path.basename(where.filename)} "
        f"line {where.lineno}: the candidate left the model or the process unfit to be compared (or lsverify is at fault, "
        "when the candidate does nothing unusual)"
    )
    rungs = [Rung(name=name, status="not_run") for name in RUNGS]
    rungs[RUNGS.index("execution")] = Rung(name="execution", status="error", detail=detail)
    return CaseReceipt(
        arch=config.arch,
        policy=config.policy,
        candidate=config.candidate,
        reference=config.policy or "full",
        dtype=config.dtype,
        prompt_length=config.prompt_length,
        group_size=config.group_size,
        response_lengths=setting.problem.response_lengths,
        objective=config.objective,
        seed=config.seed,
        rungs=tuple(rungs),
        gradient=None,
        bias=None,
        paper_gate=None,
        parameters=(),
        accounting={},
        config=config,
        problem=setting.problem.content_hash(),
    )


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"
