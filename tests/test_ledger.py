from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lsverify.cache import state_of
from lsverify.cases import DEFAULT_ARCHS
from lsverify.errors import InputError
from lsverify.ledger import (
    MemoryModel,
    Shared,
    checkpoint_bytes,
    cotangent_bytes,
    expected_schedule,
    ideal_work,
    phase_of,
    pieces,
    shared,
    state_bytes,
    update_seconds,
)
from lsverify.models import VOCABULARY, build
from lsverify.objective import preset
from lsverify.paths import full_autograd, longstraw, score
from lsverify.policies import parse_policy
from lsverify.problems import Problem, ProblemSpec, draw
from lsverify.prompt import capture
from lsverify.watch import Watch

ARCHS = sorted(DEFAULT_ARCHS)
GRPO = preset("grpo")
UNEVEN = draw(
    ProblemSpec(prompt_lengths=(21, 13), group_sizes=(2, 1), response_lengths=(6, 1, 4)), VOCABULARY
)
ONE = (Shared(100, (10, 20)),)


def seen(watch):
    return [(event.tokens, event.grad_enabled) for event in watch.forwards]


def scheduled(path, problem, policy=None, **options):
    policy = parse_policy(policy) if policy else None
    plan = expected_schedule(path, shared(problem), policy, **options)
    return [(p.rows * p.tokens, p.grad) for p in plan]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("policy", ["exact", "detach", "window:7", "tail:4", "tail:3+window:2"])
def test_longstraw_forwards_just_what_the_schedule_says(arch, policy):
    model = build(arch, seed=0, dtype="float32")
    with Watch(model) as watch:
        longstraw(model, UNEVEN, GRPO, policy=policy, chunk=5)
    assert seen(watch) == scheduled("longstraw", UNEVEN, policy, chunk=5)
    work = ideal_work("longstraw", shared(UNEVEN), parse_policy(policy))
    assert (watch.tokens().no_grad, watch.tokens().grad) == (work.tokens_no_grad, work.tokens_grad)


@pytest.mark.parametrize("branches", [2, 3, 9])
def test_responses_replayed_together_are_padded_to_the_longest(branches):
    model = build("qwen3_5", seed=0, dtype="float32")
    with Watch(model) as watch:
        longstraw(model, UNEVEN, GRPO, policy="tail:3", chunk=5, branches=branches)
    assert seen(watch) == scheduled("longstraw", UNEVEN, "tail:3", chunk=5, branches=branches)


def test_full_autograd_forwards_just_what_the_schedule_says():
    model = build("llama", seed=0, dtype="float32")
    with Watch(model) as watch:
        full_autograd(model, UNEVEN, GRPO)
    assert seen(watch) == scheduled("full_serial", UNEVEN) == [(26, True), (21, True), (16, True)]


def test_scoring_forwards_just_what_the_schedule_says():
    model = build("llama", seed=0, dtype="float32")
    with Watch(model) as watch:
        score(model, UNEVEN, policy="detach", chunk=5)
    one_more = scheduled("longstraw", UNEVEN, "detach", chunk=5, scored=1)
    assert seen(watch) == one_more[: len(seen(watch))]
    assert one_more[len(seen(watch)) :] == scheduled("longstraw", UNEVEN, "detach", chunk=5)


def test_a_path_that_forwards_the_prompt_twice_does_not_fit_the_schedule():
    model = build("llama", seed=0, dtype="float32")
    with Watch(model) as watch:
        with torch.no_grad():
            model(input_ids=UNEVEN.prompt(0)[None])
        longstraw(model, UNEVEN, GRPO, policy="detach", chunk=5)
    assert seen(watch) != scheduled("longstraw", UNEVEN, "detach", chunk=5)
    assert (
        watch.tokens().total
        > ideal_work("longstraw", shared(UNEVEN), parse_policy("detach")).tokens
    )


def test_ideal_tokens_by_hand():
    exact = ideal_work("longstraw", ONE, parse_policy("exact"))
    assert (exact.tokens_no_grad, exact.tokens_grad) == (99, 10 + 20 + 99)
    detach = ideal_work("longstraw", ONE, parse_policy("detach"))
    assert (detach.tokens_no_grad, detach.tokens_grad) == (99, 10 + 20)
    tail = ideal_work("longstraw", ONE, parse_policy("tail:5"))
    assert (tail.tokens_no_grad, tail.tokens_grad) == (95, 14 + 24)
    window = ideal_work("longstraw", ONE, parse_policy("window:30"))
    assert (window.tokens_no_grad, window.tokens_grad) == (99, 10 + 20 + 30)
    assert ideal_work("full_serial", ONE).tokens_grad == 109 + 119
    assert ideal_work("full_batched", ONE).tokens_grad == 2 * 119
    assert ideal_work("full_serial", ONE, scored=2).tokens_no_grad == 2 * (109 + 119)
    assert (
        ideal_work("longstraw", ONE, parse_policy("exact"), scored=1).tokens_no_grad == 99 + 99 + 30
    )


def test_the_batch_is_padded_to_the_longest_prompt_and_the_longest_response():
    prompts = (Shared(10, (9, 2)), Shared(30, (4,)))
    assert ideal_work("full_batched", prompts).tokens_grad == 3 * (30 + 9 - 1)


@pytest.mark.parametrize("policy", ["exact", "window:99", "window:500"])
def test_policies_that_sweep_everything_cost_the_same(policy):
    assert ideal_work("longstraw", ONE, parse_policy(policy)) == ideal_work(
        "longstraw", ONE, parse_policy("exact")
    )


