"""Planted faults by kind, each with the rung that must refuse it: every check has been seen to fail.

`FAULTS` holds them by name. Each re-creates the kind of a fault that was reported in a public project, or one that
nobody reported yet, as one wrong piece in an honest step.
"""

from __future__ import annotations

from lsverify.faults import (
    accumulation,
    advantage,
    aggregation,
    balance,
    boundary,
    cotangent,
    decisions,
    kl,
    library,
    mask,
    optimizer,
    packing,
    precision,
    ratio,
    reduction,
    spans,
    staleness,
    state,
    surrogate,
    transaction,
)
from lsverify.faults.catalogue import Fault

_FAMILIES = (
    state,
    cotangent,
    library,
    boundary,
    packing,
    mask,
    aggregation,
    advantage,
    ratio,
    surrogate,
    kl,
    accumulation,
    reduction,
    precision,
    decisions,
    balance,
    transaction,
    optimizer,
    staleness,
    spans,
)

FAULTS: dict[str, Fault] = {fault.name: fault for family in _FAMILIES for fault in family.FAULTS}

__all__ = ["FAULTS", "Fault"]
