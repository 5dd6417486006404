from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from lsverify.advantages import advantages, kl_estimate
from lsverify.errors import InputError
from lsverify.objective import (
    PRESETS,
    Objective,
    Scores,
    monolithic,
    prepare,
    preset,
    token_entropy,
    token_logp,
)
from lsverify.oracles import loss_by_hand
from lsverify.problems import Group, Problem, ProblemSpec, Response, draw

VOCABULARY = 13
EXACT = 1e-12


def drawn(objective: Objective, seed: int = 0, **options) -> tuple[Problem, list[torch.Tensor]]:
    """A problem and float64 logits, log-ratios spread by 0.5 around 0 and reference log-probs by 0.3."""
    spec = {"prompt_lengths": (3, 2, 4), "group_sizes": (4, 1, 3), "holes": True, "truncated": True}
    problem = draw(ProblemSpec(seed=seed, **{**spec, **options}), VOCABULARY)
    generator = torch.Generator().manual_seed(seed)
    logits, old, ref = [], [], []
    for response in problem.responses:
        shape = (len(response), VOCABULARY + 2)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        logits.append(2 * noise[:, 2:])
        logp = token_logp(logits[-1], response.tokens, objective.temperature)
        old.append(logp + 0.5 * noise[:, 0])
        ref.append(logp + 0.3 * noise[:, 1])
    if problem.responses[0].ref_logp is None:
        return problem.replace_logps(old=old), logits
    return problem.replace_logps(old=old, ref=ref), logits


def two_responses(ratio: float = 1.1) -> tuple[Problem, list[torch.Tensor]]:
    """One group: reward 1 with one token, reward 0 with three; every token's log-prob is log(1/4) and its ratio
    as given."""
    quarter = math.log(0.25)
    responses = []
    for length, reward in ((1, 1.0), (3, 0.0)):
        logp = torch.full((length,), quarter, dtype=torch.float64)
        responses.append(
            Response(
                tokens=torch.zeros(length, dtype=torch.int64),
                mask=torch.ones(length, dtype=torch.bool),
                reward=reward,
                old_logp=logp - math.log(ratio),
                ref_logp=logp - math.log(ratio),
            )
        )
    problem = Problem(groups=(Group(prompt=torch.tensor([1]), responses=tuple(responses)),))
    return problem, [torch.zeros(len(each), 4, dtype=torch.float64) for each in responses]


def by_members(objective, problem, logits, scores=None):
    """The loss and its gradient through one member at a time."""
    plan = prepare(objective, problem, scores)
    leaves = [rows.clone().requires_grad_() for rows in logits]
    total = 0.0
    for i, rows in enumerate(leaves):
        loss = plan.member(i, rows).loss
        loss.backward()
        total += loss.item()
    return total, [rows.grad for rows in leaves]


def by_monolith(objective, problem, logits, scores=None):
    leaves = [rows.clone().requires_grad_() for rows in logits]
    loss = monolithic(objective, problem, leaves, scores)
    loss.backward()
    return loss.item(), [rows.grad for rows in leaves]


def by_hand(objective, problem, logits):
    logps, entropies = [], []
    for rows, response in zip(logits, problem.responses, strict=True):
        logps.append(token_logp(rows, response.tokens, objective.temperature).tolist())
        entropies.append(token_entropy(rows, objective.temperature).tolist())
    return loss_by_hand(objective, problem, logps, entropies)


def relative(left, right) -> float:
    left, right = torch.cat([x.flatten() for x in left]), torch.cat([x.flatten() for x in right])
    return float((left - right).norm() / right.norm())


def assert_three_agree(objective, problem, logits):
    parts, gradient = by_members(objective, problem, logits)
    whole, whole_gradient = by_monolith(objective, problem, logits)
    hand = by_hand(objective, problem, logits)
    assert whole == pytest.approx(hand, rel=EXACT, abs=EXACT)
    assert parts == pytest.approx(hand, rel=EXACT, abs=EXACT)
    assert sum(float(rows.norm()) for rows in whole_gradient) > 0
    assert relative(gradient, whole_gradient) <= EXACT


