from __future__ import annotations

import warnings

import pytest
import torch

from lsverify.errors import InputError
from lsverify.problems import Problem, ProblemSpec, draw
from lsverify.rollouts import UnsharedPromptWarning, forwarded_tokens, warn_unshared

PROMPT_A, PROMPT_B = [5, 6, 7], [5, 6]


def rows_of(*pairs):
    return [torch.tensor(prompt + response) for prompt, response in pairs]


def interleaved(**changes):
    """Two groups whose rows alternate, so that neither a stride nor neighbourhood finds them."""
    values = {
        "sequences": rows_of(
            (PROMPT_A, [1]), (PROMPT_B, [2, 3]), (PROMPT_A, [4, 1]), (PROMPT_B, [8])
        ),
        "prompt_lengths": [3, 2, 3, 2],
        "group_ids": ["a", "b", "a", "b"],
        "rewards": [0.0, 1.0, 2.0, 3.0],
        "old_logp": [torch.tensor(each) for each in ([-0.1], [-0.2, -0.3], [-0.4, -0.5], [-0.6])],
    } | changes
    return Problem.from_rollouts(values.pop("sequences"), **values)


def test_rows_are_grouped_by_id_in_order_of_first_appearance():
    problem = interleaved()
    assert [group.prompt.tolist() for group in problem.groups] == [PROMPT_A, PROMPT_B]
    assert [each.tokens.tolist() for each in problem.responses] == [[1], [4, 1], [2, 3], [8]]
    assert [each.reward for each in problem.responses] == [0.0, 2.0, 1.0, 3.0]
    assert problem.responses[1].old_logp.dtype == torch.float64
    assert all(bool(each.mask.all()) for each in problem.responses)


def test_python_floats_keep_their_last_bit():
    old = [[-0.1], [-0.2, -0.3], [-0.4, -0.5], [-1 / 3]]
    problem = interleaved(old_logp=old, rewards=[0.1, 1.0, 2.0, 3.0])
    assert problem.responses[3].old_logp.tolist() == [-1 / 3]
    assert problem.responses[0].reward == 0.1


def test_equal_prompts_with_different_ids_stay_different_groups():
    rows = rows_of((PROMPT_A, [1]), (PROMPT_A, [2]), (PROMPT_A, [3]), (PROMPT_A, [4]))
    problem = interleaved(sequences=rows, prompt_lengths=3, old_logp=[[-0.1]] * 4)
    assert problem.group_sizes == (2, 2)
    assert problem.prompt_hash(0) == problem.prompt_hash(1)


@pytest.mark.parametrize("lengths", [{"a": 3, "b": 2}, [3, 2, 3, 2], torch.tensor([3, 2, 3, 2])])
def test_prompt_lengths_per_group_and_per_row_mean_the_same(lengths):
    assert interleaved(prompt_lengths=lengths).content_hash() == interleaved().content_hash()


def test_ids_in_a_tensor_or_as_tensors_group_by_value_not_by_identity():
    ids = torch.tensor([0, 1, 0, 1])
    assert interleaved(group_ids=ids).content_hash() == interleaved().content_hash()
    assert interleaved(group_ids=list(ids)).content_hash() == interleaved().content_hash()


def test_optional_columns_reach_their_member():
    problem = interleaved(
        masks=[[1], [0, 1], [True, False], torch.tensor([True])],
        truncated=torch.tensor([False, True, False, False]),
        ref_logp=[[-1.0], [-2.0, -3.0], [-4.0, -5.0], [-6.0]],
        seed=7,
    )
    assert [each.mask.tolist() for each in problem.responses] == [
        [True],
        [True, False],
        [False, True],
        [True],
    ]
    assert [each.truncated for each in problem.responses] == [False, False, True, False]
    assert problem.responses[1].ref_logp.tolist() == [-4.0, -5.0]
    assert problem.seed == 7


def test_a_problem_does_not_change_when_the_trainer_reuses_its_buffers():
    rows = rows_of((PROMPT_A, [1]), (PROMPT_A, [2]))
    logp = torch.zeros(2, 1, dtype=torch.float64)
    problem = Problem.from_rollouts(
        rows, prompt_lengths=3, group_ids=[0, 0], rewards=[0.0, 1.0], old_logp=list(logp)
    )
    before = problem.content_hash()
    rows[0].zero_()
    rows[1].zero_()
    logp.fill_(9.0)
    assert problem.content_hash() == before


def test_a_prefix_that_differs_names_group_rows_position_and_tokens():
    rows = rows_of((PROMPT_A, [1]), (PROMPT_B, [2, 3]), ([5, 9, 7], [4, 1]), (PROMPT_B, [8]))
    with pytest.raises(InputError) as caught:
        interleaved(sequences=rows)
    assert str(caught.value) == (
        "group 'a': the prompts of rows 0 and 2 differ first at position 1, token 6 against 9; "
        "give rows with different prompts different group ids"
    )


