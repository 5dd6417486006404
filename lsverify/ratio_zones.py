"""The zones that a clip cuts out of the ratio axis, and log-ratios drawn well inside a zone."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Generator, Tensor

# Share of a zone's width kept free at each edge. A clip side decided at 1e-12, or in bfloat16 for
# the usual clip of 0.2, must not depend on rounding; the promise made to callers is the weaker
# 0.05.
EDGE_MARGIN = 0.2
# Outer zones have no far edge. They are as wide as their neighbour, but no ratio runs off beyond
# exp(0.6).
OUTER_WIDTH = 0.6
# Zones narrower than this in log space cannot hold a value away from both edges in float64.
NARROWEST = 1e-9


@dataclass(frozen=True)
class Zone:
    """Log-ratios from `low` to `high`, edge margins already taken off; `side` counts edges away
    from ratio 1.

    side: 0 for the zone that holds ratio 1, negative below it, positive above it.
    """

    low: float
    high: float
    side: int

    def draw(self, count: int, generator: Generator) -> Tensor:
        """[count] float64, uniform."""
        uniform = torch.rand(count, generator=generator, dtype=torch.float64)
        return self.low + (self.high - self.low) * uniform


def log_edges(edges: Sequence[float]) -> tuple[float, ...]:
    """The edges that a ratio can reach (positive and finite), as sorted logs without near
    duplicates."""
    logs: list[float] = []
    for edge in sorted(edges):
        if 0 < edge < math.inf and (not logs or math.log(edge) - logs[-1] > NARROWEST):
            logs.append(math.log(edge))
    return tuple(logs)


def edge_width(edges: Sequence[float]) -> float:
    """The narrowest gap between neighbouring edges in log space: the unit in which distances are
    promised.

    With one edge there is no gap, and its distance to ratio 1 takes that part (at least 0.1).
    """
    logs = log_edges(edges)
    if len(logs) > 1:
        return min(high - low for low, high in pairwise(logs))
    return max(abs(logs[0]), 0.1) if logs else math.inf


def zones(edges: Sequence[float]) -> tuple[Zone, ...]:
    """All zones in ascending order, one more than there are edges.

    Without any edge (no clip) there is one zone, around ratio 1.
    """
    logs = log_edges(edges)
    if not logs:
        return (Zone(-0.3, 0.3, 0),)
    gaps = [high - low for low, high in pairwise(logs)] or [edge_width(edges)]
    below, above = min(gaps[0], OUTER_WIDTH), min(gaps[-1], OUTER_WIDTH)
    bounds = [logs[0] - below, *logs, logs[-1] + above]
    home = bisect_right(logs, 0.0)
    return tuple(
        Zone(low + EDGE_MARGIN * (high - low), high - EDGE_MARGIN * (high - low), index - home)
        for index, (low, high) in enumerate(pairwise(bounds))
    )


def zone_order(edges: Sequence[float], sign: int) -> tuple[Zone, ...]:
    """The zones in the order in which members whose advantage has this sign visit them.

    Ratio 1 first, so that a lone token keeps its gradient; then the side where the clip cuts the
    gradient of this sign (above for a positive advantage, below for a negative one); then the rest.
    """
    forward = 1 if sign >= 0 else -1
    return tuple(sorted(zones(edges), key=lambda zone: (zone.side * forward < 0, abs(zone.side))))