RATIO_AND_CLIP = [
    {"ratio": "token"},
    {"ratio": "token", "epsilon_high": 0.28, "dual_clip": 3.0},
    {"ratio": "token", "clip": "cispo"},
    {"ratio": "token", "clip": "none"},
    {"ratio": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    {"ratio": "sequence", "clip": "cispo"},
    {"ratio": "trajectory", "epsilon_low": 1.0},
    {"ratio": "none", "clip": "none"},
]
AGGREGATIONS = [
    {"aggregation": "sequence_mean"},
    {"aggregation": "global_tokens"},
    {"aggregation": "local_tokens", "micro_batch": 3},
    {"aggregation": "local_tokens"},
    {"aggregation": "constant", "constant_length": 7},
]
KLS = [
    {},
    {"kl": "k1", "beta": 0.03},
    {"kl": "k2", "beta": 0.03},
    {"kl": "k3", "beta": 0.03},
    {"kl": "k1", "beta": 0.03, "kl_in": "reward"},
    {"kl": "k2", "beta": 0.03, "kl_in": "reward"},
    {"kl": "k3", "beta": 0.03, "kl_in": "reward"},
]
REST = [
    {},
    {"temperature": 0.6},
    {"entropy_bonus": 0.02},
    {"mask_truncated": True, "temperature": 1.7, "entropy_bonus": 0.01},
    {"mask_truncated": True},
]


def grid():
    """Every advantage with every ratio and clip and every aggregation, while KL and the rest go round."""
    kls, rest = itertools.cycle(KLS), itertools.cycle(REST + REST[3:])
    axes = itertools.product(
        ("group_std", "group_mean", "leave_one_out", "batch_std", "none"),
        RATIO_AND_CLIP,
        AGGREGATIONS,
    )
    for seed, (advantage, ratio, aggregation) in enumerate(axes):
        if seed % 7 == 0:
            next(kls)
        yield (
            {"advantage": advantage, **ratio, **aggregation, **next(kls), **next(rest)},
            ratio,
            seed,
        )


@pytest.mark.parametrize(
    "ratio", RATIO_AND_CLIP, ids=lambda ratio: "-".join(map(str, ratio.values()))
)
def test_members_sum_to_the_monolithic_form_and_to_the_loss_by_hand(ratio):
    cases = [(options, seed) for options, its, seed in grid() if its == ratio]
    assert len(cases) == 25
    for options, seed in cases:
        objective = Objective.parse(options)
        assert_three_agree(objective, *drawn(objective, seed))


def test_the_grid_holds_every_pair_of_values():
    chosen = [options for options, _, _ in grid()]
    for left, right in itertools.combinations([RATIO_AND_CLIP, AGGREGATIONS, KLS[1:], REST[1:]], 2):
        for a, b in itertools.product(left, right):
            assert any(a.items() <= each.items() and b.items() <= each.items() for each in chosen)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("rewards", ["distinct", "ties"])
def test_presets_agree_in_all_three_forms(name, rewards):
    objective = preset(name)
    assert_three_agree(objective, *drawn(objective, seed=3, rewards=rewards))


def test_responses_of_one_token_agree():
    for name in PRESETS:
        objective = preset(name, mask_truncated=False)
        assert_three_agree(objective, *drawn(objective, response_lengths=(1,), seed=5))


# Closed forms on two responses of 1 and 3 tokens, worked by hand: reward 1 and 0, so the group's mean is 1/2 and
# its sample standard deviation sqrt(1/2).
STD_ADVANTAGE = 0.5 / (math.sqrt(0.5) + 1e-4)
QUARTER = math.log(0.25)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        # mean of (-1.1 A) and (+1.1 A): lengths drop out
        (preset("grpo"), 0.0),
        # (-1.1 A + 3 * 1.1 A) / 4 tokens
        (preset("dapo"), 2 * 1.1 * STD_ADVANTAGE / 4),
        (preset("bnpo"), 2 * 1.1 * STD_ADVANTAGE / 4),
        (preset("bnpo", micro_batch=1), 0.0),
        # A = +-1/2, 2 responses of at most 512
        (preset("dr_grpo"), 2 * 1.1 * 0.5 / (2 * 512)),
        (preset("dr_grpo", constant_length=3), 2 * 1.1 * 0.5 / 6),
        # A = +-1 against the other's reward; ratios 1.1 and 1.1^3, the second above the edge on its unclipped side
        (preset("rloo"), (-1.1 + 1.1**3) / 2),
        # weight 1.1, log-prob log(1/4) each
        (preset("cispo"), 2 * 1.1 * STD_ADVANTAGE * QUARTER / 4),
        # mean log-ratio log(1.1) is above 1.0004: cut for the first, not for the second
        (preset("gspo"), STD_ADVANTAGE * (-1.0004 + 1.1) / 2),
        # -1 * log(1/4) over 2 responses, whatever the ratio
        (preset("reinforce"), -QUARTER / 2),
    ],
    ids=lambda value: value.name if isinstance(value, Objective) else "",
)
def test_presets_in_closed_form(objective, expected):
    problem, logits = two_responses(ratio=1.1)
    assert by_members(objective, problem, logits)[0] == pytest.approx(
        expected, rel=1e-14, abs=1e-15
    )
    assert by_monolith(objective, problem, logits)[0] == pytest.approx(
        expected, rel=1e-14, abs=1e-15
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"aggregation": "sequence_mean"}, (15.0, 6.0, 12.0)),
        ({"aggregation": "global_tokens"}, (11.0, 11.0, 11.0)),
        ({"aggregation": "local_tokens", "micro_batch": 2}, (14.0, 14.0, 8.0)),
        ({"aggregation": "constant", "constant_length": 9}, (27.0, 27.0, 27.0)),
    ],
)
def test_denominators(options, expected):
    lengths = (6, 2, 4)
    objective = Objective.parse({"mask_truncated": True, **options})
    problem = draw(
        ProblemSpec(prompt_lengths=(2,), group_sizes=(3,), response_lengths=lengths), VOCABULARY
    )
    hole = torch.tensor([True, True, False, True, True, True])
    problem = problem.replace_responses([{"mask": hole}, {}, {}])
    assert prepare(objective, problem).denominators == expected

    truncated = problem.replace_responses([{}, {"truncated": True}, {}])
    now = {"global_tokens": 9.0, "local_tokens": 10.0}.get(objective.aggregation, expected[0])
    plan = prepare(objective, truncated)
    assert plan.denominators[0] == now
    assert not plan.counted[1].any()


