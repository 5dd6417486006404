"""A receipt run again: the same cases from their configs alone, compared number by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsverify.check import check
from lsverify.evidence import CaseReceipt, Environment, Receipt, finite
from lsverify.ladder import judge

# Time differs from run to run; everything else is to repeat to the bit.
TIMES = ("seconds", "seconds_full")


def run_again(receipt: Receipt) -> list[CaseReceipt]:
    """Judge every case of a receipt from its config, or from its files. Raises `InputError` for what cannot be had here."""
    return [_again(case) for case in receipt.cases]


def _again(case: CaseReceipt) -> CaseReceipt:
    if case.files is None:
        return judge(case.config)
    return check(
        Path(case.files.folder),
        Path(case.files.gradients),
        map_spec=case.files.map,
        allow_missing=case.files.allow_missing,
        require=case.config.require,
    )


def differences(before: Sequence[CaseReceipt], after: Sequence[CaseReceipt]) -> list[str]:
    """One line for each value that is not the same in both; empty when all are."""
    found: list[str] = []
    for old, new in zip(before, after, strict=True):
        name = " ".join(filter(None, (old.arch, old.candidate, old.policy)))
        a, b = (_flat(finite(case.model_dump(mode="json"))) for case in (old, new))
        found += [
            f"{name}: {key} was {a.get(key)} and is {b.get(key)}"
            for key in sorted(a.keys() | b.keys())
            if key.rpartition(".")[2] not in TIMES and a.get(key) != b.get(key)
        ]
    return found


def elsewhere(before: Environment, now: Environment) -> list[str]:
    """One line for each part of the environment that is another: no fault, but where a difference may come from."""
    a, b = _flat(before.model_dump(mode="json")), _flat(now.model_dump(mode="json"))
    return [
        f"environment: {key} was {a.get(key)} and is {b.get(key)}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key) != b.get(key)
    ]


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        pairs = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {path: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= _flat(item, f"{path}.{key}" if path else key)
    return flat
