from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from lsverify import problems
from lsverify.errors import InputError
from lsverify.objective import PRESETS, prepare, preset
from lsverify.problems import ProblemSpec, draw, off_policy
from lsverify.ratio_zones import edge_width, log_edges


def one_line(caught):
    assert "\n" not in str(caught.value)


def test_the_default_problem_is_uneven_with_a_one_token_response():
    problem = draw(ProblemSpec(), 40)
    assert len(set(problem.group_sizes)) > 1
    assert len(set(problem.prompt_lengths)) > 1
    assert len(set(problem.response_lengths)) > 1
    assert 1 in problem.response_lengths


def test_response_lengths_start_again_and_one_group_size_serves_all():
    spec = ProblemSpec(prompt_lengths=(1, 2), group_sizes=(3,), response_lengths=(4, 5))
    problem = draw(spec, 40)
    assert problem.group_sizes == (3, 3)
    assert problem.response_lengths == (4, 5, 4, 5, 4, 5)


def test_the_same_spec_gives_the_same_problem_and_leaves_global_random_numbers_alone():
    state = torch.get_rng_state()
    assert draw(ProblemSpec(), 40).content_hash() == draw(ProblemSpec(), 40).content_hash()
    assert torch.equal(torch.get_rng_state(), state)
    other = draw(ProblemSpec(seed=1), 40)
    assert not torch.equal(other.tokens(0), draw(ProblemSpec(), 40).tokens(0))


@pytest.mark.parametrize("seed", range(5))
def test_prompts_and_the_responses_of_a_group_differ_down_to_the_smallest_vocabulary(seed):
    spec = ProblemSpec(prompt_lengths=(1, 1, 2), group_sizes=(4,), response_lengths=(2,), seed=seed)
    problem = draw(spec, vocab_size=2)
    assert all(set(problem.tokens(i).tolist()) <= {0, 1} for i in range(len(problem)))
    assert len({tuple(group.prompt.tolist()) for group in problem.groups}) == 3
    for group in problem.groups:
        assert len({tuple(each.tokens.tolist()) for each in group.responses}) == 4


def test_more_responses_than_there_are_sequences_repeat_but_prompts_may_not():
    spec = ProblemSpec(prompt_lengths=(2,), group_sizes=(3,), response_lengths=(1,))
    assert {int(each.tokens) for each in draw(spec, vocab_size=2).responses} == {0, 1}
    with pytest.raises(InputError, match="vocab_size 2 has too few tokens for 3 different prompts"):
        draw(ProblemSpec(prompt_lengths=(1, 1, 1), group_sizes=(1,)), vocab_size=2)
    with pytest.raises(InputError, match="vocab_size is 1; at least 2"):
        draw(spec, vocab_size=1)


@pytest.mark.parametrize("seed", range(10))
def test_holes_are_inside_and_leave_first_and_last_token(seed):
    spec = ProblemSpec(group_sizes=(8,), response_lengths=(1, 2, 3, 9), holes=True, seed=seed)
    problem = draw(spec, 40)
    assert not problem.responses[2].mask.all()
    for each in problem.responses:
        assert bool(each.mask[0])
        assert bool(each.mask[-1])
        assert len(each) > 2 or bool(each.mask.all())
    assert all(bool(each.mask.all()) for each in draw(ProblemSpec(seed=seed), 40).responses)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["distinct", "ties", "equal"])
def test_rewards_are_of_the_kind_asked_for(kind, seed):
    spec = ProblemSpec(prompt_lengths=(3, 4, 5), group_sizes=(1, 2, 5), rewards=kind, seed=seed)
    for group in draw(spec, 40).groups:
        rewards = [each.reward for each in group.responses]
        if kind == "distinct":
            assert len(set(rewards)) == len(rewards)
            assert sum(rewards) / len(rewards) not in rewards[1:]
        elif kind == "equal":
            assert len(set(rewards)) == 1
        else:
            assert set(rewards) == ({0.0} if len(rewards) == 1 else {0.0, 1.0})