def test_truncated_responses_leave_the_loss_and_the_kl_but_not_the_statistics():
    objective = preset("dapo", beta=0.1, kl="k1", kl_in="reward")
    problem, logits = drawn(objective, seed=2, rewards="distinct")
    cut = next(i for i, each in enumerate(problem.responses) if each.truncated)
    _, gradient = by_members(objective, problem, logits)
    assert not gradient[cut].any()
    plan = prepare(objective, problem)
    shifted = [
        {"old_logp": each.old_logp - float(i == cut)} for i, each in enumerate(problem.responses)
    ]
    assert prepare(objective, problem.replace_responses(shifted)).advantages.equal(plan.advantages)
    raised = [{"reward": each.reward + (i == cut)} for i, each in enumerate(problem.responses)]
    other = prepare(objective, problem.replace_responses(raised)).advantages
    assert not other.equal(plan.advantages)


def test_a_response_without_counted_tokens_gives_zero_with_a_graph_and_stays_in_the_mean():
    objective = preset("grpo")
    problem, logits = two_responses()
    problem = problem.replace_responses([{}, {"mask": torch.zeros(3, dtype=torch.bool)}])
    value, gradient = by_members(objective, problem, logits)
    assert value == pytest.approx(-1.1 * STD_ADVANTAGE / 2)
    assert not gradient[1].any()
    for aggregation in ("global_tokens", "local_tokens", "constant"):
        all_masked = problem.replace_responses([{"mask": torch.zeros(1, dtype=torch.bool)}, {}])
        objective = preset("grpo", aggregation=aggregation)
        assert by_members(objective, all_masked, logits)[0] == 0
        assert by_monolith(objective, all_masked, logits)[0] == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("group_std", [-1, 0, 1, 0, 0, 0]),
        ("group_mean", [-2, 0, 2, 0, 0, 0]),
        ("leave_one_out", [-3, 0, 3, 7, 0, 0]),
        ("none", [1, 3, 5, 7, 0.1, 0.1]),
    ],
)
def test_advantages_in_closed_form(kind, expected):
    rewards, group_of = [1.0, 3.0, 5.0, 7.0, 0.1, 0.1], [0, 0, 0, 1, 2, 2]
    assert advantages(kind, rewards, group_of, epsilon=0.0) == pytest.approx(expected, rel=1e-15)


