from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from lsverify import memory
from lsverify.cache import new_cache
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.fresh_process import in_fresh_process
from lsverify.memory import LiveBytes, Phases, Resident, resident_peak
from lsverify.models import build

FLOAT = 4
ROWS, WIDTH, DEPTH = 64, 32, 5
HIDDEN, WEIGHT = ROWS * WIDTH * FLOAT, WIDTH * WIDTH * FLOAT


def chain_inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(DEPTH)]


def run_chain(x, weights):
    hidden = x
    for weight in weights:
        hidden = hidden @ weight
    return hidden


def model_step(arch="llama"):
    """Live peak of one step, as a function that a fresh process can call too."""
    model = build(arch, seed=0, dtype="float32")
    ids = torch.arange(24)[None]
    cache = new_cache(model.config)
    with LiveBytes() as live:
        with torch.no_grad():
            model(input_ids=ids[:, :16], cache=cache, use_cache=True)
        model(input_ids=ids[:, 16:], cache=cache, use_cache=True).logits.sum().backward()
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return {"peak": live.peak, "left": live.left, "gradients": gradients}


def test_a_chain_without_graph_holds_two_activations():
    x, weights = chain_inputs()
    with LiveBytes() as live:
        last = run_chain(x, weights)
    assert live.peak == 2 * HIDDEN
    assert live.left == last.nbytes == HIDDEN


def test_a_chain_under_autograd_holds_every_activation_and_the_gradients_so_far():
    x, weights = chain_inputs()
    for weight in weights:
        weight.requires_grad_()
    with LiveBytes() as live:
        loss = run_chain(x, weights).sum()
        assert live.now == (DEPTH - 1) * HIDDEN + FLOAT
        loss.backward()
    # Behind layer j: activations 1 to j - 1, the gradient that came and the one that goes, gradients of weights j on.
    # The first gradient is one number, expanded; beside it the loss.
    at_layer = [
        (j - 1) * HIDDEN
        + (HIDDEN if j < DEPTH else 0)
        + (HIDDEN if j > 1 else 0)
        + (DEPTH - j + 1) * WEIGHT
        for j in range(1, DEPTH + 1)
    ]
    assert live.peak == max(at_layer) + 2 * FLOAT
    assert live.left == DEPTH * WEIGHT + FLOAT


def test_views_and_writes_in_place_count_nothing():
    before = torch.zeros(100)
    with LiveBytes() as live:
        made = torch.zeros(100)
        views = [made.view(10, 10)[2:].T, made.detach(), before[3:], before.view(4, 25)]
        made.add_(1)
        before.mul_(2)
        assert live.now == 400
        del made
        assert live.now == 400
        views.clear()
        assert live.now == 0
    assert live.peak == 400


def test_storages_made_out_of_sight_or_resized_count():
    with LiveBytes() as live:
        literal = torch.tensor([1.0, 2.0])
        assert live.now == 8
        grown = torch.empty(0)
        grown.resize_(50)
        assert live.now == 208
        del literal, grown
        assert live.now == 0


def test_operations_with_several_results_count_each_storage_once():
    with LiveBytes() as live:
        values, indices = torch.arange(6.0).sort()
        parts = values.split(2)
        assert live.now == 6 * FLOAT + 6 * 8
        del values, indices
        assert live.now == 6 * FLOAT
        del parts
        assert live.now == 0


def test_a_python_autograd_function_is_seen_in_both_directions():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x * 2)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            return gradient * saved

    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        y = Doubled.apply(x)
        assert live.now == 800
        y.backward(y.detach())
    assert live.peak == 1200


@pytest.mark.parametrize("arch", sorted(DEFAULT_ARCHS))
def test_the_peak_repeats_to_the_byte(arch):
    first, second = model_step(arch), model_step(arch)
    assert first == second
    assert first["peak"] > first["left"] >= first["gradients"] > 0


def test_the_peak_is_the_same_in_another_process():
    assert in_fresh_process(f"{__name__}:model_step") == model_step()


def test_the_collector_is_paused_and_what_a_cycle_holds_counts():
    gc.enable()
    with LiveBytes() as live:
        assert not gc.isenabled()
        cycle = [torch.zeros(100)]
        cycle.append(cycle)
        del cycle
        assert live.now == 400
    assert gc.isenabled()


def test_a_leak_raises_the_peak_by_its_bytes():
    linear, leak = nn.Linear(16, 16), []

    def step(keep):
        hidden = linear(torch.ones(8, 16))
        if keep:
            leak.append(hidden.detach().clone())
        hidden.sum().backward()
        linear.zero_grad(set_to_none=True)

    def peak_of_two(keep):
        with LiveBytes() as live:
            step(keep)
            step(keep)
        return live.peak, live.left

    (clean, left), (leaky, still_there) = peak_of_two(False), peak_of_two(True)
    assert left == 0
    assert still_there == 2 * 8 * 16 * FLOAT
    assert leaky > clean


def test_a_graph_that_is_kept_raises_the_peak():
    x, weights = chain_inputs()
    for weight in weights:
        weight.requires_grad_()
    with LiveBytes() as one_at_a_time:
        for _ in range(3):
            run_chain(x, weights).sum().backward()
    with LiveBytes() as together:
        sum(run_chain(x, weights).sum() for _ in range(3)).backward()
    assert together.peak > 2 * one_at_a_time.peak - 2 * DEPTH * WEIGHT


def test_the_composition_at_the_peak_adds_up():
    x, weights = chain_inputs()
    with LiveBytes() as live:
        run_chain(x, weights)
    with LiveBytes(explain_at=live.peak) as again:
        run_chain(x, weights)
    assert again.composition == {"aten.mm.default [64, 32] float32": 2 * HIDDEN}


def test_resident_memory_sees_what_was_freed_before_the_end():
    size = 64 * 2**20
    with resident_peak() as resident:
        torch.ones(size // FLOAT)
    if memory.STATUS.exists():
        # The kernel counts pages per processor and adds them up now and then: some are missing.
        assert abs(resident.growth - size) < size / 50
    with resident_peak() as resident:
        torch.ones(8)
    if memory.STATUS.exists():
        assert resident.growth < size / 50


def test_where_the_mark_cannot_be_set_back_nothing_is_claimed(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    with resident_peak() as resident:
        torch.ones(8)
    assert resident == Resident(baseline=None, peak=None)
    assert resident.growth is None
    phases = Phases()
    with phases("capture"):
        pass
    assert phases.resident["capture"].peak is None


def test_phases_add_up_and_keep_the_larger_peak(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.0, 12.0, 15.0])
    peaks = iter([5, 9, 7])
    monkeypatch.setattr(memory, "_synchronised_clock", lambda: next(ticks))
    monkeypatch.setattr(
        memory.HighWaterMark, "read", lambda _: Resident(baseline=1, peak=next(peaks))
    )
    phases = Phases()
    with phases("replay"):
        pass
    phases.begin("sweep")
    phases.begin("sweep")
    phases.begin("replay")
    phases.end()
    phases.end()
    assert phases.seconds == {"replay": 1.0 + 3.0, "sweep": 2.0}
    assert {name: found.peak for name, found in phases.resident.items()} == {
        "replay": 7,
        "sweep": 9,
    }


def test_a_phase_inside_a_phase_is_refused():
    phases = Phases()
    with phases("capture"), pytest.raises(InputError, match="'replay' begins inside 'capture'"):
        with phases("replay"):
            pass
    with phases("replay"):
        pass