def test_a_prefix_that_differs_in_length_names_both_lengths():
    with pytest.raises(InputError, match="group 'a': row 0 has a prompt of 3 tokens, row 2 of 4"):
        interleaved(prompt_lengths=[3, 2, 4, 2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [0.0]}, "rewards has 1 entries for 4 rows; give one per row"),
        ({"prompt_lengths": [3, 2]}, "prompt_lengths has 2 entries for 4 rows"),
        ({"prompt_lengths": {"a": 3}}, "prompt_lengths has no entry for group 'b'"),
        ({"prompt_lengths": [3.0, 2.0, 3.0, 2.0]}, "prompt_lengths holds something other than int"),
        ({"prompt_lengths": 0}, "row 0: prompt length 0 of 4 tokens; at least one token"),
        ({"prompt_lengths": 4}, "row 0: prompt length 4 of 4 tokens; at least one token"),
        ({"masks": [[1], [0, 2], [1, 1], [1]]}, "row 1: mask holds values other than 0 and 1"),
        ({"masks": [[1], [0], [1, 1], [1]]}, "row 1: mask has 1 elements; the response has 2"),
        ({"rewards": [0.0, float("nan"), 1.0, 1.0]}, "row 1: reward is nan; it must be finite"),
        ({"old_logp": [[-1.0], None, [0.0, 0.0], [0.0]]}, "row 1: old_logp is a NoneType"),
        ({"old_logp": [[-1.0], "x", [0.0, 0.0], [0.0]]}, "row 1: old_logp is a str that torch"),
        (
            {"old_logp": [[-1.0], [1, 2], [0.0, 0.0], [0.0]]},
            "old_logp has dtype torch.int64; give fl",
        ),
        (
            {"sequences": [[0.5, 1.0]] * 4},
            r"row 0 is torch.float32 \[2\]; give one dimension of int",
        ),
    ],
)
def test_rows_that_do_not_fit_are_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        interleaved(**changes)
    assert "\n" not in str(caught.value)


def test_no_rows_are_refused():
    with pytest.raises(InputError, match="there are no rollouts"):
        Problem.from_rollouts([], prompt_lengths=1, group_ids=[], rewards=[], old_logp=[])


def test_forwarded_tokens_are_counted_from_the_definition():
    problem = draw(
        ProblemSpec(prompt_lengths=(10, 7), group_sizes=(3, 1), response_lengths=(4,)), 50
    )
    cost = forwarded_tokens(problem, live_tail=2)
    assert (cost.capture, cost.replay, cost.sweep) == (8 + 5, 4 * (2 + 4 - 1), 8 + 5)
    assert cost.ordinary == 3 * (10 + 4) + (7 + 4)
    assert cost.shared == 13 + 20 + 13


def test_equal_prompts_are_captured_once_and_a_long_tail_is_clamped():
    problem = draw(ProblemSpec(prompt_lengths=(3, 1), group_sizes=(2,), response_lengths=(4,)), 50)
    assert forwarded_tokens(problem.select([0, 0])).capture == 2
    assert forwarded_tokens(problem, live_tail=9).capture == 0
    assert forwarded_tokens(problem, live_tail=9).replay == 2 * (3 + 3) + 2 * (1 + 3)
    with pytest.raises(InputError, match="live_tail is 0"):
        forwarded_tokens(problem, live_tail=0)


def test_unshared_prompts_run_with_a_warning_that_predicts_the_cost():
    rows = rows_of((PROMPT_A, [1, 2]), (PROMPT_B, [2, 3]))
    with pytest.warns(UnsharedPromptWarning) as caught:
        problem = Problem.from_rollouts(
            rows,
            prompt_lengths=[3, 2],
            group_ids=[0, 1],
            rewards=[0.0, 1.0],
            old_logp=[[0.0, 0.0]] * 2,
        )
    assert problem.group_sizes == (1, 1)
    assert [str(each.message) for each in caught] == [
        "no prompt is shared by two responses: for them a shared path forwards 10 tokens (capture 3, "
        "replay 4, sweep 3) where ordinary training forwards 9, 1.11 times as many"
    ]


def test_a_group_of_one_among_others_is_warned_of_by_index():
    problem = draw(
        ProblemSpec(prompt_lengths=(9, 5), group_sizes=(3, 1), response_lengths=(2,)), 50
    )
    with pytest.warns(
        UnsharedPromptWarning, match=r"prompts of 1 of 2 groups \(1\).* forwards 10 .* 7,"
    ):
        warn_unshared(problem)


def test_shared_prompts_do_not_warn_even_as_groups_of_one_with_equal_content():
    problem = draw(ProblemSpec(prompt_lengths=(9,), group_sizes=(1,), response_lengths=(2,)), 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_unshared(problem.select([0, 0]))
        interleaved()
