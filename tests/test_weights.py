"""The objective's smooth weights, constant weights and KL forms: closed forms, derivatives, masks, options.

`tests/test_trl_oracle.py` holds the same to TRL.
"""

import math

import pytest
import torch

from lsverify.errors import InputError
from lsverify.objective import Objective, prepare, preset
from lsverify.objective_options import read_objective
from lsverify.oracles import check_objective
from lsverify.problems import ProblemSpec, draw, off_policy
from lsverify.trl_oracle import our_loss
from lsverify.trl_table import scored

EXACT = 1e-12
BOUNDS = {"sampler_clip_max": 1.2, "sampler_clip_min": 0.8}


# Closed forms, by hand: one group, rewards 1 and 0 taken as they are, so only the first response has a policy term.
def one(log_ratios, reward=1.0, sampler=None, ref=None):
    """A problem of one counted response and one of advantage zero, and the policy's log-probs."""
    logp = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    old = logp - torch.tensor(log_ratios, dtype=torch.float64)
    problem, _, _ = scored(
        group_sizes=(2,),
        prompt_lengths=(1,),
        response_lengths=(len(log_ratios), 1),
        holes=False,
        truncated=False,
    )
    given = {
        "tokens": torch.zeros(len(logp), dtype=torch.int64),
        "mask": torch.ones(len(logp)).bool(),
    }
    first = {
        **given,
        "reward": reward,
        "old_logp": old,
        "sampler_logp": old
        if sampler is None
        else old - torch.tensor(sampler, dtype=torch.float64),
        "ref_logp": logp if ref is None else logp + torch.tensor(ref, dtype=torch.float64),
    }
    flat = {
        name: torch.tensor([-1.0], dtype=torch.float64)
        for name in ("old_logp", "ref_logp", "sampler_logp")
    }
    flat |= {
        "reward": 0.0,
        "tokens": torch.zeros(1, dtype=torch.int64),
        "mask": torch.ones(1).bool(),
    }
    return problem.replace_responses([first, flat]), [logp, torch.tensor([-1.0]).double()]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


