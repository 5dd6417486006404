from __future__ import annotations

import math

import pytest
import torch

from lsverify.ratio_zones import edge_width, log_edges, zone_order, zones

TOKEN, DUAL, SEQUENCE, ONE_SIDED = (0.8, 1.2), (0.8, 1.28, 3.0), (1 - 3e-4, 1 + 4e-4), (6.0,)
EDGES = [TOKEN, DUAL, SEQUENCE, ONE_SIDED, (), (0.0, 1.2), (0.8, math.inf), (0.5, 1.0, 1.5)]


@pytest.mark.parametrize("edges", EDGES)
def test_draws_stay_in_their_zone_and_away_from_every_edge(edges):
    generator = torch.Generator().manual_seed(0)
    logs = log_edges(edges)
    found = zones(edges)
    assert len(found) == len(logs) + 1
    for index, zone in enumerate(found):
        drawn = zone.draw(500, generator)
        for below in logs[:index]:
            assert float(drawn.min()) - below >= 0.05 * edge_width(edges)
        for above in logs[index:]:
            assert above - float(drawn.max()) >= 0.05 * edge_width(edges)
        assert float(drawn.std()) > 0


def test_a_planted_zone_without_margin_would_reach_the_edge():
    low, high = log_edges(TOKEN)
    generator = torch.Generator().manual_seed(0)
    drawn = low + (high - low) * torch.rand(500, generator=generator, dtype=torch.float64)
    assert float((drawn - low).min()) < 0.05 * edge_width(TOKEN)


@pytest.mark.parametrize("edges", [TOKEN, DUAL, SEQUENCE, ONE_SIDED])
def test_side_zero_holds_ratio_one(edges):
    logs = log_edges(edges)
    sides = [zone.side for zone in zones(edges)]
    assert sides == [index - sum(edge < 0 for edge in logs) for index in range(len(logs) + 1)]


def test_edges_that_no_ratio_reaches_and_duplicates_cut_nothing():
    assert log_edges((1.2, 0.0, -1.0, math.inf, 1.2, 0.8)) == (math.log(0.8), math.log(1.2))
    assert edge_width(()) == math.inf


def test_the_side_where_the_gradient_is_cut_comes_after_ratio_one():
    assert [zone.side for zone in zone_order(DUAL, +1)] == [0, 1, 2, -1]
    assert [zone.side for zone in zone_order(DUAL, -1)] == [0, -1, 1, 2]
    assert [zone.side for zone in zone_order((), -1)] == [0]
