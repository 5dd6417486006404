from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from lsverify.errors import InputError
from lsverify.problems import Group, Problem, ProblemSpec, Response, draw

NAN = float("nan")


def floats(*values):
    return torch.tensor(values, dtype=torch.float64)


def response(**changes):
    values = {
        "tokens": torch.tensor([4, 5]),
        "mask": torch.tensor([True, False]),
        "reward": 1.0,
        "old_logp": floats(-1.0, -2.0),
    }
    return Response(**(values | changes))


def problem_of(*groups, **fields):
    return Problem(
        groups=tuple(Group(prompt=torch.tensor(p), responses=tuple(r)) for p, r in groups), **fields
    )


def one_line(caught):
    assert "\n" not in str(caught.value)


def test_masked_slots_may_hold_anything():
    assert math.isnan(float(response(old_logp=floats(-1.0, NAN)).old_logp[1]))
    response(mask=torch.tensor([False, False]), old_logp=floats(NAN, math.inf))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": torch.tensor([4, 5]).int()},
            "response tokens has dtype torch.int32; convert it",
        ),
        ({"tokens": [4, 5]}, "response tokens is a list; give a torch tensor of torch.int64"),
        (
            {"tokens": torch.tensor([[4, 5]])},
            r"response tokens has shape \(1, 2\); give one dimension",
        ),
        ({"tokens": torch.tensor([], dtype=torch.int64)}, "response tokens is empty; at least one"),
        ({"tokens": torch.tensor([4, -1])}, r"response tokens\[1\] is -1; token ids start at 0"),
        (
            {"tokens": torch.tensor([4, 5], device="meta")},
            "response tokens is on meta; a problem stays",
        ),
        ({"mask": torch.tensor([1, 0])}, "mask has dtype torch.int64; convert it to torch.bool"),
        ({"mask": torch.tensor([True])}, "mask has 1 elements; the response has 2 tokens"),
        ({"reward": NAN}, "reward is nan; it must be finite"),
        ({"reward": -math.inf}, "reward is -inf; it must be finite"),
        ({"reward": True}, "reward is a bool; give a float"),
        ({"reward": torch.tensor(1.0)}, "reward is a Tensor; give a float"),
        ({"truncated": 1}, "truncated is 1; give True or False"),
        ({"old_logp": floats(-1.0)}, "old_logp has 1 elements; the response has 2 tokens"),
        ({"old_logp": floats(-1.0, -2.0).float()}, "old_logp has dtype torch.float32; convert it"),
        ({"old_logp": None}, "old_logp is a NoneType; give a torch tensor"),
        (
            {"old_logp": floats(-1.0, -2.0).requires_grad_()},
            "old_logp requires a gradient; .* detach",
        ),
        ({"old_logp": floats(NAN, -2.0)}, r"old_logp\[0\] is nan at a token that the mask counts"),
        (
            {"ref_logp": floats(-math.inf, 0.0)},
            r"ref_logp\[0\] is -inf at a token that the mask counts",
        ),
        ({"sampler_logp": floats(NAN, 0.0)}, r"sampler_logp\[0\] is nan at a token that the mask"),
    ],
)
def test_a_response_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        response(**changes)
    one_line(caught)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Group(prompt=torch.tensor([1]), responses=()), "tuple of at least one response"),
        (
            lambda: Group(prompt=torch.tensor([1]), responses=[response()]),
            "tuple of at least one resp",
        ),
        (
            lambda: Group(prompt=torch.tensor([1]), responses=(1,)),
            "a group holds int; give Response",
        ),
        (lambda: problem_of(([], [response()])), "prompt has dtype torch.float32"),
        (lambda: problem_of(([-2], [response()])), r"prompt\[0\] is -2; token ids start at 0"),
        (lambda: Problem(groups=()), "a problem needs a tuple of at least one group"),
        (lambda: Problem(groups=(response(),)), "a problem holds Response; give Group objects"),
        (lambda: problem_of(([1], [response()]), seed=1.0), "seed is 1.0; give an int or None"),
        (
            lambda: problem_of(([1], [response(), response(ref_logp=floats(0, 0))])),
            "ref_logp is missing for member 0 but given for member 1",
        ),
    ],
)
def test_groups_and_problems_that_do_not_fit_are_refused(make, message):
    with pytest.raises(InputError, match=message) as caught:
        make()
    one_line(caught)