LN = math.log
S_POS, S_NEG = sigmoid(0.5), sigmoid(-1.05 * 0.5)
PHI_POS = math.exp(3 - 3 * 1.5) * 1.5**2  # k 2, lambda 3 at w = 1.5
PHI_NEG = math.exp(2 - 2 * 1.5) * 1.5**3  # k 3, lambda 2
CLOSED = {
    # -f(1.5) / (2 responses); slope -A * 4 s (1 - s) * r / 2
    "sapo, A 1": ("sapo", {}, one([LN(1.5)]), -4 * S_POS / 2, -4 * S_POS * (1 - S_POS) * 1.5 / 2),
    "sapo, A -1": (
        "sapo",
        {},
        one([LN(0.5)], -1.0),
        4 / 1.05 * S_NEG / 2,
        4 * S_NEG * (1 - S_NEG) * 0.5 / 2,
    ),
    # two tokens of ratio 1.5 and 1: w = 1.5; three tokens in the whole problem; logp -1 each
    "vespo, A 1": ("vespo", {}, one([LN(1.5), 0.0]), 2 * PHI_POS / 3, -PHI_POS / 3),
    "vespo, A -1": ("vespo", {}, one([LN(1.5), 0.0], -1.0), -2 * PHI_NEG / 3, PHI_NEG / 3),
    # the sampler's 1.25 per token joins: w = 1.2 * 1.25
    "vespo, sampler": (
        "vespo",
        {"sampler_correction": "token_truncate"},
        one([LN(1.2), 0.0], 1.0, [LN(1.25), 0.0]),
        2 * PHI_POS / 3,
        -PHI_POS / 3,
    ),
    # a masked token's weight counts as 1e-8: w = 1e-8
    "vespo, masked": (
        "vespo",
        {"sampler_correction": "token_mask", "sampler_clip_max": 1.1},
        one([0.0, 0.0], 1.0, [LN(1.25), 0.0]),
        2 * math.exp(3 - 3e-8) * 1e-16 / 3,
        -math.exp(3 - 3e-8) * 1e-16 / 3,
    ),
    # mean log-ratio 0.001: inside 1.0025; three tokens, 2 responses; each slope -A r / 3 * 3 / 2
    "luspo": (
        "luspo",
        {},
        one([0.001, 0.003, -0.001]),
        -3 * math.exp(0.001) / 2,
        -math.exp(0.001) / 2,
    ),
    # ratio 1.1 and weights 1.25 -> 1.2, 0.5 -> 0.8
    "token_truncate": (
        "grpo",
        {"sampler_correction": "token_truncate", **BOUNDS},
        one([LN(1.1)] * 2, 1.0, [LN(1.25), LN(0.5)]),
        -1.1 * (1.2 + 0.8) / 4,
        -1.1 * 1.2 / 4,
    ),
    "token_mask": (
        "grpo",
        {"sampler_correction": "token_mask", **BOUNDS},
        one([LN(1.1)] * 2, 1.0, [LN(1.1), LN(0.5)]),
        -1.1 * 1.1 / 4,
        -1.1 * 1.1 / 4,
    ),
    # 1.5 * 0.75 = 1.125, within 1.2
    "sequence_truncate": (
        "grpo",
        {"sampler_correction": "sequence_truncate", **BOUNDS},
        one([LN(1.1)] * 2, 1.0, [LN(1.5), LN(0.75)]),
        -1.1 * 1.125 / 2,
        -1.1 * 1.125 / 4,
    ),
    "sequence_mask": (
        "grpo",
        {"sampler_correction": "sequence_mask", **BOUNDS},
        one([LN(1.1)] * 2, 1.0, [LN(1.5), LN(0.9)]),
        0.0,
        0.0,
    ),
    # mean of sampler - logp = 0.2 for A = -1
    "off-policy, beyond": ("grpo", {"off_policy_threshold": 0.19}, one([-0.2], -1.0), 0.0, 0.0),
    "off-policy, within": (
        "grpo",
        {"off_policy_threshold": 0.21, "epsilon_low": 0.5},
        one([-0.2], -1.0),
        math.exp(-0.2) / 2,
        math.exp(-0.2) / 2,
    ),
    "off-policy, A 1": (
        "grpo",
        {"off_policy_threshold": 0.19},
        one([-0.2]),
        -math.exp(-0.2) / 2,
        -math.exp(-0.2) / 2,
    ),
}
D3 = math.exp(0.3) - 0.3 - 1  # k3 at ref - logp = 0.3, slope 1 - e^0.3
CLOSED |= {
    # A = 0: only the KL term. Its weight r = 1.1 has slope r too.
    "kl weighted": (
        "grpo",
        {"beta": 0.5, "kl_weighted": True},
        one([LN(1.1)], 0.0, ref=[0.3]),
        0.5 * 1.1 * D3 / 2,
        0.5 * 1.1 * (D3 + 1 - math.exp(0.3)) / 2,
    ),
    "kl weighted per sequence": (
        "gspo",
        {"beta": 0.5, "kl_weighted": True},
        one([LN(1.21), 0.0], 0.0, ref=[0.3, 0.0]),
        0.5 * 1.1 * D3 / 4,
        0.5 * 1.1 * (D3 / 2 + 1 - math.exp(0.3)) / 4,
    ),
    "straight through": (
        "grpo",
        {"beta": 0.5, "kl_straight_through": True},
        one([LN(1.1)], 0.0, ref=[0.3]),
        0.5 * D3 / 2,
        0.5 * -0.3 / 2,
    ),
}


@pytest.mark.parametrize("case", CLOSED)
def test_closed_forms(case):
    name, options, (problem, logps), value, slope = CLOSED[case]
    ours = our_loss(preset(name, advantage="none", **options), problem, logps)
    assert ours.value == pytest.approx(value, rel=1e-14, abs=1e-16)
    assert float(ours.gradient[0][0]) == pytest.approx(slope, rel=1e-13, abs=1e-16)


NEW = [
    ("sapo", {}),
    ("sapo", {"ratio": "sequence", "beta": 0.1, "kl_weighted": True}),
    ("luspo", {"epsilon_low": 0.2, "epsilon_high": 0.2}),
    ("vespo", {"sampler_correction": "token_mask", **BOUNDS}),
    ("grpo", {"sampler_correction": "token_truncate", **BOUNDS}),
    ("rloo", {"sampler_correction": "sequence_truncate", **BOUNDS}),
    ("dapo", {"sampler_correction": "sequence_mask", "off_policy_threshold": 0.05}),
    ("grpo", {"beta": 0.2, "kl_weighted": True, "dual_clip": 1.3}),
    ("gspo", {"beta": 0.2, "kl_weighted": True}),
    ("grpo", {"beta": 0.2, "kl_straight_through": True}),
    ("dr_grpo", {"beta": 0.2, "kl_straight_through": True, "kl": "k1"}),
]


@pytest.mark.parametrize(("name", "options"), NEW)
def test_the_batched_form_the_form_by_hand_and_central_differences_agree(name, options):
    for seed in range(2):
        measure, limit, detail = check_objective(preset(name, **options), scored(seed)[0], seed)
        assert measure <= limit <= 1e-8, detail


