from __future__ import annotations

import math

import pytest
import torch
from small_steps import tokens

from lsverify.decisions import ChoiceMode, DecisionDigest, as_sets, margins

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.7], [2.0, -1.0, 3.0, 0.0]])
LOWEST = torch.finfo(torch.float32).min


def seen_by(call):
    """What the mode shows of every choice that `call` makes, as lists."""
    seen = []
    with ChoiceMode(lambda scores, chosen: seen.append((scores.tolist(), chosen.tolist()))):
        call()
    return seen


def digest(call):
    with DecisionDigest() as made:
        call()
    return made.hexdigest()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: torch.topk(x, 2), id="function"),
        pytest.param(lambda x: x.topk(2), id="method"),
        pytest.param(lambda x: torch.topk(x, 2, -1), id="positional dim"),
        pytest.param(lambda x: torch.topk(x, k=2, dim=1, sorted=False), id="last dim by number"),
        pytest.param(lambda x: torch.topk(input=x, k=2), id="all by name"),
        pytest.param(lambda x: x[None].topk(2)[1], id="batch of one"),
    ],
)
def test_topk_over_the_last_dimension_is_a_choice(call):
    ((scores, chosen),) = seen_by(lambda: call(SCORES))
    assert scores == SCORES.tolist()
    assert [sorted(row) for row in chosen] == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: torch.argmax(x, -1), id="function"),
        pytest.param(lambda x: x.argmax(dim=1), id="method"),
        pytest.param(lambda x: torch.argmax(x, dim=-1, keepdim=True), id="kept dimension"),
        pytest.param(lambda x: torch.argmax(input=x, dim=-1), id="all by name"),
    ],
)
def test_argmax_over_the_last_dimension_is_a_choice_of_one(call):
    assert seen_by(lambda: call(SCORES)) == [(SCORES.tolist(), [[1], [2]])]


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: torch.topk(x, 1, 0), id="topk over rows"),
        pytest.param(lambda x: torch.topk(x, 1, dim=-2), id="topk over rows from the end"),
        pytest.param(lambda x: x.argmax(0), id="argmax over rows"),
        pytest.param(lambda x: x.argmax(), id="argmax over all"),
        pytest.param(lambda x: torch.tensor(1.0).argmax(-1), id="argmax of a number"),
        pytest.param(lambda x: x.long().topk(1), id="topk of integers"),
        pytest.param(lambda x: x.long().argmax(-1), id="argmax of integers"),
        pytest.param(lambda x: x.max(-1), id="max"),
        pytest.param(lambda x: x.softmax(-1), id="softmax"),
    ],
)
def test_anything_else_is_no_choice(call):
    assert seen_by(lambda: call(SCORES)) == []


def test_the_best_of_no_candidates_are_no_choice():
    assert seen_by(lambda: torch.empty(2, 0).topk(0)) == []


def test_nothing_is_seen_outside_the_context():
    seen = []
    mode = ChoiceMode(lambda scores, chosen: seen.append(scores))
    with mode:
        pass
    SCORES.topk(1)
    assert seen == []


@pytest.mark.parametrize(
    "call", [lambda x: x.topk(1, -1, False), lambda x: torch.topk(x, 1, largest=False)]
)
def test_a_choice_of_the_smallest_is_shown_as_one_of_the_largest(call):
    ((scores, chosen),) = seen_by(lambda: call(SCORES))
    assert chosen == [[0], [1]]
    assert scores == (-SCORES).tolist()
    assert margins(torch.tensor(scores), 1).tolist() == pytest.approx([0.4, 1.0])


def test_the_other_choice_stands_and_carries_the_gradient():
    scores = SCORES.clone().requires_grad_()
    other = torch.tensor([[0, 2], [3, 1]])
    with ChoiceMode(lambda scores, chosen: other):
        values, indices = scores.topk(2)
    assert indices.tolist() == other.tolist()
    assert torch.equal(values, SCORES.gather(-1, other))
    values.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]


