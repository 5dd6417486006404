"""`docs/objective.md`: TRL's options, ours, and how far apart the two are on drawn problems.

`python -m lsverify.trl_table > docs/objective.md` writes it. Every number is measured as it is written.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lsverify.objective_options import Objective, preset
from lsverify.problem_types import Problem
from lsverify.problems import ProblemSpec, draw
from lsverify.trl_options import LOSS_TYPES, SCALES, rloo_options, trl_options
from lsverify.trl_oracle import apart, disagreement, our_loss, trl_loss

SEEDS = 3
BOUNDS = {"sampler_clip_max": 1.2, "sampler_clip_min": 0.8}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LEVELS: tuple[Any, ...] = ("token", "sequence")

Scored = tuple[Problem, list[Tensor], list[Tensor]]


def scored(seed: int = 0, **options: Any) -> Scored:
    """A problem with every kind of log-prob, the policy's log-probs, and its entropies: N tensors [R_i] each.

    Two groups of four with holes and truncated responses, unless options of `ProblemSpec` say otherwise. Log-ratios to
    the old policy lie within 0.6, those of the sampler within 0.3, those of the reference within 0.5.
    """
    spec = {"prompt_lengths": (3, 2), "group_sizes": (4, 4), "holes": True, "truncated": True}
    problem = draw(ProblemSpec.model_validate({"seed": seed, **spec, **options}), 50)
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        torch.rand(5, length, generator=generator, dtype=torch.float64)
        for length in problem.response_lengths
    ]
    old = [-0.3 - 3 * u[0] for u in drawn]
    pairs = list(zip(old, drawn, strict=True))
    problem = problem.replace_logps(
        old=old,
        ref=[logp + u[1] - 0.5 for logp, u in pairs],
        sampler=[logp + 0.6 * u[2] - 0.3 for logp, u in pairs],
    )
    return problem, [logp + 1.2 * u[3] - 0.6 for logp, u in pairs], [u[4] for u in drawn]


class Shared(NamedTuple):
    """An option that both have: TRL's words, ours, and objectives that use it."""

    trl: str
    ours: str
    objectives: Sequence[Objective]

    def worst(self) -> float:
        """The largest relative distance in loss and gradient over the objectives and drawn problems."""
        return max(
            disagreement(objective, *scored(seed, holes=objective.ratio != "trajectory"))
            for objective in self.objectives
            for seed in range(SEEDS)
        )


class Apart(NamedTuple):
    """Where the two differ by definition, and an example's relative distance; None: one side refuses it."""

    trl: str
    ours: str
    example: Callable[[], float] | None = None


def _forms(**options: Any) -> list[Objective]:
    """One objective of each loss type and importance level, with the options that they can take."""
    more: dict[str, dict[str, Any]] = {
        "cispo": {"epsilon_low": 1.0},
        "dr_grpo": {"constant_length": 7},
    }
    forms = [(pair, more.get(name, {})) for pair, name in LOSS_TYPES.items()]
    forms.append((("two_sided", "constant"), {"constant_length": 1}))
    return [
        Objective.parse({"clip": clip, "aggregation": into, "ratio": level, **own, **options})
        for ((clip, into), own), level in itertools.product(forms, LEVELS)
    ]


def _of(loss_type: str) -> list[Objective]:
    return [each for each in _forms() if trl_options(each)["loss_type"] == loss_type]


