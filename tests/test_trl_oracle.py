"""Our objective against TRL's own loss code: the whole grid of what both can say, and where they part."""

import dataclasses
import inspect
import itertools
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import lsverify.objective
from lsverify.errors import InputError
from lsverify.objective import Objective, prepare, preset
from lsverify.oracles import check_objective
from lsverify.trl_options import rloo_options, trl_options
from lsverify.trl_oracle import apart, disagreement, our_loss, trl_loss
from lsverify.trl_table import page, scored, shared

EXACT = 1e-12
FORMS = {
    "grpo": {},
    "grpo-delta": {"dual_clip": 1.3, "epsilon_high": 0.28},
    "dapo": {"aggregation": "global_tokens", "epsilon_high": 0.28},
    "bnpo": {"aggregation": "local_tokens"},
    "bnpo-accumulated": {"aggregation": "local_tokens", "micro_batch": 4},
    "dr_grpo": {"aggregation": "constant", "constant_length": 7},
    "luspo": {"aggregation": "constant", "constant_length": 1},
    "cispo": {"clip": "cispo", "epsilon_low": 1.0, "aggregation": "global_tokens"},
    "sapo": {"clip": "sapo", "sapo_temperature_pos": 1.3, "sapo_temperature_neg": 0.7},
    "vespo": {"clip": "vespo", "aggregation": "global_tokens"},
    "vespo-other": {
        "clip": "vespo",
        "aggregation": "global_tokens",
        "vespo_k_pos": 1.5,
        "vespo_lambda_neg": 0.7,
    },
}
# What the two methods read that decides where and how often they run, not what the loss is.
NOT_OF_THE_LOSS = {
    "chat_template_kwargs",
    "gradient_checkpointing_kwargs",
    "log_multimodal",
    "num_generations",
    "num_generations_eval",
    "num_iterations",
    "pad_to_multiple_of",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "steps_per_generation",
    "use_vllm",
}
SCALES = ("group_std", "group_mean", "batch_std")
KLS = ({}, {"beta": 0.3}, {"beta": 0.3, "kl_weighted": True})
SAMPLERS = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
BOUNDS = {"sampler_clip_max": 1.2, "sampler_clip_min": 0.8}
MASKS = ((None, False), (None, True), (0.05, False))
PROBLEMS = [scored(seed, holes=seed != 2) for seed in range(3)]


def grid(form):
    """Every importance level, scale, KL, sampler's correction and mask, each with every other."""
    axes = itertools.product(("token", "sequence"), SCALES, KLS, SAMPLERS, MASKS)
    for ratio, scale, kl, sampler, (threshold, truncated) in axes:
        if FORMS[form].get("clip") == "vespo" and sampler.startswith("sequence"):
            continue
        yield Objective.parse(
            {
                **FORMS[form],
                **kl,
                **BOUNDS,
                "ratio": ratio,
                "advantage": scale,
                "sampler_correction": sampler,
                "off_policy_threshold": threshold,
                "mask_truncated": truncated,
            }
        )


@pytest.mark.parametrize("form", FORMS)
def test_every_shared_option_with_every_other_agrees_in_loss_and_gradient(form):
    for number, objective in enumerate(grid(form)):
        problem, logps, _ = PROBLEMS[number % len(PROBLEMS)]
        assert disagreement(objective, problem, logps) <= EXACT, objective
    assert number + 1 == (162 if form.startswith("vespo") else 270)