def test_batch_std_divides_by_the_sample_spread_of_all_rewards():
    values = advantages("batch_std", [0.0, 2.0, 4.0, 6.0], [0, 0, 1, 1], epsilon=0.5)
    spread = math.sqrt(20 / 3) + 0.5
    assert values == pytest.approx([-1 / spread, 1 / spread] * 2, rel=1e-15)
    assert advantages("batch_std", [3.0], [0], epsilon=0.0) == [0.0]


@pytest.mark.parametrize("kind", ["group_std", "group_mean", "leave_one_out", "batch_std"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_equal_rewards_give_exactly_zero_loss_and_gradient(kind, epsilon):
    objective = Objective(advantage=kind, advantage_epsilon=epsilon)
    problem, logits = drawn(objective, group_sizes=(3, 2, 5), rewards="equal", holes=False)
    assert 0.1 + 0.1 + 0.1 != 0.3  # the mean of equal rewards is not always the reward
    problem = problem.replace_responses([{"reward": 0.1} for _ in problem.responses])
    for form in (by_members, by_monolith):
        value, gradient = form(objective, problem, logits)
        assert value == 0
        assert not any(rows.any() for rows in gradient)


def test_uneven_groups_keep_their_own_statistics():
    values = advantages("group_mean", [1, 2, 3, 10, 20, 5, 5, 5, 9], [0, 0, 0, 1, 1, 2, 2, 2, 2], 0)
    assert values == [-1, 0, 1, -5, 5, -1, -1, -1, 3]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [by_members, by_monolith])
def test_masked_slots_never_leak(bad, form):
    for name, bonus in itertools.product(("grpo", "gspo", "rloo", "cispo"), (0.0, 0.02)):
        objective = preset(name, beta=0.03, entropy_bonus=bonus, mask_truncated=True)
        problem, logits = drawn(objective, seed=6)
        counted = prepare(objective, problem).counted
        value, gradient = form(objective, problem, logits)
        # A truncated response is masked by the objective only, so its own mask must still see finite numbers.
        changes = []
        for response in problem.responses:
            fields = {"old_logp": response.old_logp, "ref_logp": response.ref_logp}
            changes.append({key: torch.where(response.mask, x, bad) for key, x in fields.items()})
        poisoned = [
            torch.where(mask[:, None], rows, bad)
            for mask, rows in zip(counted, logits, strict=True)
        ]
        again, same = form(objective, problem.replace_responses(changes), poisoned)
        assert again == value
        assert all(a.equal(b) for a, b in zip(gradient, same, strict=True))
        for mask, rows in zip(counted, same, strict=True):
            assert not rows[~mask].any()


@pytest.mark.parametrize("name", PRESETS)
def test_temperature_divides_the_logits(name):
    warm, plain = preset(name, temperature=0.5, entropy_bonus=0.1), preset(name, entropy_bonus=0.1)
    problem, logits = drawn(warm)
    value, gradient = by_members(warm, problem, logits)
    halved, expected = by_members(plain, problem, [rows / 0.5 for rows in logits])
    assert value == pytest.approx(halved, rel=EXACT, abs=EXACT)
    assert relative(gradient, [rows / 0.5 for rows in expected]) <= EXACT


def test_entropy_bonus_is_subtracted_and_aggregated_like_the_loss():
    for aggregation in ("sequence_mean", "global_tokens", "constant"):
        plain = preset("grpo", aggregation=aggregation)
        bonus = preset("grpo", aggregation=aggregation, entropy_bonus=0.3)
        problem, logits = two_responses()
        difference = by_members(bonus, problem, logits)[0] - by_members(plain, problem, logits)[0]
        tokens = {"sequence_mean": 1, "global_tokens": 1, "constant": 4 / (2 * 512)}[aggregation]
        assert difference == pytest.approx(-0.3 * math.log(4) * tokens)


def test_entropy_of_forbidden_tokens():
    logits = torch.tensor([[0.0, 0.0, -math.inf, 0.0]], dtype=torch.float64, requires_grad=True)
    entropy = token_entropy(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(3))
    assert logits.grad.isfinite().all()
    objective = preset("grpo", entropy_bonus=0.1)
    problem, rows = two_responses()
    rows = [torch.cat([each, torch.full((len(each), 1), -math.inf)], dim=1) for each in rows]
    for form in (by_members, by_monolith):
        assert form(objective, problem, rows)[0] == pytest.approx(-0.1 * math.log(4))


@pytest.mark.parametrize(
    ("options", "advantage", "ratio", "side", "slope"),
    [
        # slope: d loss_t / d logp_t times D, which is -A r inside and 0 where the clip cuts
        ({}, 1, 1.1, 0, -1.1),
        ({}, 1, 1.3, 1, 0.0),
        ({}, 1, 0.7, 0, -0.7),
        ({}, -1, 1.3, 0, 1.3),
        ({}, -1, 0.7, -1, 0.0),
        ({}, -1, 5.0, 0, 5.0),
        ({"dual_clip": 3.0}, -1, 5.0, 1, 0.0),
        ({"dual_clip": 3.0}, 1, 0.7, 0, -0.7),
        ({"epsilon_low": 1.0}, -1, 0.01, 0, 0.01),
        ({"clip": "none"}, 1, 7.0, 0, -7.0),
        # cispo: the weight is bounded and constant, the gradient stays
        ({"clip": "cispo"}, 1, 1.3, 1, -1.2),
        ({"clip": "cispo"}, -1, 0.7, -1, 0.8),
        ({"clip": "cispo"}, 1, 1.1, 0, -1.1),
    ],
)
def test_clip_sides_and_their_gradients(options, advantage, ratio, side, slope):
    objective = Objective.parse({"advantage": "none", **options})
    problem, logits = two_responses(ratio)
    problem = problem.replace_responses([{"reward": float(advantage)}, {"reward": 0.0}])
    plan = prepare(objective, problem)
    logp = token_logp(logits[0], problem.responses[0].tokens)
    assert plan.clip_side(0, logp).tolist() == [side]
    assert plan.clip_side(0, logp).dtype == torch.int8
    # d logp / d logit of the chosen token is 1 - 1/4; two responses share the mean.
    for form in (by_members, by_monolith):
        _, gradient = form(objective, problem, logits)
        assert float(gradient[0][0, 0]) == pytest.approx(slope * 0.75 / 2, rel=1e-14, abs=1e-300)


def test_clip_side_is_zero_at_masked_slots_and_zero_advantages():
    objective = preset("grpo")
    problem, logits = drawn(objective, seed=1, rewards="ties")
    plan = prepare(objective, problem)
    sides = []
    for i, (rows, response) in enumerate(zip(logits, problem.responses, strict=True)):
        logp = token_logp(rows, response.tokens)
        side = plan.clip_side(i, torch.where(plan.counted[i], logp, math.nan))
        assert not side[~plan.counted[i]].any()
        assert plan.advantages[i] != 0 or not side.any()
        sides.append(side)
    assert set(torch.cat(sides).tolist()) == {-1, 0, 1}
    assert not prepare(preset("reinforce"), problem).clip_side(0, sides[0].double()).any()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (preset("grpo"), (0.8, 1.2)),
        (preset("gspo"), (1 - 3e-4, 1 + 4e-4)),
        (preset("cispo"), (5.0,)),
        (preset("grpo", dual_clip=3.0, epsilon_low=1.0), (1.2, 3.0)),
        (preset("reinforce"), ()),
    ],
)
def test_edges(objective, expected):
    assert objective.edges() == expected


