from dataclasses import replace

import numpy as np
import pytest
import torch

from lsverify import keyed, models, rollouts_online
from lsverify.courses import course_of
from lsverify.errors import InputError, TrainingBroke
from lsverify.precision import computing
from lsverify.rollouts_online import (
    RESPONSES,
    TEST,
    drawn,
    examined,
    rolled_out,
    scored,
    scrambled,
    uniforms_of,
)
from lsverify.scoring import full_score

ARCHS = ("llama", "mistral", "qwen3_5", "glm_moe_dsa", "mamba2")


@pytest.fixture(scope="module")
def policy():
    model = models.build("warm:llama", seed=0)
    with computing(model, "float64"):
        yield model


def prompts_of(number):
    tasks = course_of("warm:llama", "recall").tasks(3, 0, number)
    return torch.tensor([task.prompt for task in tasks])


def streamed(generator):
    def uniforms(key, step, prompts, members, length):
        return torch.rand(len(prompts), members, length, generator=generator, dtype=torch.float64)

    return uniforms


def changed_by_order(policy, uniforms):
    """Whether a prompt's responses depend on what is drawn before them, or beside them."""
    prompts = prompts_of(3)
    together, *_ = drawn(policy, prompts, 3, uniforms(RESPONSES, 5, [0, 1, 2], 4, 3))
    alone, *_ = drawn(policy, prompts[2:], 3, uniforms(RESPONSES, 5, [2], 4, 3))
    turned, *_ = drawn(policy, prompts.flip(0), 3, uniforms(RESPONSES, 5, [2, 1, 0], 4, 3))
    return not (torch.equal(together[2:], alone) and torch.equal(together.flip(0), turned))


def test_a_response_is_the_same_in_whatever_order_and_batch_it_is_drawn(policy):
    assert not changed_by_order(policy, uniforms_of)


def test_streamed_numbers_would_be_seen(policy):
    assert changed_by_order(policy, streamed(torch.Generator().manual_seed(0)))


def test_a_uniform_picks_the_token_whose_share_of_the_distribution_it_falls_in(policy):
    prompts, even = prompts_of(1), (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens, log_probs, entropy = drawn(policy, prompts, 1, even[None, :, None], 0.7)
    logits = policy(input_ids=prompts).logits[0, -1].detach() / 0.7
    shares = torch.bincount(tokens.flatten(), minlength=len(logits)) / 4000
    torch.testing.assert_close(shares.double(), logits.softmax(-1), rtol=0, atol=1 / 4000)
    assert bool((tokens[0, :, 0].diff() >= 0).all())
    torch.testing.assert_close(log_probs[0, :, 0], logits.log_softmax(-1)[tokens[0, :, 0]])
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy[0, :, 0], expected.expand(4000))


def test_the_ends_of_the_unit_interval_pick_tokens_that_can_come(policy):
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)[None, :, None]
    tokens, log_probs, _ = drawn(policy, prompts_of(1), 1, ends)
    assert bool((tokens >= 0).all())
    assert bool(log_probs.isfinite().all())


@pytest.mark.parametrize("arch", ARCHS)
def test_log_probs_are_those_of_uncached_passes(arch):
    model = models.build(f"warm:{arch}", seed=0)
    tasks = course_of(f"warm:{arch}", "recall").tasks(0, 0, 2)
    with computing(model, "float64"):
        problem, _ = rolled_out(model, tasks, seed=0, rollout=0, members=3, temperature=0.9)
        expected = torch.cat(full_score(model, problem, temperature=0.9))
        sampled = torch.cat([response.sampler_logp for response in problem.responses])
        again = torch.cat(scored(model, problem, 0.9))
    torch.testing.assert_close(sampled, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)


def test_responses_have_their_tasks_rewards(policy):
    tasks = course_of("warm:llama", "recall").tasks(1, 0, 3)
    problem, _ = rolled_out(policy, tasks, seed=1, rollout=0, members=8, temperature=1.0)
    for response, group in zip(problem.responses, problem.group_of, strict=True):
        assert response.reward == tasks[group].reward(response.tokens)
    assert len({response.reward for response in problem.responses}) > 1


@pytest.mark.parametrize("other", [{"seed": 2}, {"rollout": 1}])
def test_seed_and_rollout_have_responses_of_their_own(policy, other):
    tasks = course_of("warm:llama", "recall").tasks(1, 0, 3)
    options = {"seed": 1, "rollout": 0, "members": 8, "temperature": 1.0}
    found = [rolled_out(policy, tasks, **options | each)[0] for each in ({}, {}, other)]
    hashes = [problem.content_hash() for problem in found]
    assert hashes[0] == hashes[1] != hashes[2]


def test_prompts_belong_to_their_place():
    course = course_of("warm:llama", "recall")
    assert course.tasks(0, 4, 5)[:2] == course.tasks(0, 4, 2)
    seen = [
        task for seed in (0, 1) for rollout in (0, 1) for task in course.tasks(seed, rollout, 4)
    ]
    assert len({task.prompt for task in seen}) == 16
    assert not {task.prompt for task in seen} & {task.prompt for task in course.test}
    assert [len(course.tasks(0, rollout, 1)[0].prompt) for rollout in range(3)] == [24, 30, 24]


def test_purposes_share_no_number():
    found = [uniforms_of(key | 7, 0, [0], 50, 3) for key in (RESPONSES, TEST)]
    assert len(torch.cat(found).unique()) == 300