@pytest.mark.parametrize("sizes", [(4, 3), (1, 1), (2, 1)])
def test_truncation_marks_some_members_and_never_all(sizes):
    marks = [
        each.truncated
        for each in draw(ProblemSpec(group_sizes=sizes, truncated=True), 40).responses
    ]
    assert any(marks)
    assert not all(marks)
    lone = ProblemSpec(prompt_lengths=(2,), group_sizes=(1,), truncated=True)
    assert not draw(lone, 40).responses[0].truncated


def test_the_reference_is_there_when_asked_for():
    assert draw(ProblemSpec(), 40).responses[0].ref_logp is not None
    assert draw(ProblemSpec(reference=False), 40).responses[0].ref_logp is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"prompt_lengths": (3, 0)},
            "problem: prompt_lengths.1 is 0: Input should be greater than 0",
        ),
        ({"prompt_lengths": ()}, "problem: prompt_lengths is .*: Tuple should have at least 1"),
        (
            {"response_lengths": (1.5,)},
            "problem: response_lengths.0 is 1.5: Input should be a valid int",
        ),
        (
            {"group_sizes": (True,)},
            "problem: group_sizes.0 is True: Input should be a valid integer",
        ),
        (
            {"group_sizes": (1, 2, 3)},
            "problem: 3 group_sizes for 2 prompt_lengths; give one size or",
        ),
        (
            {"rewards": "some"},
            "problem: rewards is 'some': Input should be 'distinct', 'ties' or 'eq",
        ),
        ({"seed": -1}, "problem: seed is -1: Input should be greater than or equal to 0"),
        ({"colour": 1}, "problem: colour is 1: Extra inputs are not permitted"),
    ],
)
def test_a_spec_that_cannot_be_used_is_refused(values, message):
    with pytest.raises(InputError, match=message) as caught:
        ProblemSpec(**values)
    one_line(caught)


def test_a_spec_survives_json():
    spec = ProblemSpec(prompt_lengths=[4, 1], group_sizes=[2], holes=True)
    assert ProblemSpec.model_validate_json(spec.model_dump_json()) == spec


def current_logp(problem, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        -3 * torch.rand(length, generator=generator, dtype=torch.float64)
        for length in problem.response_lengths
    ]


def ratios(problem, current, objective):
    """Per member the log-ratios that a clip sees: of counted tokens, or the one of the response."""
    plan = prepare(objective, problem)
    found = []
    for each, now, counted in zip(problem.responses, current, plan.counted, strict=True):
        tokens = (now - each.old_logp)[counted]
        if objective.ratio == "sequence":
            tokens = tokens.mean()[None] if len(tokens) else tokens
        elif objective.ratio == "trajectory":
            tokens = tokens.sum()[None] if len(tokens) else tokens
        found.append(tokens)
    return plan, found


OBJECTIVES = PRESETS | {
    "dual_clip": preset("grpo", dual_clip=3.0, beta=0.04),
    "gspo_dual_clip": preset("gspo", dual_clip=1.01),
    "kl_in_reward": preset("grpo", kl_in="reward", beta=0.5),
    "trajectory": preset("dapo", ratio="trajectory", advantage="batch_std"),
}


