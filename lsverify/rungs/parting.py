"""Where a path's forward values part from full autograd's: the first layer, and the first token in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lsverify.observe import Run
from lsverify.referee import Referee, floor_dtype
from lsverify.trace import Place

# Values of one layer and token, relative to their size: well above rounding, well below any fault.
PARTED_EPS = 2**20
Values = Mapping[tuple[str, Place], Tensor]


def parting(run: Run, referee: Referee) -> str:
    """In words, from a run of the path that kept every layer's values."""
    setting = referee.setting
    full = referee.full_values
    if run.trace is None or full.trace is None or not run.trace.values:
        return "no layer's values could be placed"
    eps = torch.finfo(floor_dtype(setting.config.dtype)).eps
    return first_layer(full.trace.values, run.trace.values, limit=min(PARTED_EPS * eps, 0.5))


def first_layer(expected: Values, actual: Values, limit: float) -> str:
    """The first layer, in the model's order, with a token whose values differ by more than `limit` (relative L2)."""
    layers = dict.fromkeys(layer for layer, _ in expected)
    for layer in layers:
        places = sorted(place for name, place in expected if name == layer)
        for place in places:
            key = (layer, place)
            if key not in actual:
                continue
            error = float((actual[key] - expected[key]).norm())
            if not error <= limit * float(expected[key].norm()):
                owner = "the prompt" if place.member < 0 else f"response {place.member}"
                return f"values part first in {layer}, at position {place.position} ({owner})"
    seen = len(expected.keys() & actual.keys())
    if seen < len(expected):
        return f"every layer's values agree at the {seen} of {len(expected)} places where they could be told"
    return "every layer's values agree: the difference is made after the last layer"