def shared() -> list[Shared]:
    """Every option that both have."""
    sampled = [
        preset(name, sampler_correction=mode, **BOUNDS)
        for name, mode in itertools.product(("grpo", "dapo", "cispo", "sapo"), MODES)
    ]
    sampled += [preset("vespo", sampler_correction=mode, **BOUNDS) for mode in MODES[:2]]
    two = '`clip="two_sided"`'
    bounded = [preset(name, dual_clip=1.3) for name in ("grpo", "dapo", "gspo")]
    with_bonus = [preset(name, entropy_bonus=0.1) for name in ("dapo", "bnpo", "cispo", "vespo")]
    accumulated = [preset("bnpo", micro_batch=size, ratio=r) for size in (2, 4) for r in LEVELS]
    pairs = [
        each
        for each in _forms(beta=0.1, kl_weighted=True)
        if (each.ratio == "sequence") == (trl_options(each)["loss_type"] != "luspo")
    ]
    scales = " / ".join(f'`"{name}"`' for name in SCALES.values())
    return [
        Shared('`loss_type="grpo"`', f'{two}, `aggregation="sequence_mean"`', _of("grpo")),
        Shared('`loss_type="dapo"`', f'{two}, `aggregation="global_tokens"`', _of("dapo")),
        Shared('`loss_type="bnpo"`', f'{two}, `aggregation="local_tokens"`', _of("bnpo")),
        Shared(
            '`loss_type="dr_grpo"`, `max_completion_length`',
            f'{two}, `aggregation="constant"`, `constant_length`',
            _of("dr_grpo"),
        ),
        Shared(
            '`loss_type="luspo"`',
            f'{two}, `aggregation="constant"`, `constant_length=1`',
            _of("luspo"),
        ),
        Shared(
            '`loss_type="cispo"`, `epsilon_high` the edge itself',
            '`clip="cispo"`, `epsilon_low=1`, the edge at 1 + `epsilon_high`',
            _of("cispo"),
        ),
        Shared(
            '`loss_type="sapo"`, `sapo_temperature_pos`, `sapo_temperature_neg`',
            '`clip="sapo"`, the same names',
            [*_of("sapo"), preset("sapo", sapo_temperature_pos=1.3, sapo_temperature_neg=0.7)],
        ),
        Shared(
            '`loss_type="vespo"`, `vespo_k_pos`, `vespo_lambda_pos`, `vespo_k_neg`, `vespo_lambda_neg`',
            '`clip="vespo"`, the same names',
            [*_of("vespo"), preset("vespo", vespo_k_pos=1.5, vespo_lambda_neg=0.7)],
        ),
        Shared(
            '`importance_sampling_level="token"` / `"sequence"`',
            '`ratio="token"` / `"sequence"`',
            _forms(),
        ),
        Shared(
            f"`scale_rewards=` {scales}",
            "`advantage=` " + " / ".join(f'`"{name}"`' for name in SCALES),
            [each for name in SCALES for each in _forms(advantage=name)],
        ),
        Shared("`epsilon`, `epsilon_high`", "`epsilon_low`, `epsilon_high`", [preset("dapo")]),
        Shared("`delta`, at least 1 + `epsilon_high`", "`dual_clip`", bounded),
        Shared("`beta`, `use_bias_correction_kl=False`", '`beta`, `kl="k3"`', _forms(beta=0.3)),
        Shared(
            "`beta`, `use_bias_correction_kl=True` (its default)",
            '`beta`, `kl="k3"`, `kl_weighted=True`',
            _forms(beta=0.3, kl_weighted=True),
        ),
        Shared("`mask_truncated_completions`", "`mask_truncated`", _forms(mask_truncated=True)),
        Shared("the mask of tools' tokens", "`Response.mask`", _forms()),
        Shared(
            "`vllm_importance_sampling_correction`, `vllm_importance_sampling_mode`, "
            "`vllm_importance_sampling_clip_max`, `vllm_importance_sampling_clip_min`",
            "`sampler_correction`, `sampler_clip_max`, `sampler_clip_min`",
            sampled,
        ),
        Shared(
            "`off_policy_mask_threshold`",
            "`off_policy_threshold`",
            _forms(off_policy_threshold=0.05),
        ),
        Shared(
            '`entropy_coef` with `"dapo"`, `"cispo"`, `"vespo"`, `"bnpo"`',
            "`entropy_bonus`",
            with_bonus,
        ),
        Shared('`gradient_accumulation_steps` with `"bnpo"`', "`micro_batch`", accumulated),
        Shared(
            'pairs that TRL warns of: `"sequence"` with `"bnpo"`, `"dr_grpo"`, `"dapo"`, `"cispo"`, `"vespo"`; '
            '`"token"` with `"luspo"`',
            "the same pairs",
            pairs,
        ),
        Shared(
            "`RLOOTrainer`: `beta`, `epsilon`, `epsilon_high`", "preset `rloo`", [preset("rloo")]
        ),
    ]


