"""Terms of the objective that presets leave out, each in closed form on log-probs that are known by hand."""

from __future__ import annotations

import math

import pytest
import torch

from lsverify.errors import InputError
from lsverify.objective import Scores, prepare, preset, token_entropy, token_logp
from lsverify.problems import Group, Problem, Response

# One group, rewards 1 and 0, two tokens each: advantages of `none` are the rewards, a sequence mean divides by 2 * 2.
LOGP = (-1.0, -2.0)
OLD, REF, SAMPLER = (-1.2, -1.7), (-1.5, -1.6), (-0.9, -2.1)


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


def problem(mask=(True, True)):
    def response(reward):
        return Response(
            tokens=torch.zeros(2, dtype=torch.int64),
            mask=torch.tensor(mask),
            reward=reward,
            old_logp=f64(OLD),
            ref_logp=f64(REF),
            sampler_logp=f64(SAMPLER),
        )

    prompt = torch.zeros(3, dtype=torch.int64)
    return Problem(groups=(Group(prompt=prompt, responses=(response(1.0), response(0.0))),))


def part(objective, member=0, **how):
    """The member's part and its slope in each log-prob, from log-probs LOGP."""
    logp = f64(LOGP).requires_grad_()
    value = prepare(objective, problem(**how)).part(member, logp)
    (slope,) = torch.autograd.grad(value, logp, allow_unused=True)
    return float(value.detach()), slope.tolist()


def kl_alone(**options):
    """Member 1 has advantage 0: its part is the KL term alone."""
    return part(preset("grpo", advantage="none", beta=1.0, **options), member=1)


def test_k3_straight_through_has_its_own_value_and_the_slope_of_k2():
    value, slope = kl_alone(kl="k3", kl_straight_through=True)
    assert value == pytest.approx(
        sum(math.exp(r - p) - (r - p) - 1 for p, r in zip(LOGP, REF, strict=True)) / 4
    )
    assert slope == pytest.approx([(p - r) / 4 for p, r in zip(LOGP, REF, strict=True)])


def test_a_weighted_kl_is_multiplied_by_the_ratio_and_moves_with_it():
    value, slope = kl_alone(kl="k1", kl_weighted=True)
    ratios = [math.exp(p - o) for p, o in zip(LOGP, OLD, strict=True)]
    terms = [p - r for p, r in zip(LOGP, REF, strict=True)]
    assert value == pytest.approx(sum(w * k for w, k in zip(ratios, terms, strict=True)) / 4)
    assert slope == pytest.approx([w * (1 + k) / 4 for w, k in zip(ratios, terms, strict=True)])
    plain, _ = kl_alone(kl="k1")
    assert plain == pytest.approx(sum(terms) / 4)


def test_the_part_reads_counted_tokens_only():
    value, slope = part(
        preset("grpo", ratio="none", clip="none", advantage="none"), mask=(False, True)
    )
    assert value == pytest.approx(-LOGP[1] / 2)
    assert slope == pytest.approx([0.0, -1 / 2])


def test_the_part_takes_entropies_of_counted_tokens_off():
    objective = preset("grpo", ratio="none", clip="none", advantage="none", entropy_bonus=0.5)
    plan = prepare(objective, problem(mask=(True, False)))
    without = float(plan.part(0, f64(LOGP)))
    assert float(plan.part(0, f64(LOGP), f64([0.3, 99.0]))) == pytest.approx(
        without - 0.5 * 0.3 / 2
    )


@pytest.mark.parametrize(
    ("correction", "bounds", "weights"),
    [
        ("token_truncate", {"sampler_clip_max": 1.2}, [math.exp(-0.3), 1.2]),
        ("token_mask", {"sampler_clip_max": 1.2}, [math.exp(-0.3), 0.0]),
        ("sequence_truncate", {"sampler_clip_max": 3.0}, [math.exp(0.1)] * 2),
    ],
)
def test_the_samplers_weights_multiply_the_policy_term(correction, bounds, weights):
    objective = preset(
        "grpo", ratio="none", clip="none", advantage="none", sampler_correction=correction, **bounds
    )
    assert prepare(objective, problem()).correction[0].tolist() == pytest.approx(weights)
    value, slope = part(objective)
    assert value == pytest.approx(-sum(w * p for w, p in zip(weights, LOGP, strict=True)) / 4)
    assert slope == pytest.approx([-w / 4 for w in weights])


def test_the_samplers_weights_are_of_counted_tokens():
    objective = preset(
        "reinforce", advantage="none", sampler_correction="sequence_truncate", sampler_clip_max=3.0
    )
    masked = prepare(objective, problem(mask=(True, False)))
    assert masked.correction[0].tolist() == pytest.approx([math.exp(OLD[0] - SAMPLER[0])])


def test_the_entropy_is_at_temperature_one_unless_said():
    logits = f64([[0.0, math.log(3)]])
    at_one = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert token_entropy(logits).tolist() == pytest.approx([at_one])
    assert token_entropy(logits, 1.0).tolist() == token_entropy(logits).tolist()
    assert float(token_entropy(logits, 2.0)) > at_one


FALLEN = (0.0, -9.0)  # by (-0.9 + 6.9) / 2 = 3 nats a token from the sampler's, on average


