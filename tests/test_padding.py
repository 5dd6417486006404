from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lsverify.errors import InputError
from lsverify.padding import PaddedBatch
from lsverify.problems import Group, Problem, ProblemSpec, Response, draw

SIDES = ("left", "right")


def numbered(prompt, *responses):
    return Group(
        prompt=torch.tensor(prompt),
        responses=tuple(
            Response(
                tokens=torch.tensor(tokens),
                mask=torch.tensor(mask).bool(),
                reward=1.0,
                old_logp=torch.zeros(len(tokens), dtype=torch.float64),
            )
            for tokens, mask in responses
        ),
    )


SMALL = Problem(
    groups=(
        numbered([1, 2, 3], ([4, 5], [1, 1]), ([6], [1])),
        numbered([7], ([8, 9, 10], [1, 0, 1])),
    )
)


def test_left_puts_all_responses_in_one_column_between_blocks():
    batch = SMALL.padded("left", pad_token_id=99)
    assert batch.input_ids.tolist() == [
        [1, 2, 3, 4, 5, 99],
        [1, 2, 3, 6, 99, 99],
        [99, 99, 7, 8, 9, 10],
    ]
    assert batch.attention_mask.tolist() == [
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1],
    ]
    assert batch.position_ids.tolist() == [
        [0, 1, 2, 3, 4, 0],
        [0, 1, 2, 3, 0, 0],
        [0, 0, 0, 1, 2, 3],
    ]
    assert batch.response_start.tolist() == [3, 3, 3]


def test_right_packs_each_row_and_pads_after_it():
    batch = SMALL.padded("right", pad_token_id=99)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 6, 99], [7, 8, 9, 10, 99]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0], [0, 1, 2, 3, 0]]
    assert batch.response_start.tolist() == [3, 3, 1]


@pytest.mark.parametrize("side", SIDES)
def test_lengths_groups_and_objective_mask_are_those_of_the_problem(side):
    batch = SMALL.padded(side)
    assert batch.response_mask.tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert batch.prompt_lengths.tolist() == [3, 3, 1]
    assert tuple(batch.response_lengths.tolist()) == SMALL.response_lengths
    assert tuple(batch.group_of.tolist()) == SMALL.group_of
    assert len(batch) == len(SMALL)


@pytest.mark.parametrize("side", SIDES)
def test_response_logits_are_those_one_column_before_each_token(side):
    batch = SMALL.padded(side, pad_token_id=99)
    # A model whose logit is the id of the token that follows: the shift shows in the values.
    following = batch.input_ids.roll(-1, dims=1).unsqueeze(-1)
    found = [rows.flatten().tolist() for rows in batch.response_logits(following)]
    assert found == [response.tokens.tolist() for response in SMALL.responses]


def random_problem(seed, **fields):
    spec = ProblemSpec(
        prompt_lengths=(1, 12, 5),
        group_sizes=(2, 3, 4),
        seed=seed,
        holes=True,
        truncated=True,
        **fields,
    )
    problem = draw(spec, vocab_size=40)
    generator = torch.Generator().manual_seed(seed)
    noise = [
        torch.randn(length, generator=generator, dtype=torch.float64)
        for length in problem.response_lengths
    ]
    return problem.replace_logps(old=noise, sampler=[2 * each for each in noise])


def unpadded(problem, batch, stacked):
    def column(name):
        rows = [getattr(response, name) for response in problem.responses]
        if rows[0] is None:
            return None
        if not stacked:
            return rows
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=float("nan"))

    return Problem.from_padded(
        batch,
        rewards=[response.reward for response in problem.responses],
        truncated=[response.truncated for response in problem.responses],
        seed=problem.seed,
        old_logp=column("old_logp"),
        ref_logp=column("ref_logp"),
        sampler_logp=column("sampler_logp"),
    )


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_round_trip_is_exact_even_when_the_pad_id_is_a_token(side, stacked, seed):
    problem = random_problem(seed, reference=bool(seed % 2))
    pad_token_id = int(problem.responses[0].tokens[-1])
    batch = problem.padded(side, pad_token_id)
    assert unpadded(problem, batch, stacked).content_hash() == problem.content_hash()


def test_a_changed_token_does_not_survive_the_round_trip_unseen():
    problem = random_problem(0)
    batch = problem.padded()
    ids = batch.input_ids.clone()
    ids[0, batch.response_start[0]] += 1
    changed = unpadded(problem, replace(batch, input_ids=ids), stacked=True)
    assert changed.content_hash() != problem.content_hash()


def test_a_row_whose_prompt_was_shifted_by_padding_is_refused():
    problem = random_problem(0)
    batch = problem.padded()
    ids = batch.input_ids.clone()
    ids[3] = ids[3].roll(1)
    with pytest.raises(
        InputError, match="group 1: the prompts of rows 2 and 3 differ first at pos"
    ):
        unpadded(problem, replace(batch, input_ids=ids), stacked=True)


def broken(**changes) -> PaddedBatch:
    return replace(SMALL.padded("left"), **changes)


GOOD = SMALL.padded("left")


def changed_at(tensor, row, column, value):
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_side": "middle"}, "prompt_side is 'middle'; give 'left' or 'right'"),
        ({"input_ids": GOOD.input_ids[0]}, r"input_ids has shape \(6,\); give \[N, L\]"),
        ({"attention_mask": GOOD.attention_mask[:, 1:]}, "attention_mask is torch.int64"),
        ({"attention_mask": GOOD.attention_mask.bool()}, "attention_mask is torch.bool"),
        ({"response_mask": GOOD.response_mask.long()}, "response_mask is torch.int64"),
        (
            {"attention_mask": changed_at(GOOD.attention_mask, 0, 1, 0)},
            "row 0: attention_mask must",
        ),
        ({"attention_mask": 0 * GOOD.attention_mask}, "row 0: attention_mask must be one run"),
        ({"response_start": torch.tensor([0, 3, 3])}, "row 0: response_start is 0"),
        (
            {"response_start": torch.tensor([3, 4, 3])},
            "row 1: response_start is 4; tokens stand in",
        ),
        ({"position_ids": GOOD.position_ids + 1}, "row 0: position_ids must count 0, 1, 2"),
        ({"position_ids": torch.arange(6).repeat(3, 1)}, "row 2: position_ids must count"),
        (
            {"response_mask": changed_at(GOOD.response_mask, 1, 2, True)},
            "row 1: response_mask counts",
        ),
    ],
)
def test_batches_that_cannot_be_read_back_are_refused_in_one_line(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        broken(**changes)
    assert "\n" not in str(caught.value)


def test_padded_log_probs_of_another_shape_are_refused():
    with pytest.raises(InputError, match=r"padded log-probs have shape \(3, 4\); .* \(3, 3\)"):
        Problem.from_padded(GOOD, rewards=[0.0] * 3, old_logp=torch.zeros(3, 4))


def test_an_unknown_side_is_refused_before_padding():
    with pytest.raises(InputError, match="prompt_side is 'both'"):
        SMALL.padded("both")