def test_the_grid_visits_both_sides_of_every_bound():
    sides = set()
    for problem, logps, _ in PROBLEMS:
        objective = preset(
            "grpo",
            off_policy_threshold=0.05,
            dual_clip=1.3,
            sampler_correction="token_truncate",
            **BOUNDS,
        )
        plan = prepare(objective, problem)
        for i, logp in enumerate(logps):
            advantage, mask = float(plan.advantages[i]), plan.counted[i]
            drift = (problem.responses[i].sampler_logp - logp)[mask].mean()
            sides.add(("off-policy", advantage > 0, bool(drift > 0.05)))
            sides.update(
                ("ratio", advantage > 0, side) for side in plan.clip_side(i, logp)[mask].tolist()
            )
            sides.update(("weight", float(w) if w in (0.8, 1.2) else 1) for w in plan.correction[i])
    assert sides >= {("off-policy", up, far) for up in (False, True) for far in (False, True)}
    assert sides >= {
        ("ratio", True, 1),
        ("ratio", True, 0),
        ("ratio", False, -1),
        ("ratio", False, 1),
    }
    assert sides >= {("weight", 0.8), ("weight", 1), ("weight", 1.2)}


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "sapo", "luspo", "vespo", "rloo"]
)
def test_presets_agree(name):
    for seed, rewards in enumerate(("distinct", "ties")):
        problem, logps, _ = scored(seed, holes=name != "rloo", rewards=rewards)
        assert disagreement(preset(name), problem, logps) <= EXACT


@pytest.mark.parametrize("name", ["dapo", "bnpo", "cispo", "vespo"])
def test_entropy_bonus_agrees_where_all_tokens_share_a_denominator(name):
    for micro in (None, 2) if name == "bnpo" else (None,):
        objective = preset(name, entropy_bonus=0.1, micro_batch=micro)
        problem, logps, entropies = scored(1)
        assert disagreement(objective, problem, logps, entropies) <= EXACT
        assert any(each.any() for each in our_loss(objective, problem, logps, entropies)[2])


@pytest.mark.parametrize("bounds", [(None, 1.1), (0.9, None), (None, None), (0.9, 1.1)])
@pytest.mark.parametrize("mode", SAMPLERS[1:])
def test_one_sided_bounds_of_the_sampler_agree(mode, bounds):
    low, high = bounds
    if bounds == (None, None) and mode.endswith("truncate"):
        return
    options = {"sampler_correction": mode, "sampler_clip_min": low, "sampler_clip_max": high}
    for name in ("dapo", "vespo") if mode.startswith("token") else ("dapo",):
        problem, logps, _ = scored(4)
        assert disagreement(preset(name, **options), problem, logps) <= EXACT


def test_without_a_sampler_the_threshold_falls_back_on_the_old_log_probs():
    problem, logps, _ = scored()
    bare = problem.replace_responses([{"sampler_logp": None} for _ in problem.responses])
    objective = preset("dapo", off_policy_threshold=0.05, mask_truncated=False)
    assert disagreement(objective, bare, logps) <= EXACT
    assert disagreement(objective, problem, logps) <= EXACT
    assert our_loss(objective, bare, logps).value != our_loss(objective, problem, logps).value


def test_all_masked_all_equal_and_single_tokens_agree():
    for options in ({"response_lengths": (1,), "truncated": False}, {"rewards": "equal"}):
        problem, logps, _ = scored(5, **options)
        for name in ("grpo", "gspo", "sapo", "luspo", "vespo"):
            assert disagreement(preset(name), problem, logps) <= EXACT
    problem, logps, _ = scored(6)
    empty = problem.replace_responses(
        [{"mask": torch.zeros_like(each.mask)} for each in problem.responses]
    )
    for name in ("grpo", "dapo", "bnpo", "gspo", "vespo"):
        objective = preset(name, beta=0.1)
        assert our_loss(objective, empty, logps).value == 0
        assert disagreement(objective, empty, logps) == 0


def test_every_loss_type_and_option_of_the_installed_release_is_known():
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    types = set()
    for listed in re.findall(r'self\.loss_type (?:==|!=|in) (\[[^]]*\]|"\w+")', source):
        types.update(re.findall(r'"(\w+)"', listed))
    said = {trl_options(objective)["loss_type"] for form in FORMS for objective in grid(form)}
    assert types == said


def swapped(objective, advantage, log_ratio):
    return lsverify.weights.sapo_gate(objective, -advantage, log_ratio)


def gate_without_scale(objective, advantage, log_ratio):
    tau = objective.sapo_temperature_pos if advantage > 0 else objective.sapo_temperature_neg
    return torch.sigmoid(tau * (log_ratio.exp() - 1))


def mean_in_vespo(objective, advantage, log_ratio, correction):
    return lsverify.weights.vespo_weight(
        objective, advantage, log_ratio / len(log_ratio), correction
    )