def test_sequence_ratio_moves_with_every_counted_token():
    objective = preset("gspo", epsilon_low=0.5, epsilon_high=0.5, advantage="none")
    problem, logits = two_responses(ratio=1.1)
    problem = problem.replace_responses([{"reward": 0.0}, {"reward": 1.0}])
    _, gradient = by_members(objective, problem, logits)
    # loss = -s / 2 with s = exp(mean of three): each token's slope is -s / 3 / 2.
    assert gradient[1][:, 0].tolist() == pytest.approx([-1.1 / 6 * 0.75] * 3)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [("k1", 0.3, 1.0), ("k2", 0.045, 0.3), ("k3", math.exp(-0.3) - 0.7, 1 - math.exp(-0.3))],
)
def test_kl_estimators(kind, value, slope):
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(kind, logp, logp.detach() - 0.3)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, rel=1e-14)
    assert logp.grad.item() == pytest.approx(slope, rel=1e-14)


def test_kl_in_reward_is_the_masked_sum_on_old_log_probs_and_carries_no_gradient():
    objective = preset("grpo", advantage="none", kl="k1", kl_in="reward", beta=0.5)
    problem, logits = two_responses()
    far = [each.old_logp - torch.arange(1.0, len(each) + 1) for each in problem.responses]
    mask = torch.tensor([True, False, True])
    problem = problem.replace_logps(ref=far).replace_responses([{}, {"mask": mask}])
    assert prepare(objective, problem).advantages.tolist() == pytest.approx([1 - 0.5, 0 - 0.5 * 4])
    _, gradient = by_members(objective, problem, logits)
    assert float(gradient[0][0, 0]) == pytest.approx(-(1 - 0.5) * 1.1 * 0.75 / 2)


