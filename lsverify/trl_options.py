"""An objective in the words of TRL's configs, and the refusal of what they have no word for.

`docs/objective.md` has the table option by option.
"""

from __future__ import annotations

import math
from typing import Any

from lsverify.errors import InputError
from lsverify.objective_options import Objective, preset

LOSS_TYPES = {
    ("two_sided", "sequence_mean"): "grpo",
    ("two_sided", "global_tokens"): "dapo",
    ("two_sided", "local_tokens"): "bnpo",
    ("two_sided", "constant"): "dr_grpo",
    ("cispo", "global_tokens"): "cispo",
    ("sapo", "sequence_mean"): "sapo",
    ("vespo", "global_tokens"): "vespo",
}
LUSPO = ("two_sided", "constant")
SCALES = {"group_std": "group", "group_mean": "none", "batch_std": "batch"}
CORRECTION = "vllm_importance_sampling_"
AUXILIARY = ("aux_coef", "aux_prompt")
NAMED_ALIKE = ("sapo_", "vespo_")


def trl_options(objective: Objective) -> dict[str, Any]:
    """The `GRPOConfig` options that say what an objective says. Raises InputError where TRL cannot say it.

    `temperature` and the auxiliary loss act before log-probs are there, and are not looked at.
    """
    o = objective
    loss_type = LOSS_TYPES.get((o.clip, o.aggregation))
    checks = {
        f"{o.clip} with {o.aggregation}": loss_type is not None,
        f"ratio {o.ratio}": o.ratio in ("token", "sequence"),
        f"advantage {o.advantage}": o.advantage in SCALES,
        f"advantage_epsilon {o.advantage_epsilon}": o.advantage_epsilon == 1e-4
        or o.advantage == "group_mean",
        f"kl {o.kl} in {o.kl_in}": o.beta == 0 or (o.kl == "k3" and o.kl_in == "loss"),
        "a straight-through KL": o.beta == 0 or not o.kl_straight_through,
        "a low edge for cispo": o.clip != "cispo" or o.epsilon_low == 1,
        "dual_clip below 1 + epsilon_high": (o.dual_clip or 9e9) >= 1 + o.epsilon_high,
        f"an entropy bonus with {o.aggregation}": o.entropy_bonus == 0
        or o.aggregation in ("global_tokens", "local_tokens"),
    }
    if missing := [name for name, there in checks.items() if not there]:
        raise InputError(f"TRL has no counterpart of {missing[0]}; see docs/objective.md")
    luspo = o.aggregation == "constant" and o.constant_length == 1
    return {
        "loss_type": "luspo" if luspo else loss_type,
        "max_completion_length": o.constant_length,
        "importance_sampling_level": o.ratio,
        "scale_rewards": SCALES[o.advantage],
        "epsilon": o.epsilon_low,
        "epsilon_high": o.epsilon_high + (o.clip == "cispo"),
        "delta": o.dual_clip,
        "beta": o.beta,
        "use_bias_correction_kl": o.kl_weighted,
        "mask_truncated_completions": o.mask_truncated,
        "entropy_coef": o.entropy_bonus,
        "off_policy_mask_threshold": o.off_policy_threshold,
        **{name: getattr(o, name) for name in _named_alike()},
        **_correction(o),
    }


def objective_of(config: Any) -> Objective:
    """The objective that a `GRPOConfig` says, so that `trl_options` of it says the config again.

    The auxiliary loss of experts is left out. Raises InputError, naming the option, where we have no counterpart.
    """
    for name, neutral in (("top_entropy_quantile", 1.0), ("use_adaptive_entropy", False)):
        if getattr(config, name) != neutral:
            raise InputError(
                f"{name}={getattr(config, name)} has no counterpart here: use {neutral}"
            )
    loss, high = config.loss_type, config.epsilon_high
    clip, aggregation = {**{name: key for key, name in LOSS_TYPES.items()}, "luspo": LUSPO}[loss]
    cispo, corrected = (
        clip == "cispo",
        config.use_vllm and getattr(config, CORRECTION + "correction"),
    )
    objective = Objective.parse(
        {
            "name": loss,
            "advantage": {word: name for name, word in SCALES.items()}[config.scale_rewards],
            "ratio": config.importance_sampling_level,
            "clip": clip,
            "aggregation": aggregation,
            "epsilon_low": 1.0 if cispo else config.epsilon,
            "epsilon_high": (config.epsilon if high is None else high) - cispo,
            "dual_clip": config.delta if clip == "two_sided" else None,
            "constant_length": 1 if loss == "luspo" else config.max_completion_length,
            "beta": config.beta,
            "kl_weighted": config.use_bias_correction_kl,
            "mask_truncated": config.mask_truncated_completions,
            "entropy_bonus": config.entropy_coef,
            "temperature": config.temperature,
            "off_policy_threshold": config.off_policy_mask_threshold,
            **{name: getattr(config, name) for name in _named_alike()},
            **(
                {
                    "sampler_correction": getattr(config, CORRECTION + "mode"),
                    "sampler_clip_max": getattr(config, CORRECTION + "clip_max"),
                    "sampler_clip_min": getattr(config, CORRECTION + "clip_min"),
                }
                if corrected
                else {}
            ),
        }
    )
    for name, value in trl_options(objective).items():
        given = getattr(config, name)
        if name not in _unread(config) and not _same(value, given):
            raise InputError(f"{name}={given} with loss_type={loss!r} has no counterpart here")
    return objective


def _unread(config: Any) -> set[str]:
    """Options that the loss of such a config does not read, or reads as another one."""
    names = set() if config.use_vllm else {CORRECTION + "correction"}
    names |= {"luspo": {"max_completion_length"}, "cispo": {"epsilon", "delta"}}.get(
        config.loss_type, set()
    )
    if config.loss_type in ("sapo", "vespo"):
        names |= {"delta"}
    return names | ({"epsilon_high"} if config.epsilon_high is None else set())


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-12)
    return bool(ours == theirs)


def _named_alike() -> list[str]:
    return [name for name in Objective.model_fields if name.startswith(NAMED_ALIKE)]


def rloo_options(objective: Objective) -> dict[str, Any]:
    """The same for `RLOOConfig`, whose loss has one form: the preset `rloo` with its numbers changed."""
    said = (
        "name",
        "epsilon_low",
        "epsilon_high",
        "beta",
        "mask_truncated",
        "temperature",
        *AUXILIARY,
    )
    if preset("rloo", **{name: getattr(objective, name) for name in said}) != objective:
        raise InputError("RLOOTrainer says only the preset rloo; see docs/objective.md")
    return {
        "epsilon": objective.epsilon_low,
        "epsilon_high": objective.epsilon_high,
        "beta": objective.beta,
        "mask_truncated_completions": objective.mask_truncated,
    }


def _correction(o: Objective) -> dict[str, Any]:
    if o.sampler_correction == "none":
        return {CORRECTION + "correction": False}
    return {
        "use_vllm": True,
        CORRECTION + "mode": o.sampler_correction,
        CORRECTION + "clip_max": o.sampler_clip_max,
        CORRECTION + "clip_min": o.sampler_clip_min,
    }