def test_a_test_is_the_same_number_again_and_by_prompt(policy):
    tasks = course_of("warm:llama", "recall").test[:6]
    first = examined(policy, tasks, seed=2, members=3, temperature=1.0)
    assert first == examined(policy, tasks, seed=2, members=3, temperature=1.0)
    assert first != examined(policy, tasks, seed=3, members=3, temperature=1.0)
    ninths = 9 * np.array(first)
    np.testing.assert_allclose(ninths, ninths.round(), atol=1e-12)
    assert 0 <= min(first) < max(first) <= 1
    # Two lengths are drawn apart, and each task's reward stays at its place.
    assert examined(policy, tasks[:1], seed=2, members=3, temperature=1.0) == first[:1]


def test_scrambling_keeps_tokens_and_responses_and_moves_the_evidence(policy):
    tasks = course_of("warm:llama", "recall").tasks(0, 0, 2)
    problem, _ = rolled_out(policy, tasks, seed=0, rollout=0, members=2, temperature=1.0)
    other = scrambled(problem, seed=0)
    for before, after in zip(problem.groups, other.groups, strict=True):
        assert before.responses == after.responses
        assert sorted(before.prompt.tolist()) == sorted(after.prompt.tolist())
        assert int((before.prompt != after.prompt).sum()) > len(before.prompt) / 2
    assert other.content_hash() == scrambled(problem, seed=0).content_hash()
    assert other.content_hash() != scrambled(problem, seed=1).content_hash()
    turned = replace(problem, groups=problem.groups[::-1])
    assert torch.equal(scrambled(turned, seed=0).groups[1].prompt, other.groups[0].prompt)


@pytest.mark.parametrize("task", ["needle", "count", "copy_edited", "arithmetic"])
def test_other_kinds_of_task_have_a_frozen_test_set_too(task):
    course = course_of("warm:llama", task)
    assert course.test == course_of("warm:llama", task).test
    assert {one.name for one in course.tasks(0, 0, 3)} == {task}
    assert len(np.unique([len(one.answer) for one in course.test])) == 1


def test_an_unknown_task_is_refused():
    with pytest.raises(InputError, match=r"^task 'recal' is not known: use one of recall, chain"):
        course_of("warm:llama", "recal")


def test_logits_that_are_not_finite_end_the_training(policy):
    model = models.build("warm:llama", seed=0, dtype="float32")
    torch.nn.init.constant_(model.get_output_embeddings().weight, float("nan"))
    with pytest.raises(TrainingBroke, match="a logit is not finite"):
        drawn(model, prompts_of(1), 1, uniforms_of(RESPONSES, 0, [0], 1, 1))


def test_purposes_have_keys_of_their_own():
    keys = {keyed.PROMPTS, RESPONSES, TEST, keyed.ORDER, keyed.FAR_TEST}
    assert len(keys) == 5
    assert all(key % 2**32 == 0 for key in keys)


def ragged(policy, ends=()):
    """Two prompts of one length and one of another, and the problem that their rollout is."""
    course = course_of("warm:llama", "recall")
    tasks = [course.at(length, 1)[0] for length in (24, 40)] + [course.at(24, 2)[1]]
    options = {"seed": 1, "rollout": 0, "members": 4, "temperature": 1.0, "ends": ends}
    return tasks, rolled_out(policy, tasks, **options)


def test_ragged_prompts_are_rolled_out_in_their_order(policy):
    tasks, (problem, _) = ragged(policy)
    assert [tuple(group.prompt.tolist()) for group in problem.groups] == [
        task.prompt for task in tasks
    ]
    expected = torch.cat(full_score(policy, problem))
    sampled = torch.cat([response.sampler_logp for response in problem.responses])
    torch.testing.assert_close(sampled, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(scored(policy, problem)), expected, rtol=1e-12, atol=1e-12)


def test_a_response_ends_with_the_first_of_the_ends(policy):
    tasks, (whole, _) = ragged(policy)
    ends = tuple({int(response.tokens[1]) for response in whole.responses[:6]})
    _, (cut, entropy) = ragged(policy, ends)
    lengths = []
    for one, other, group in zip(cut.responses, whole.responses, cut.group_of, strict=True):
        at = [i for i, token in enumerate(other.tokens.tolist()) if token in ends]
        length = at[0] + 1 if at else tasks[group].most
        assert torch.equal(one.tokens, other.tokens[:length])
        assert one.truncated == (not at)
        assert one.mask.all()
        assert len(one.sampler_logp) == length
        lengths.append(length)
    assert len(set(lengths)) > 1
    assert {response.truncated for response in cut.responses} == {True, False}
    assert not any(response.truncated for response in whole.responses)
    expected = torch.cat(full_score(policy, cut))
    torch.testing.assert_close(torch.cat(scored(policy, cut)), expected, rtol=1e-12, atol=1e-12)
    assert entropy > 0


def test_drawing_stops_where_every_response_has_ended(policy):
    uniforms = uniforms_of(RESPONSES, 0, [0], 3, 9)
    tokens, *_ = drawn(policy, prompts_of(1), 9, uniforms)
    ends = tuple(tokens[0, :, 1].tolist())
    stopped, *_ = drawn(policy, prompts_of(1), 9, uniforms, 1.0, ends)
    assert stopped.shape[-1] <= 2
    assert torch.equal(stopped, tokens[..., : stopped.shape[-1]])


def test_rollouts_in_parts_are_the_same(policy, monkeypatch):
    _, (whole, _) = ragged(policy)
    monkeypatch.setattr(rollouts_online, "MOST_TOKENS", 1)
    sizes = []
    honest = rollouts_online.drawn

    def noted(model, prompts, *rest):
        sizes.append(len(prompts))
        return honest(model, prompts, *rest)

    monkeypatch.setattr(rollouts_online, "drawn", noted)
    _, (parts, _) = ragged(policy)
    assert sizes == [1, 1, 1]
    for one, other in zip(parts.responses, whole.responses, strict=True):
        assert torch.equal(one.tokens, other.tokens)