def test_scored_reference_takes_precedence_over_the_problems():
    objective = preset("grpo", beta=0.1)
    problem, logits = drawn(objective)
    ref = tuple(each.ref_logp - 0.5 for each in problem.responses)
    moved = problem.replace_logps(ref=ref)
    for form in (by_members, by_monolith):
        assert (
            form(objective, problem, logits, Scores(ref_logp=ref))[0]
            == form(objective, moved, logits)[0]
        )
        assert form(objective, problem, logits)[0] != form(objective, moved, logits)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_computation_dtype(dtype):
    objective = preset("dapo", beta=0.02, entropy_bonus=0.01)
    problem, logits = drawn(objective, seed=4)
    low = [rows.to(dtype) for rows in logits]
    for form in (by_members, by_monolith):
        value, gradient = form(objective, problem, low)
        exact, expected = form(objective, problem, [rows.double() for rows in low])
        assert value == pytest.approx(exact, rel=1e-5, abs=1e-6)
        assert all(rows.dtype == dtype for rows in gradient)
        # The float32 loss is right to 1e-6; what a low precision adds is the rounding of its own gradient.
        limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        assert relative([rows.double() for rows in gradient], expected) <= limit
    member = prepare(objective, problem).member(0, low[0])
    assert member.loss.dtype == member.logp.dtype == torch.float32


def test_an_overflowing_ratio_that_the_clip_removes_leaves_no_nan():
    problem, logits = two_responses()
    far = problem.replace_logps(old=[each.old_logp - 1e4 for each in problem.responses])
    for name, rewards in (("grpo", (1.0, 1.0)), ("dapo", (0.0, 0.0)), ("cispo", (1.0, 1.0))):
        objective = preset(name, advantage="none")
        changed = far.replace_responses([{"reward": reward} for reward in rewards])
        for form in (by_members, by_monolith):
            value, gradient = form(objective, changed, logits)
            assert math.isfinite(value)
            assert all(rows.isfinite().all() for rows in gradient)


def test_member_reports_the_log_probs_of_every_token_without_graph():
    objective = preset("grpo", temperature=0.7)
    problem, logits = drawn(objective)
    plan = prepare(objective, problem)
    for i, rows in enumerate(logits):
        logp = plan.member(i, rows.clone().requires_grad_()).logp
        expected = (rows / 0.7).log_softmax(-1)[
            torch.arange(len(rows)), problem.responses[i].tokens
        ]
        assert not logp.requires_grad
        assert torch.allclose(logp, expected, rtol=0, atol=1e-14)
    assert len(plan) == len(problem)


def test_a_plan_is_frozen_against_later_changes_of_the_problem():
    objective = preset("grpo", beta=0.1)
    problem, logits = drawn(objective)
    plan = prepare(objective, problem)
    before = plan.member(0, logits[0]).loss.item()
    response = problem.responses[0]
    for tensor in (response.old_logp, response.ref_logp, response.mask, response.tokens):
        tensor.zero_()
    assert plan.member(0, logits[0]).loss.item() == before