def sampler_left_out(objective, advantage, log_ratio, correction):
    return lsverify.weights.vespo_weight(objective, advantage, log_ratio, None)


def no_lower_bound(objective, old, sampler):
    upper = objective.model_copy(update={"sampler_clip_min": None})
    return lsverify.weights.sampler_weights(upper, old, sampler)


def truncated_not_masked(objective, old, sampler):
    mode = objective.sampler_correction.replace("_mask", "_truncate")
    other = objective.model_copy(update={"sampler_correction": mode})
    return lsverify.weights.sampler_weights(other, old, sampler)


def the_other_way_round(objective, old, sampler):
    return lsverify.weights.sampler_weights(objective, sampler, old)


def mean_over_the_response(objective, old, sampler):
    apart = (old - sampler) / max(len(old), 1)
    return lsverify.weights.sampler_weights(objective, apart, torch.zeros_like(apart))


def k1_through(kind, logp, ref):
    return lsverify.advantages.kl_estimate("k1" if kind == "k2" else kind, logp, ref)


def ratio_detached(plan, i, logp):
    ratio = plan._log_ratio(i, logp).exp().detach()
    return ratio * lsverify.advantages.kl_estimate(
        "k3", logp, plan._counted(plan.ref_logp, i, logp)
    )


def unweighted(plan, i, logp):
    return lsverify.advantages.kl_estimate("k3", logp, plan._counted(plan.ref_logp, i, logp))


def any_sign(plan, i, logp):
    drift = plan._counted(plan.sampler_logp, i, logp) - logp
    return bool(len(logp)) and float(drift.mean()) > plan.objective.off_policy_threshold


def sum_of_drift(plan, i, logp):
    drift = plan._counted(plan.sampler_logp, i, logp) - logp
    far = float(drift.sum()) > plan.objective.off_policy_threshold
    return far and float(plan.advantages[i]) < 0


VESPO_SAMPLER = preset("vespo", sampler_correction="token_truncate", **BOUNDS)
SAMPLED = {
    mode: preset("dapo", sampler_correction=mode, **BOUNDS, mask_truncated=False)
    for mode in SAMPLERS[1:]
}
WEIGHTED = preset("grpo", beta=0.2, kl_weighted=True)
FAULTS = [
    ("sapo_gate", swapped, preset("sapo")),
    ("sapo_gate", gate_without_scale, preset("sapo")),
    ("vespo_weight", mean_in_vespo, preset("vespo")),
    ("vespo_weight", sampler_left_out, VESPO_SAMPLER),
    ("sampler_weights", no_lower_bound, SAMPLED["token_truncate"]),
    ("sampler_weights", truncated_not_masked, SAMPLED["token_mask"]),
    ("sampler_weights", the_other_way_round, SAMPLED["sequence_truncate"]),
    ("sampler_weights", mean_over_the_response, SAMPLED["sequence_mask"]),
    ("Plan._kl_term", ratio_detached, WEIGHTED),
    ("Plan._kl_term", unweighted, WEIGHTED),
    ("Plan._off_policy", any_sign, preset("dapo", off_policy_threshold=0.05)),
    ("Plan._off_policy", sum_of_drift, preset("dapo", off_policy_threshold=0.05)),
    ("kl_estimate", k1_through, preset("grpo", beta=0.2, kl_straight_through=True)),
]