def test_members_are_counted_flat_across_groups():
    a, b, c = (response(tokens=torch.tensor([i, i + 1])) for i in (10, 20, 30))
    problem = problem_of(([1, 2, 3], [a]), ([7], [b, c]))
    assert problem.responses == (a, b, c)
    assert problem.group_of == (0, 1, 1)
    assert problem.group_sizes == (1, 2)
    assert problem.prompt_lengths == (3, 1)
    assert problem.response_lengths == (2, 2, 2)
    assert len(problem) == 3
    assert problem.prompt(2).tolist() == [7]
    assert problem.tokens(0).tolist() == [1, 2, 3, 10, 11]
    assert problem.tokens(2).tolist() == [7, 30, 31]


def test_a_problem_is_frozen():
    with pytest.raises(FrozenInstanceError):
        problem_of(([1], [response()])).seed = 1


def test_prompts_of_equal_content_have_equal_hashes():
    problem = problem_of(([1, 2], [response()]), ([1, 2], [response()]), ([2, 1], [response()]))
    assert problem.prompt_hash(0) == problem.prompt_hash(1) != problem.prompt_hash(2)


def test_content_hash_is_of_the_content_and_not_of_the_object():
    first, again = (draw(ProblemSpec(holes=True), 40) for _ in range(2))
    assert first.content_hash() == again.content_hash()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: {"tokens": r.tokens.flip(0)},
        lambda r: {"mask": ~r.mask},
        lambda r: {"reward": r.reward + 2**-40},
        lambda r: {"old_logp": r.old_logp - 2**-40},
        lambda r: {"ref_logp": r.ref_logp - 2**-40},
        lambda r: {"sampler_logp": r.ref_logp},
        lambda r: {"truncated": True},
    ],
)
def test_content_hash_sees_every_field(change):
    given = response(ref_logp=floats(-1.0, -1.0))
    before = problem_of(([1, 2], [given]), seed=3)
    after = problem_of(([1, 2], [replace(given, **change(given))]), seed=3)
    assert before.content_hash() != after.content_hash()


def test_content_hash_sees_seed_prompt_grouping_and_where_prompt_ends():
    base = problem_of(([1, 2], [response()] * 2), seed=3)
    others = [
        replace(base, seed=None),
        problem_of(([2, 1], [response()] * 2), seed=3),
        problem_of(([1, 2], [response()]), ([1, 2], [response()]), seed=3),
        problem_of(([1], [response()]), ([2], [response()]), seed=3),
    ]
    assert len({each.content_hash() for each in (base, *others)}) == 5


def test_content_hash_notices_a_candidate_that_writes_into_the_problem():
    problem = draw(ProblemSpec(), 40)
    before = problem.content_hash()
    problem.responses[2].old_logp[0] -= 1
    assert problem.content_hash() != before


def test_replace_logps_replaces_what_is_given_and_keeps_the_rest():
    problem = draw(ProblemSpec(), 40)
    new = [torch.full((length,), -1.0).double() for length in problem.response_lengths]
    changed = problem.replace_logps(old=new, sampler=new)
    for before, after in zip(problem.responses, changed.responses, strict=True):
        assert after.old_logp is after.sampler_logp
        assert after.ref_logp is before.ref_logp
        assert after.tokens is before.tokens
    assert changed.group_of == problem.group_of
    with pytest.raises(InputError, match="old_logp has 1 members; the problem has 7"):
        problem.replace_logps(old=new[:1])
    with pytest.raises(InputError, match="old_logp has 1 elements; the response has 6 tokens"):
        problem.replace_logps(old=[new[1], *new[1:]])


def test_select_takes_groups_in_the_given_order():
    problem = draw(ProblemSpec(), 40)
    swapped = problem.select([1, 0])
    assert swapped.groups == (problem.groups[1], problem.groups[0])
    assert swapped.group_of == (0, 0, 0, 1, 1, 1, 1)
    assert problem.select([0, 1]).content_hash() == problem.content_hash()
    with pytest.raises(InputError, match="group 2 does not exist; there are 2"):
        problem.select([2])
    with pytest.raises(InputError, match="at least one group"):
        problem.select([])