def _between(ours: Objective, theirs: Objective, **changed: Any) -> Callable[[], float]:
    """How far apart our loss is from TRL's under other options, on one drawn problem."""

    def measured() -> float:
        problem, logps, entropies = scored(1)
        said = {**trl_options(theirs), **changed}
        found = trl_loss(problem, logps, said, entropies=entropies)
        return apart(our_loss(ours, problem, logps, entropies), found)

    return measured


def _rounded_constants() -> float:
    problem, logps, _ = scored(1)
    found = trl_loss(problem, logps, trl_options(preset("sapo")), default_dtype=torch.float32)
    return apart(our_loss(preset("sapo"), problem, logps), found)


def _not_a_number() -> float:
    problem, logps, _ = scored(1)
    poisoned = [
        torch.where(each.mask, row, math.nan)
        for row, each in zip(logps, problem.responses, strict=True)
    ]
    return disagreement(preset("grpo"), problem, poisoned)


def _overflowing() -> float:
    problem, logps, _ = scored(1)
    far = problem.replace_logps(old=[each.old_logp - 800 for each in problem.responses])
    return disagreement(preset("sapo"), far, logps)


def _equal_rewards() -> float:
    problem, logps, _ = scored(1, group_sizes=(3, 3))
    level = problem.replace_responses([{"reward": 0.1} for _ in problem.responses])
    return disagreement(preset("grpo"), level, logps)


def _rloo_truncated() -> float:
    problem, logps, _ = scored(1, holes=False)
    objective = preset("rloo", mask_truncated=True)
    found = trl_loss(problem, logps, rloo_options(objective), rloo=True)
    return apart(our_loss(objective, problem, logps), found)


def differing() -> list[Apart]:
    """Where one definition is not the other's."""
    beyond = {"sampler_correction": "token_truncate", "sampler_clip_min": 1.05}
    return [
        Apart(
            "`delta` below 1 + `epsilon_high` cuts positive advantages at `delta`, and leaves negative ones the bound "
            "1 + `epsilon_high`",
            "`dual_clip` bounds negative advantages only, where it says",
            _between(preset("grpo", dual_clip=1.1), preset("grpo"), delta=1.1),
        ),
        Apart(
            '`entropy_coef` with `"grpo"`, `"dr_grpo"`, `"sapo"`, `"luspo"`: times the mean entropy of the counted '
            "tokens of a micro-batch",
            "`entropy_bonus` is aggregated like the rest of the token's loss, so a response's part stays its own",
            _between(preset("grpo", entropy_bonus=0.1), preset("grpo"), entropy_coef=0.1),
        ),
        Apart(
            '`"vespo"` with sampler\'s bounds that exclude 1: masked slots and padding are moved to a bound too and '
            "join the response's ratio",
            "only counted tokens join",
            _between(preset("vespo", **beyond), preset("vespo", **beyond)),
        ),
        Apart(
            "`sapo_temperature_*`, `vespo_*` and the sampler's log-probs take torch's default dtype: in float32, 1.05 is "
            "1.0499999523 whatever the model's precision. All numbers of the table above are with the default at float64",
            "options are float64, log-probs as precise as given",
            _rounded_constants,
        ),
        Apart(
            "What is masked is multiplied by 0, so a NaN there makes the loss NaN",
            "masked slots are never read",
            _not_a_number,
        ),
        Apart(
            "A ratio that overflows where its slope is 0 leaves a NaN in the gradient",
            "cut before the exponential; the gradient is 0",
            _overflowing,
        ),
        Apart(
            "Equal rewards leave the rounding of their mean, divided by 1e-4",
            "exactly 0, and so are loss and gradient",
            _equal_rewards,
        ),
        Apart(
            "`RLOOTrainer` with `mask_truncated_completions`: a truncated response keeps a ratio of 1 and adds -A / N to "
            "the loss (no gradient)",
            "adds 0",
            _rloo_truncated,
        ),
        Apart(
            "A sampler's log-prob that is NaN at a counted token has weight 1 and no drift",
            "refused: log-probs that count are finite",
        ),
        Apart(
            "Groups of one size, at least 2; a reward that is NaN leaves its group",
            "groups of any sizes; a reward is finite. A group of one has advantage 0",
        ),
    ]