# The forward mode's first use compiles formulas of its own with torch's old compiler.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "options"), NEW)
def test_forward_mode_agrees_with_the_gradient(name, options):
    problem, logps, _ = scored(3)
    objective = preset(name, **options)
    plan = prepare(objective, problem)
    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in logps]

    def loss(*rows):
        return torch.stack([plan.part(i, row) for i, row in enumerate(rows)]).sum()

    _, slope = torch.func.jvp(loss, tuple(logps), tuple(along))
    gradient = our_loss(objective, problem, logps).gradient
    products = torch.cat([a * b for a, b in zip(gradient, along, strict=True)])
    assert abs(float(slope - products.sum())) <= EXACT * float(products.abs().sum())
    assert products.any()


@pytest.mark.parametrize(("name", "options"), NEW)
def test_masked_slots_never_leak_into_what_is_new(name, options):
    problem, logps, _ = scored(3)
    objective = preset(name, **options)
    given = our_loss(objective, problem, logps)
    bad = [
        {
            kind: getattr(each, kind).masked_fill(~each.mask, math.nan)
            for kind in ("old_logp", "ref_logp", "sampler_logp")
        }
        for each in problem.responses
    ]
    masks = [each.mask for each in problem.responses]
    moved = [row.masked_fill(~mask, math.inf) for row, mask in zip(logps, masks, strict=True)]
    again = our_loss(objective, problem.replace_responses(bad), moved)
    assert again.value == given.value
    for mask, new, old in zip(masks, again.gradient, given.gradient, strict=True):
        assert new.equal(old)
        assert not new[~mask].any()


def test_a_sampler_correction_needs_what_the_sampler_reported():
    problem, _, _ = scored()
    bare = problem.replace_responses([{"sampler_logp": None} for _ in problem.responses])
    objective = preset("grpo", sampler_correction="token_truncate")
    with pytest.raises(InputError, match="member 0 has no sampler_logp; give what the sampler"):
        prepare(objective, bare)


@pytest.mark.parametrize("name", ["grpo", "vespo"])
def test_drawn_problems_have_a_sampler_where_the_objective_reads_it(name):
    objective = preset(name, sampler_correction="token_mask", off_policy_threshold=0.1)
    drawn = draw(ProblemSpec(), 40)
    assert drawn.responses[0].sampler_logp is None
    current = [each.old_logp for each in drawn.responses]
    found = off_policy(drawn, current, objective, 0)
    drift = torch.cat([each.sampler_logp - each.old_logp for each in found.responses]).abs()
    assert 0.1 <= float(drift.min()) <= float(drift.max()) <= 0.3 + 1e-12


@pytest.mark.parametrize(
    ("values", "fragments"),
    [
        ({"sampler_correction": "truncate"}, ("sampler_correction is 'truncate'", "'token_mask'")),
        (
            {"sampler_clip_min": 3.0, "sampler_clip_max": 2.0},
            ("sampler_clip_min=3.0 must be below sampler_clip_max=2.0",),
        ),
        (
            {"sampler_correction": "token_truncate", "sampler_clip_max": None},
            ('sampler_correction="token_truncate" needs sampler_clip_min or',),
        ),
        (
            {"clip": "vespo", "sampler_correction": "sequence_mask"},
            ('clip="vespo" needs a sampler_correction per token',),
        ),
        ({"kl_weighted": True, "kl_in": "reward"}, ("kl_weighted needs a ratio",)),
        (
            {"kl_weighted": True, "kl_straight_through": True},
            ("kl_straight_through needs", "no kl_weighted"),
        ),
        ({"clip": "sapo", "dual_clip": 3.0}, ('dual_clip needs clip="two_sided"',)),
        ({"clip": "vespo", "ratio": "none"}, ('clip="vespo" needs a ratio',)),
        ({"sapo_temperature_pos": 0}, ("sapo_temperature_pos is 0",)),
        ({"vespo_lambda_neg": 0}, ("vespo_lambda_neg is 0",)),
        ({"off_policy_threshold": -1}, ("off_policy_threshold is -1",)),
    ],
)
def test_new_options_that_cannot_be_used_give_one_clear_line(values, fragments):
    with pytest.raises(InputError) as caught:
        Objective.parse(values)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


def test_the_command_line_takes_the_new_options():
    text = "vespo,sampler_correction=token_mask,sampler_clip_max=null,vespo_k_pos=1.5"
    objective = read_objective(text)
    assert (objective.clip, objective.sampler_clip_max, objective.vespo_k_pos) == (
        "vespo",
        None,
        1.5,
    )


def test_an_overflowing_ratio_leaves_the_gate_finite():
    problem, logps = one([800.0])
    ours = our_loss(preset("sapo", advantage="none"), problem, logps)
    assert ours.value == -4 / 2
    assert not ours.gradient[0].any()