def distances(objective, found):
    logs = torch.tensor(log_edges(objective.edges()), dtype=torch.float64)
    return (torch.cat(found)[:, None] - logs).abs()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_both_clip_sides_are_active_and_every_ratio_is_away_from_the_edges(name, truncated, seed):
    objective = OBJECTIVES[name]
    drawn = draw(ProblemSpec(seed=seed, holes=True, truncated=truncated), 40)
    current = current_logp(drawn)
    problem = off_policy(drawn, current, objective, seed)
    plan, found = ratios(problem, current, objective)
    assert all(bool(each.any()) for each in found if len(each))
    edges = objective.edges()
    if not edges:
        return
    assert float(distances(objective, found).min()) >= 0.05 * edge_width(edges)
    low = -math.inf if objective.epsilon_low == 1 else math.log(edges[0])
    high = math.log1p(objective.epsilon_high)
    positive, negative = (
        torch.cat([each for i, each in enumerate(found) if plan.advantages[i] * sign > 0])
        for sign in (1, -1)
    )
    # Leaving out truncated responses can leave a sign a lone turn, which stays inside.
    enough = [len(positive) > 1, len(negative) > 1]
    assert all(enough) or (truncated and objective.mask_truncated)
    assert bool((positive > high).any()) == enough[0]
    assert bool((negative < low).any()) == (enough[1] and low > -math.inf)
    # And neither side swallows everything: both signs keep some gradient.
    assert bool(((positive > low) & (positive < high)).any())
    assert bool(((negative > low) & (negative < high)).any())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_clip_of_the_plan_itself_cuts_on_both_sides(name):
    objective = OBJECTIVES[name]
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    plan = prepare(objective, off_policy(drawn, current, objective, 0))
    sides = {int(side) for i in range(len(drawn)) for side in plan.clip_side(i, current[i])}
    expected = {"none": {0}, "sapo": {0}, "vespo": {0}, "cispo": {0, 1}}.get(
        objective.clip, {-1, 0, 1}
    )
    assert sides == expected


def test_long_responses_of_either_sign_visit_every_zone():
    objective = preset("grpo", dual_clip=3.0)
    drawn = draw(ProblemSpec(prompt_lengths=(3,), group_sizes=(5,), response_lengths=(4, 7)), 40)
    current = current_logp(drawn)
    plan, found = ratios(off_policy(drawn, current, objective, 0), current, objective)
    bounds = [-math.inf, *log_edges(objective.edges()), math.inf]
    for i, each in enumerate(found):
        assert plan.advantages[i] != 0
        for low, high in pairwise(bounds):
            assert bool(((each > low) & (each < high)).any())


@pytest.mark.parametrize("ratio", ["sequence", "trajectory"])
def test_tokens_still_vary_under_a_ratio_of_the_response(ratio):
    objective = preset("gspo", ratio=ratio)
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    problem = off_policy(drawn, current, objective, 0)
    for each, now in zip(problem.responses, current, strict=True):
        if len(each) > 1:
            assert float((now - each.old_logp).std()) > 0.05


def test_lone_tokens_stay_inside_where_their_gradient_lives():
    drawn = draw(ProblemSpec(prompt_lengths=(3,), group_sizes=(2,), response_lengths=(1,)), 40)
    current = current_logp(drawn)
    plan = prepare(preset("grpo"), off_policy(drawn, current, preset("grpo"), 0))
    assert [int(plan.clip_side(i, current[i])) for i in range(2)] == [0, 0]


@pytest.mark.parametrize("kind", ["ties", "equal"])
def test_other_rewards_are_off_policy_too(kind):
    objective = preset("grpo")
    drawn = draw(ProblemSpec(rewards=kind), 40)
    current = current_logp(drawn)
    _, found = ratios(off_policy(drawn, current, objective, 0), current, objective)
    assert float(distances(objective, found).min()) >= 0.05 * edge_width(objective.edges())
    low, high = log_edges(objective.edges())
    values = torch.cat(found)
    assert bool((values < low).any())
    assert bool((values > high).any())


def test_uncounted_slots_get_a_ratio_far_outside():
    objective = preset("grpo", mask_truncated=True)
    drawn = draw(ProblemSpec(holes=True, truncated=True), 40)
    current = current_logp(drawn)
    problem = off_policy(drawn, current, objective, 0)
    plan = prepare(objective, problem)
    uncounted = [
        (now - each.old_logp)[~counted]
        for each, now, counted in zip(problem.responses, current, plan.counted, strict=True)
    ]
    assert torch.allclose(torch.cat(uncounted), torch.tensor(2.0).double())
    assert any(len(each) == len(now) for each, now in zip(uncounted, current, strict=True))