@pytest.mark.parametrize(
    ("where", "fault", "objective"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_planted_faults_are_seen_by_trl_and_by_the_rung(where, fault, objective, monkeypatch):
    problem, _, _ = scored(7)
    monkeypatch.setattr(f"lsverify.objective.{where}", fault)
    measure, limit, _ = check_objective(objective, problem, 7)
    assert not measure <= 1e5 * limit
    if not objective.kl_straight_through:
        gaps = [disagreement(objective, *scored(seed)[:2]) for seed in range(7, 10)]
        assert max(gaps) > 1e-5


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("luspo", {"constant_length": 2}),
        ("luspo", {"aggregation": "sequence_mean"}),
        ("sapo", {"aggregation": "global_tokens"}),
        ("vespo", {"aggregation": "sequence_mean"}),
        ("vespo", {"aggregation": "constant", "constant_length": 3}),
    ],
)
def test_wrong_denominators_are_seen(name, wrong):
    problem, logps, _ = scored(8)
    theirs = trl_loss(problem, logps, trl_options(preset(name)))
    assert apart(our_loss(preset(name, **wrong), problem, logps), theirs) > 1e-3


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"clip": "none"}, "none with sequence_mean"),
        ({"ratio": "trajectory"}, "ratio trajectory"),
        ({"advantage": "leave_one_out"}, "advantage leave_one_out"),
        ({"advantage_epsilon": 1e-6}, "advantage_epsilon 1e-06"),
        ({"beta": 0.1, "kl": "k1"}, "kl k1 in loss"),
        ({"beta": 0.1, "kl_straight_through": True}, "a straight-through KL"),
        ({"clip": "cispo", "aggregation": "global_tokens"}, "a low edge for cispo"),
        ({"dual_clip": 1.1}, "dual_clip below"),
        ({"entropy_bonus": 0.1}, "an entropy bonus with sequence_mean"),
    ],
)
def test_what_trl_cannot_say_is_refused_by_name(options, fragment):
    with pytest.raises(InputError, match=f"TRL has no counterpart of {fragment}"):
        trl_options(Objective.parse(options))


def test_batches_that_trl_cannot_hold_are_refused():
    problem, logps, _ = scored(group_sizes=(3, 2))
    with pytest.raises(InputError, match="groups are of one size"):
        trl_loss(problem, logps, {})
    problem, logps, _ = scored()
    with pytest.raises(InputError, match="no mask for holes"):
        trl_loss(problem, logps, {}, rloo=True)
    with pytest.raises(InputError, match="micro_batch=3 does not divide the 8 responses"):
        trl_loss(problem, logps, {}, micro_batch=3)
    with pytest.raises(InputError, match=r"TRL refuses its options: .*'no_such'"):
        trl_loss(problem, logps, {"no_such": 1})
    lone, rows, _ = scored(group_sizes=(1, 1))
    with pytest.raises(InputError, match="TRL refuses its options: GRPO requires at least 2"):
        trl_loss(lone, rows, {})
    with pytest.raises(InputError, match="only the preset rloo"):
        rloo_options(preset("rloo", kl="k3"))


NUMBER = r"\d\.\de[+-]\d+"


def without_numbers(text):
    return re.sub(NUMBER, "", text)


def test_the_page_is_what_the_table_writes():
    found = (Path(__file__).parents[1] / "docs/objective.md").read_text()
    made = page()
    assert without_numbers(found) == without_numbers(made)
    agreeing, differing = (
        made.split("## Where they differ")[0],
        made.split("## Where they differ")[1],
    )
    measured = [float(number) for number in re.findall(NUMBER, agreeing)]
    assert len(measured) == len(shared()) >= 22
    assert max(measured) <= EXACT
    assert all(float(number) > 1e-9 for number in re.findall(NUMBER, differing))


def test_every_option_that_trl_reads_is_on_the_page():
    from trl import GRPOConfig, GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    source += inspect.getsource(GRPOTrainer._generate_and_score_completions)
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    read = set(re.findall(r"self(?:\.args)?\.(\w+)", source)) & names
    found = (Path(__file__).parents[1] / "docs/objective.md").read_text()
    missing = {name for name in read - NOT_OF_THE_LOSS if f"`{name}" not in found}
    assert missing == set()


def test_a_loss_that_is_not_finite_is_no_agreement():
    problem, logps, _ = scored()
    ours = our_loss(preset("grpo"), problem, logps)
    for broken in (
        ours._replace(value=math.nan),
        ours._replace(gradient=[math.nan * g for g in ours.gradient]),
    ):
        assert apart(ours, broken) == math.inf
        assert apart(broken, ours) == math.inf


def test_without_trl_one_line_says_what_to_install(monkeypatch):
    problem, logps, _ = scored()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(InputError, match=r"TRL is not installed: pip install 'lsverify\[trl\]'"):
        trl_loss(problem, logps, {})