def test_siblings_in_another_order_give_the_same_parts():
    objective = preset("dapo", beta=0.02)
    problem, logits = drawn(objective, group_sizes=(5,), prompt_lengths=(2,))
    order = [3, 0, 4, 1, 2]
    group = problem.groups[0]
    turned = replace(
        problem, groups=(replace(group, responses=tuple(group.responses[i] for i in order)),)
    )
    plan, other = prepare(objective, problem), prepare(objective, turned)
    for new, old in enumerate(order):
        part = plan.member(old, logits[old]).loss.item()
        assert other.member(new, logits[old]).loss.item() == pytest.approx(part, rel=EXACT)


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"epsilon_low": -0.1}, ("epsilon_low is -0.1", "greater than 0")),
        ({"epsilon_low": 1.5}, ("epsilon_low is 1.5", "less than or equal to 1")),
        ({"temperature": 0}, ("temperature is 0", "greater than 0")),
        ({"beta": math.nan}, ("beta is nan", "finite")),
        ({"dual_clip": 1.0}, ("dual_clip is 1.0", "greater than 1")),
        ({"aggregation": "mean"}, ("aggregation is 'mean'", "'sequence_mean'", "'constant'")),
        ({"epsilon": 0.2}, ("no option 'epsilon'", "epsilon_low", "mask_truncated")),
        ({"ratio": "none"}, ('clip="two_sided" needs a ratio',)),
        ({"clip": "cispo", "dual_clip": 3.0}, ('dual_clip needs clip="two_sided"',)),
        ({"micro_batch": 2}, ('micro_batch needs aggregation="local_tokens"',)),
        ({"kl": "none", "beta": 0.1}, ("beta=0.1 needs kl",)),
        ({"beta": -1, "constant_length": 0}, ("beta is -1", "constant_length is 0")),
    ],
)
def test_bad_options_give_one_clear_line(values, fragments):
    with pytest.raises(InputError) as caught:
        Objective.parse(values)
    message = str(caught.value)
    assert message.startswith("objective: ")
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_unknown_presets_list_the_known_ones():
    with pytest.raises(
        InputError, match="objective 'ppo' is not known; choose from grpo, dr_grpo, dapo"
    ):
        preset("ppo")


def test_presets_take_overrides_and_survive_json():
    objective = preset("dapo", epsilon_high=0.4, name="mine")
    assert (objective.name, objective.epsilon_high, objective.aggregation) == (
        "mine",
        0.4,
        "global_tokens",
    )
    for each in PRESETS.values():
        assert Objective.parse(json.loads(each.model_dump_json())) == each


def test_missing_and_misshapen_scores_are_refused():
    problem, logits = drawn(preset("grpo"), reference=False)
    with pytest.raises(InputError, match="member 0 has no ref_logp; score the reference"):
        prepare(preset("grpo", beta=0.1), problem)
    with pytest.raises(InputError, match="score the reference"):
        monolithic(preset("grpo", beta=0.1), problem, logits)
    current = tuple(each.old_logp for each in problem.responses)
    with pytest.raises(InputError, match="ref_logp has 7 members; the problem has 8"):
        prepare(preset("grpo", beta=0.1), problem, Scores(ref_logp=current[1:]))
    with pytest.raises(InputError, match=r"policy_logp of member 1 has shape \(6,\)"):
        prepare(preset("grpo"), problem, Scores(policy_logp=(current[0], current[0], *current[2:])))
    broken = (torch.full_like(current[0], math.nan), *current[1:])
    with pytest.raises(InputError, match="ref_logp of member 0 is nan at token 0, which counts"):
        prepare(preset("grpo", beta=0.1), problem, Scores(ref_logp=broken))


def test_logits_that_do_not_fit_are_refused():
    problem, logits = drawn(preset("grpo"))
    with pytest.raises(
        InputError, match=r"logits of member 0 have shape \(5, 13\); its response has 6"
    ):
        prepare(preset("grpo"), problem).member(0, logits[0][:-1])
    with pytest.raises(InputError, match="rows"):
        monolithic(preset("grpo"), problem, [logits[0][:-1], *logits[1:]])