def test_the_reference_is_near_and_never_equal_and_stays_out_when_not_there():
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    problem = off_policy(drawn, current, preset("grpo"), 0)
    gaps = torch.cat(
        [each.ref_logp - now for each, now in zip(problem.responses, current, strict=True)]
    )
    assert 0.1 <= float(gaps.abs().min())
    assert float(gaps.abs().max()) <= 0.3 + 1e-12
    assert {-1, 1} == set(gaps.sign().int().tolist())
    plain = off_policy(draw(ProblemSpec(reference=False), 40), current, preset("grpo"), 0)
    assert plain.responses[0].ref_logp is None


def test_off_policy_repeats_by_seed_and_leaves_its_input_alone():
    drawn = draw(ProblemSpec(), 40)
    before = drawn.content_hash()
    current = [each.float().requires_grad_() for each in current_logp(drawn)]
    state = torch.get_rng_state()
    first, again, other = (off_policy(drawn, current, preset("grpo"), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.content_hash() == again.content_hash() != other.content_hash()
    assert drawn.content_hash() == before
    assert not first.responses[0].old_logp.requires_grad


def test_log_probs_that_do_not_fit_are_refused():
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    with pytest.raises(InputError, match="current_logp has 6 members, the problem 7"):
        off_policy(drawn, current[:-1], preset("grpo"), 0)
    with pytest.raises(InputError, match="old_logp has 1 elements; the response has 6 tokens"):
        off_policy(drawn, [current[1], *current[1:]], preset("grpo"), 0)
    current[2][3] = math.nan
    with pytest.raises(InputError, match=r"old_logp\[3\] is nan at a token that the mask counts"):
        off_policy(drawn, current, preset("grpo"), 0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rewards", ["distinct", "ties", "equal"])
def test_a_kl_term_in_the_reward_never_refuses_a_problem(rewards, seed):
    drawn = draw(ProblemSpec(rewards=rewards, seed=seed), 40)
    current = current_logp(drawn)
    objective = preset("rloo")
    problem = off_policy(drawn, current, objective, seed)
    _, found = ratios(problem, current, objective)
    if objective.edges():
        assert float(distances(objective, found).min()) >= 0.05 * edge_width(objective.edges())


def test_signs_that_never_settle_end_with_zones_that_do_not_follow_them(monkeypatch):
    drawn = draw(ProblemSpec(), 40)
    flips = iter(range(1000))
    everything = [torch.ones(length, dtype=torch.bool) for length in drawn.response_lengths]
    monkeypatch.setattr(
        problems, "_signs_and_counted", lambda *_: ([(-1) ** next(flips)] * 7, everything)
    )
    problem = off_policy(drawn, current_logp(drawn), preset("grpo"), 0)
    assert next(flips) > problems.SETTLING_DRAWS
    _, found = ratios(problem, current_logp(drawn), preset("grpo"))
    assert float(distances(preset("grpo"), found).min()) >= 0.05 * edge_width(
        preset("grpo").edges()
    )


# The same checks against planted faults.


def test_the_distance_check_sees_a_ratio_moved_onto_an_edge():
    objective = preset("grpo")
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    problem = off_policy(drawn, current, objective, 0)
    old = [each.old_logp.clone() for each in problem.responses]
    old[3][0] = current[3][0] - math.log(1.2) * 1.01
    _, found = ratios(problem.replace_logps(old=old), current, objective)
    assert float(distances(objective, found).min()) < 0.05 * edge_width(objective.edges())


def test_the_clip_check_sees_an_on_policy_problem():
    objective = preset("grpo")
    drawn = draw(ProblemSpec(), 40)
    current = current_logp(drawn)
    plan = prepare(objective, drawn.replace_logps(old=current))
    assert {int(side) for i in range(len(drawn)) for side in plan.clip_side(i, current[i])} == {0}