@pytest.mark.parametrize("clip", ["two_sided", "cispo"])
def test_a_response_that_fell_too_far_is_left_out_with_its_clip_sides(clip):
    def at(threshold, member):
        objective = preset(
            "grpo", advantage="group_mean", clip=clip, off_policy_threshold=threshold
        )
        plan, logp = prepare(objective, problem()), f64(FALLEN).requires_grad_()
        value = plan.part(member, logp)
        value.backward()
        return value.item(), logp.grad.tolist(), plan.clip_side(member, f64(FALLEN)).tolist()

    value, _, sides = at(3.0 + 1e-9, member=1)
    assert value != 0
    assert sides[1] == -1
    assert at(3.0 - 1e-9, member=1) == (0.0, [0.0, 0.0], [0, 0])
    assert at(3.0 - 1e-9, member=0)[0] != 0


def test_a_response_without_advantage_sits_at_no_bound():
    plan = prepare(preset("grpo", advantage="none", clip="cispo"), problem())
    assert plan.clip_side(0, f64((5.0, -9.0))).tolist() == [1, -1]
    assert plan.clip_side(1, f64((5.0, -9.0))).tolist() == [0, 0]


def test_vespo_weighs_by_the_samplers_correction_in_the_precision_of_the_log_probs():
    plain = preset("vespo", advantage="none")
    corrected = preset(
        "vespo", advantage="none", sampler_correction="token_truncate", sampler_clip_max=9.0
    )
    value, slope = part(plain)
    weight = -4 * slope[0]
    assert value == pytest.approx(-weight * sum(LOGP) / 4)
    assert part(corrected)[0] != value
    for objective in (plain, corrected):
        assert prepare(objective, problem()).part(0, f64(LOGP).float()).dtype == torch.float32


def test_a_weight_at_its_bound_is_not_beyond_it():
    """Ratios of exactly 1/2 and 2 at the edges 1 - 0.5 and 1 + 1."""
    objective = preset("grpo", advantage="none", clip="cispo", epsilon_low=0.5, epsilon_high=1.0)
    plan = prepare(objective, problem().replace_logps(old=[f64((0.0, 0.0))] * 2))
    assert plan.clip_side(0, f64((math.log(0.5), math.log(2.0)))).tolist() == [0, 0]
    assert plan.clip_side(0, f64((math.log(0.49), math.log(2.1)))).tolist() == [-1, 1]


def test_the_log_prob_is_at_temperature_one_unless_said():
    logits, tokens = f64([[0.0, math.log(3)]]), torch.tensor([1])
    assert token_logp(logits, tokens).tolist() == pytest.approx([math.log(0.75)])
    assert float(token_logp(logits, tokens, 2.0)) < math.log(0.75)


def one(objective, **fields):
    """The plan of the problem with fields of both responses replaced."""
    return prepare(objective, problem().replace_responses([fields, fields]))


def test_a_drift_of_just_the_threshold_is_kept_and_without_a_sampler_it_is_from_the_old_log_probs():
    objective = preset("grpo", advantage="group_mean", off_policy_threshold=2.0)
    for fields in (
        {"sampler_logp": f64((-1.0, -2.0))},
        {"sampler_logp": None, "old_logp": f64((-1.0, -2.0))},
    ):
        plan = one(objective, **fields)
        assert float(plan.part(1, f64((-3.0, -4.0)))) != 0
        assert float(plan.part(1, f64((-3.0, -4.0625)))) == 0


@pytest.mark.parametrize(
    ("member", "options", "ratio"),
    [(0, {"epsilon_high": 1.0}, 2.0), (1, {"epsilon_low": 0.5}, 0.5), (1, {"dual_clip": 4.0}, 4.0)],
)
def test_a_ratio_at_the_clips_edge_is_not_cut(member, options, ratio):
    plan = one(preset("grpo", advantage="group_mean", **options), old_logp=f64((0.0, 0.0)))
    at, over = f64((math.log(ratio), 0.0)), f64((math.log(ratio) * (1 + 1e-9), 0.0))
    assert plan.clip_side(member, at).tolist() == [0, 0]
    assert plan.clip_side(member, over)[0] != 0


def test_without_a_kl_term_no_reference_is_asked_for():
    plan = one(preset("grpo", beta=0.0), ref_logp=None)
    assert plan.ref_logp is None


def test_scores_of_any_precision_are_kept_in_float64():
    scores = Scores(ref_logp=(f64(REF).float(), f64(REF).float()))
    plan = prepare(preset("grpo", beta=0.1), problem(), scores)
    assert {each.dtype for each in plan.ref_logp} == {torch.float64}


def test_a_score_that_is_not_finite_is_named_with_what_to_do():
    line = "ref_logp of member 0 is nan at token 1, which counts; score it again, or mask the token"
    with pytest.raises(InputError, match=f"^{line}$"):
        prepare(
            preset("grpo", beta=0.1), problem(), Scores(ref_logp=(f64((0.0, math.nan)), f64(REF)))
        )


def test_a_single_counted_token_divides_by_one():
    response = problem(mask=(True, False)).responses[0]
    alone = Problem(
        groups=(Group(prompt=torch.zeros(3, dtype=torch.int64), responses=(response,)),)
    )
    objective = preset("grpo", ratio="none", clip="none", advantage="none")
    assert prepare(objective, alone).denominators == (1.0,)


def test_all_tokens_of_the_problem_count_whatever_the_micro_batch():
    given = problem().replace_responses([{}, {"mask": torch.tensor([True, False])}])
    local = preset("bnpo", micro_batch=1)
    assert prepare(local, given).denominators == (4.0, 2.0)
    assert prepare(preset("dapo"), given).denominators == (3.0, 3.0)