@pytest.mark.parametrize("chunk", [1, 5, 7, 98, 99, 100, 1000])
def test_chunks_change_neither_tokens_nor_pairs(chunk):
    policy = parse_policy("window:40")
    plan = expected_schedule("longstraw", ONE, policy, chunk=chunk)
    work = ideal_work("longstraw", ONE, policy)
    assert sum(p.tokens for p in plan) == work.tokens
    assert sum(p.pairs for p in plan) == work.pairs_no_grad + work.pairs_grad
    assert max(p.tokens for p in plan if p.phase in ("capture", "sweep")) <= chunk


def test_attention_pairs_by_hand():
    # Position t attends to t + 1 keys: 1 + 2 + ... + 12 for a prompt of 10 and a response of 3.
    assert ideal_work("full_serial", (Shared(10, (3,)),)).pairs_grad == 78
    exact = ideal_work("longstraw", (Shared(10, (3,)),), parse_policy("exact"))
    assert (exact.pairs_no_grad, exact.pairs_grad) == (45, 10 + 11 + 12 + 45)


def test_a_token_under_autograd_costs_three_forward_passes():
    exact = ideal_work("longstraw", (Shared(10, (3,)),), parse_policy("exact"))
    assert exact.cost(per_token=1.0, per_pair=0.0) == 9 + 3 * (3 + 9)
    assert exact.cost(per_token=0.0, per_pair=1.0) == 45 + 3 * 78


def test_a_one_token_prompt_has_nothing_to_capture():
    plan = expected_schedule("longstraw", (Shared(1, (4, 4)),), parse_policy("exact"), chunk=8)
    assert [(p.phase, p.start, p.tokens) for p in plan] == [("replay", 0, 4)] * 2


def test_pieces_cover_a_stretch_in_order():
    assert pieces(3, 10, 3) == [(3, 6), (6, 9), (9, 10)]
    assert pieces(3, 10, None) == [(3, 10)]
    assert pieces(3, 3, None) == []


def test_groups_with_equal_prompts_are_one():
    first, second = UNEVEN.groups
    twice = Problem(groups=(first, second, first))
    assert shared(twice) == (Shared(21, (6, 1, 6, 1)), Shared(13, (4,)))


def test_an_unknown_path_and_a_missing_policy_are_refused():
    with pytest.raises(InputError, match=r"path 'fast' is not known: use one of full_batched"):
        expected_schedule("fast", ONE)
    with pytest.raises(InputError, match=r"path 'longstraw' needs a policy"):
        expected_schedule("longstraw", ONE)


@pytest.mark.parametrize("arch", ARCHS)
def test_phases_are_told_apart_by_tokens_and_positions_alone(arch):
    model = build(arch, seed=0, dtype="float32")
    with Watch(model) as watch:
        longstraw(model, UNEVEN, GRPO, policy="exact", chunk=8)
    phases = [phase_of(event, UNEVEN) for event in watch.forwards]
    first = ["capture"] * 3 + ["replay"] * 2 + ["sweep"] * 3
    assert phases == [*first, "capture", "capture", "replay", "sweep", "sweep"]


def test_full_autograd_and_scoring_are_phases_of_their_own():
    model = build("llama", seed=0, dtype="float32")
    with Watch(model) as watch:
        full_autograd(model, UNEVEN, GRPO, batched=True)
        score(model, UNEVEN.select([1]), chunk=20)
    phases = [phase_of(event, UNEVEN) for event in watch.forwards]
    assert phases == ["whole", "capture", "score"]


@dataclass(frozen=True)
class Row:
    kind: str
    shape: tuple[int, ...]
    dtype: str


STATE = [
    Row("attention", (1, 2, 10, 4), "float32"),
    Row("index", (1, 10, 8), "bfloat16"),
    Row("recurrent", (1, 3, 5), "float32"),
    Row("conv", (1, 7, 4), "float64"),
]


def test_state_bytes_by_hand():
    assert state_bytes(STATE) == 80 * 4 + 80 * 2 + 15 * 4 + 28 * 8
    assert cotangent_bytes(STATE) == state_bytes(STATE) - 80 * 2
    assert checkpoint_bytes(STATE, chunks=4) == 3 * (15 * 4 + 28 * 8)
    assert checkpoint_bytes(STATE, chunks=1) == checkpoint_bytes(STATE, chunks=0) == 0
    assert state_bytes([]) == 0


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="dtype 'Tensor' is not known"):
        state_bytes([Row("attention", (1,), "Tensor")])


@pytest.mark.parametrize("arch", ARCHS)
def test_state_bytes_from_shapes_are_those_of_the_tensors(arch):
    model = build(arch, seed=0, dtype="float32")
    state = capture(model, UNEVEN.prompt(0), boundary=20, chunk=8, keep_from=0)
    held = sum(tensor.nbytes for tensor in state_of(state.cache).values())
    assert state_bytes(state.inventory()) == held > 0


def test_the_memory_model_takes_the_largest_branch_only():
    sizes = {"fixed": 1000, "prompt": 100, "gradients": 50}
    assert MemoryModel(**sizes, branches=(7, 9, 8)).live == 1159
    assert MemoryModel(**sizes, branches=(9,) * 64).live == 1159
    assert MemoryModel(**sizes, branches=(7, 9), scores=4, swept=30).live == 1184
    assert MemoryModel(**sizes, branches=()).live == 1150


def test_the_time_model_adds_every_replay():
    assert update_seconds(5.0, [1.0, 2.0]) == 8.0
    assert update_seconds(5.0, [1.0, 2.0], sweep=4.0) == 12.0