def test_the_other_choice_of_an_argmax_keeps_its_shape():
    with ChoiceMode(lambda scores, chosen: torch.tensor([[3], [0]])):
        assert SCORES.argmax(-1).tolist() == [3, 0]
        assert SCORES.argmax(-1, keepdim=True).tolist() == [[3], [0]]
        assert SCORES[None].argmax(-1).tolist() == [[3, 0]]
    with ChoiceMode(lambda scores, chosen: torch.tensor([[1]])):
        assert SCORES[0].argmax(-1).tolist() == 1


def test_results_are_unchanged_where_no_other_choice_is_given():
    with ChoiceMode(lambda scores, chosen: None):
        watched, index = SCORES.topk(2), SCORES.argmax(-1)
    assert torch.equal(watched.values, SCORES.topk(2).values)
    assert torch.equal(watched.indices, SCORES.topk(2).indices)
    assert torch.equal(index, SCORES.argmax(-1))


def test_a_set_has_no_order_and_no_ruled_out_candidates():
    scores = torch.tensor([[1.0, 5.0, 3.0, -math.inf], [LOWEST, 2.0, 1.0, LOWEST]])
    assert as_sets(scores, torch.tensor([[2, 1], [1, 2]])).tolist() == [[1, 2], [1, 2]]
    assert as_sets(scores, torch.tensor([[1, 2], [2, 1]])).tolist() == [[1, 2], [1, 2]]
    chosen = torch.tensor([[1, 3], [3, 1]], dtype=torch.int32)
    assert as_sets(scores, chosen).tolist() == [[-1, 1], [-1, 1]]


def test_a_margin_is_the_gap_between_the_worst_chosen_and_the_best_left_out():
    assert margins(SCORES, 2).tolist() == pytest.approx([0.2, 2.0])
    assert margins(SCORES, 1).tolist() == pytest.approx([0.2, 1.0])
    assert margins(torch.tensor([[1.0, 1.0, 0.0]]), 1).tolist() == [0.0]


def test_a_margin_is_infinite_where_nothing_was_left_out():
    masked = torch.tensor([[3.0, 1.0, -math.inf], [3.0, 1.0, LOWEST], [3.0, 1.0, 0.5]])
    assert margins(masked, 2).tolist() == [math.inf, math.inf, 0.5]
    assert margins(SCORES, 4).tolist() == [math.inf] * 2
    assert margins(SCORES, 5).tolist() == [math.inf] * 2


def test_a_digest_does_not_see_the_order_inside_a_set():
    values = torch.tensor([[4.0, 3.0, 1.0]])
    swapped = torch.tensor([[3.0, 4.0, 1.0]])
    assert digest(lambda: values.topk(2)) == digest(lambda: swapped.topk(2))


def test_a_digest_sees_the_order_of_rows_and_calls():
    a, b = SCORES[:1], SCORES[1:]

    def calls(*scores):
        return lambda: [each.topk(1) for each in scores]

    assert digest(calls(a, b)) == digest(calls(a, b))
    assert digest(calls(a, b)) != digest(calls(b, a))
    assert digest(calls(SCORES)) != digest(calls(SCORES.flip(0)))
    assert digest(calls(a)) != digest(calls(a, a))
    assert digest(calls()) != digest(calls(a))


def test_a_digest_does_not_see_what_was_ruled_out():
    first = torch.tensor([[1.0, -math.inf, -math.inf]])
    second = torch.tensor([[2.0, LOWEST, -math.inf]])
    assert digest(lambda: first.topk(2)) == digest(lambda: second.topk(2))


def test_one_flipped_expert_changes_the_digest_of_a_whole_pass(oracle):
    model, ids = oracle("glm_moe_dsa"), tokens(10)[None]

    @torch.no_grad()
    def run():
        model(input_ids=ids, use_cache=False)

    honest = digest(run)
    assert digest(run) == honest
    bias = model.model.layers[2].mlp.gate.e_score_correction_bias
    before = bias.clone()
    bias[0] += 0.5
    try:
        assert digest(run) != honest
    finally:
        bias.copy_(before)


def test_a_model_without_decisions_has_the_empty_digest(oracle):
    model = oracle("llama")
    assert digest(lambda: model(input_ids=tokens(4)[None])) == digest(lambda: None)