ONLY_TRL = (
    (
        "`top_entropy_quantile`",
        "its threshold is a quantile of all responses' entropies at the current parameters",
    ),
    (
        '`multi_objective_aggregation="normalize_then_sum"`, `reward_weights`',
        "a problem has one reward a response",
    ),
    (
        "`use_adaptive_entropy`, `entropy_target`, `entropy_coef_min`, `entropy_coef_max`, "
        "`entropy_coef_delta`",
        "a coefficient that changes from step to step: give each step its `entropy_bonus`",
    ),
    (
        "`router_aux_loss_coef`",
        "`aux_coef`, a loss of router logits: held to the library's function in `tests/test_auxiliary.py`",
    ),
    ("`temperature`", "`temperature`: divides the logits, before there are log-probs to compare"),
    ("`RLOOConfig`: `normalize_advantages`, `reward_clip_range`", "give rewards as they should be"),
)
ONLY_OURS = (
    '`kl="k1"`, `"k2"`; `kl_in="reward"` but for `rloo`; `kl_straight_through`',
    '`advantage="none"`; `"leave_one_out"` but for `rloo`; another `advantage_epsilon` than 1e-4',
    '`ratio="none"`; `"trajectory"` but for `rloo`',
    '`clip="none"`; a low edge for `cispo`; pairs of `clip` and `aggregation` that no `loss_type` names',
)


def _shown(each: Apart) -> str:
    if each.example is None:
        return "refused"
    found = each.example()
    return f"{found:.1e}" if math.isfinite(found) else "TRL's is NaN"


def page() -> str:
    """The whole of `docs/objective.md`."""
    version = importlib.metadata.version("trl")
    lines = [
        "# The objective and TRL's",
        "",
        f"TRL {version}, its own code (`lsverify.trl_oracle`): the trainer's scoring (advantages, truncation, sampler's "
        "weights) and its loss, on log-probs, masks and rewards that ours gets too. Float64; the distance is the larger of "
        "the loss's, relative to the size of the responses' parts, and the gradient's in relative L2, with respect to "
        "log-probs and entropies. `tests/test_trl_oracle.py` has every option with every other, and fails above 1e-12.",
        "",
        "| TRL | here | at most |",
        "| --- | --- | --- |",
        *(f"| {each.trl} | {each.ours} | {each.worst():.1e} |" for each in shared()),
        "",
        "## Where they differ by definition",
        "",
        "| TRL | here | apart, for example |",
        "| --- | --- | --- |",
        *(f"| {each.trl} | {each.ours} | {_shown(each)} |" for each in differing()),
        "",
        "## Only in TRL",
        "",
        "| TRL | here |",
        "| --- | --- |",
        *(f"| {trl} | {ours} |" for trl, ours in ONLY_TRL),
        "",
        "## Only here",
        "",
        *(f"- {each}" for each in ONLY_OURS),
        "",
        "These are held to closed forms, to the batched form, to the form by hand and its central differences, and to "
        "forward mode (`tests/test_objective.py`, `tests/test_oracles.py`, `tests/test_trl_oracle.py`).",
        "",
        "Written by `python -m lsverify.trl_table`.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
