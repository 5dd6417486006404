"""The options of an objective, their validation, and the named presets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lsverify.errors import InputError


class Objective(BaseModel):
    """One loss of the GRPO family. Frozen. `parse` and `preset` raise InputError in one line;
    calling the class itself raises pydantic's ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "custom"
    """A label for tables; no effect."""
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std", "none"] = (
        "group_std"
    )
    """How rewards become advantages; formulas at `lsverify.advantages.advantages`."""
    advantage_epsilon: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation that divides, in units of reward."""
    ratio: Literal["token", "sequence", "trajectory", "none"] = "token"
    """r = exp(x) with x = logp - old_logp: per token; `sequence`: x is its mean over the counted
    tokens (GSPO, eq. 7); `trajectory`: its sum over them (RLOO in TRL). Both are one number for the
    whole response and are differentiated as they stand, so every counted token moves the ratio that
    every counted token carries. `none`: no ratio, the policy term is -A * logp."""
    clip: Literal["two_sided", "cispo", "sapo", "vespo", "none"] = "two_sided"
    """`two_sided`: -min(r A, clamp(r, 1 - epsilon_low, 1 + epsilon_high) A) (PPO, eq. 7). `cispo`:
    -w A logp with the clamped ratio w as a constant (MiniMax-M1, eq. 4). `sapo`: -f(r) A with the smooth
    gate of `lsverify.weights.sapo_gate`. `vespo`: -phi A logp with the constant of
    `lsverify.weights.vespo_weight`, always of the whole response; `ratio` then weighs the KL term only.
    `none`: -r A."""
    epsilon_low: float = Field(default=0.2, gt=0, le=1)
    """The low edge is 1 - epsilon_low; at 1 there is no low edge."""
    epsilon_high: float = Field(default=0.2, gt=0)
    """The high edge is 1 + epsilon_high, for `cispo` too (TRL's epsilon_high is the edge there)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With `two_sided`: for a negative advantage the term is at most -A * dual_clip (Dual-clip PPO,
    eq. 5; `delta` in TRL)."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """Steepness of the gate of `sapo` for a positive advantage (2511.20347; the name is TRL's)."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """The same for a negative one."""
    vespo_k_pos: float = Field(default=2.0, ge=0)
    """The power in the weight of `vespo` for an advantage of at least 0 (2602.10693; names as in TRL)."""
    vespo_lambda_pos: float = Field(default=3.0, ge=1e-4)
    """Its decay; TRL raises smaller ones to 1e-4."""
    vespo_k_neg: float = Field(default=3.0, ge=0)
    """The power for a negative advantage."""
    vespo_lambda_neg: float = Field(default=2.0, ge=1e-4)
    """The decay for a negative advantage."""
    sampler_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """A constant weight exp(old_logp - sampler_logp) on the policy term: per token, or one per response
    from the sum over its counted tokens; beyond the bounds cut to them (`truncate`) or 0 (`mask`). The
    KL term and the entropy are not weighted. `vespo` has the weight inside its own ratio."""
    sampler_clip_max: float | None = Field(default=3.0, gt=0)
    """Upper bound of that weight; None: none."""
    sampler_clip_min: float | None = Field(default=None, gt=0)
    """Lower bound of it; None: none."""
    off_policy_threshold: float | None = Field(default=None, gt=0)
    """Drop the policy term of a response whose advantage is negative and whose mean over counted tokens
    of sampler_logp (old_logp where there is none) - logp is above this, in nats (DeepSeek-V3.2,
    2512.02556, eq. 9). A constant of the gradient; denominators and KL keep the response."""
    kl: Literal["none", "k1", "k2", "k3"] = "k3"
    """Estimator of KL(policy || reference) per token; no effect while beta is 0. Formulas at
    `lsverify.advantages.kl_estimate`. The sampled estimator is what gets differentiated."""
    kl_weighted: bool = False
    """Times the ratio, with its gradient and before any clip: the estimator's expectation is then under
    the current policy (2512.02556, eq. 7; TRL's use_bias_correction_kl, where it is the default)."""
    kl_straight_through: bool = False
    """The estimator's value with the gradient of k2, whose expectation on-policy is that of the KL (verl's
    `k3+`; TRL has none)."""
    kl_in: Literal["loss", "reward"] = "loss"
    """`loss`: beta times the estimator joins each token's loss. `reward`: beta times its sum over
    the counted tokens, of old against reference log-probs, leaves the reward before advantages."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL term; above 0 reference log-probs are needed."""
    aggregation: Literal["sequence_mean", "global_tokens", "local_tokens", "constant"] = (
        "sequence_mean"
    )
    """D_i; formulas at `prepare`."""
    constant_length: int = Field(default=512, ge=1)
    """Tokens, for `constant` (TRL's default max_completion_length)."""
    micro_batch: int | None = Field(default=None, ge=1)
    """Members per micro-batch, in flat order, for `local_tokens`; None: all in one."""
    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, for log-probs and entropy alike."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy in nats, aggregated like the rest of the token's loss (TRL divides it
    by the counted tokens whatever the loss type)."""
    aux_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (the library's `router_aux_loss_coef`);
    formula and counted tokens at `lsverify.auxiliary`. It is a loss of the router logits and no
    part of `Plan`: the paths add it to the members' sum. Above 0 a model type without it is refused."""
    aux_prompt: Literal["per_response", "once"] = "per_response"
    """How often a prompt's tokens count in it: in each of its responses, as in an ordinary batch, or
    once for each distinct prompt."""
    mask_truncated: bool = False
    """Count no token of a truncated response: it leaves numerator, token denominators and KL sums
    alike. It stays one of the N responses, and its reward stays in the group's statistics (DAPO's
    overlong filtering as in TRL)."""

    @model_validator(mode="after")
    def _axes_fit(self) -> Objective:
        if self.ratio == "none" and self.clip != "none":
            raise ValueError(f'clip="{self.clip}" needs a ratio; set clip="none" or another ratio')
        if self.dual_clip is not None and self.clip != "two_sided":
            raise ValueError(f'dual_clip needs clip="two_sided", not "{self.clip}"; leave it out')
        if self.micro_batch is not None and self.aggregation != "local_tokens":
            raise ValueError(
                f'micro_batch needs aggregation="local_tokens", not "{self.aggregation}"; leave it out'
            )
        if self.beta > 0 and self.kl == "none":
            raise ValueError(f'beta={self.beta} needs kl "k1", "k2" or "k3"; set one, or beta=0')
        return self

    @model_validator(mode="after")
    def _weights_fit(self) -> Objective:
        if self.kl_weighted and (self.ratio == "none" or self.kl_in != "loss"):
            raise ValueError('kl_weighted needs a ratio and kl_in="loss"; leave it out')
        if self.kl_straight_through and (self.kl_weighted or self.kl_in != "loss"):
            raise ValueError(
                'kl_straight_through needs kl_in="loss" and no kl_weighted; leave one out'
            )
        low, high = self.sampler_clip_min, self.sampler_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(f"sampler_clip_min={low} must be below sampler_clip_max={high}")
        if self.sampler_correction.endswith("_truncate") and low is None and high is None:
            raise ValueError(
                f'sampler_correction="{self.sampler_correction}" needs sampler_clip_min or '
                "sampler_clip_max; give one"
            )
        if self.clip == "vespo" and self.sampler_correction.startswith("sequence"):
            raise ValueError(
                'clip="vespo" needs a sampler_correction per token, not '
                f'"{self.sampler_correction}"; use token_truncate or token_mask'
            )
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Objective:
        """An objective from plain values; InputError with one line for what cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise InputError(f"objective: {_one_line(error)}") from None

    def edges(self) -> tuple[float, ...]:
        """The ratios at which a clip switches, ascending: per token, or per response for `sequence`
        and `trajectory`. Those of `dual_clip` act on negative advantages only."""
        if self.clip not in ("two_sided", "cispo"):
            return ()
        edges = {1 - self.epsilon_low, 1 + self.epsilon_high, self.dual_clip or 0.0}
        return tuple(sorted(edge for edge in edges if edge > 0))


def _one_line(error: ValidationError) -> str:
    lines = []
    for each in error.errors():
        field = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            lines.append(f"no option {field!r}; there are {', '.join(Objective.model_fields)}")
        else:
            lines.append(f"{field} is {each['input']!r}: {message}" if field else message)
    return "; ".join(lines).replace("\n", " ")


PRESETS: Mapping[str, Objective] = MappingProxyType(
    {
        each.name: each
        for each in (
            Objective(name="grpo"),
            Objective(
                name="dr_grpo", advantage="group_mean", aggregation="constant", constant_length=512
            ),
            Objective(
                name="dapo", epsilon_high=0.28, aggregation="global_tokens", mask_truncated=True
            ),
            Objective(name="bnpo", aggregation="local_tokens"),
            Objective(
                name="rloo",
                advantage="leave_one_out",
                ratio="trajectory",
                kl="k1",
                kl_in="reward",
                beta=0.05,
            ),
            Objective(
                name="cispo",
                clip="cispo",
                epsilon_low=1.0,
                epsilon_high=4.0,
                aggregation="global_tokens",
            ),
            Objective(name="gspo", ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
            Objective(name="sapo", clip="sapo"),
            Objective(
                name="luspo",
                ratio="sequence",
                epsilon_low=2e-3,
                epsilon_high=2.5e-3,
                aggregation="constant",
                constant_length=1,
            ),
            Objective(name="vespo", clip="vespo", aggregation="global_tokens"),
            Objective(
                name="reinforce",
                advantage="none",
                ratio="none",
                clip="none",
                aggregation="constant",
                constant_length=1,
            ),
        )
    }
)


def preset(name: str, /, **overrides: Any) -> Objective:
    """A named objective, some options changed. Raises InputError for an unknown name or a bad value.

    grpo       DeepSeekMath (2402.03300) eq. 3; TRL loss_type="grpo", beta 0 as there (paper: 0.04).
               D_i = N |m_i|.
    dr_grpo    Dr. GRPO (2503.20783): no std, no length; TRL "dr_grpo". D_i = N * 512.
    dapo       DAPO (2503.14476) eq. 8, clip 0.2 / 0.28, overlong filtering; TRL "dapo".
               D_i = all counted tokens.
    bnpo       TRL "bnpo": dapo's loss per micro-batch, clip 0.2. D_i = micro-batches * counted
               tokens of i's micro-batch; equals global tokens while micro_batch is None.
    rloo       Back to Basics (2402.14740), as TRL's RLOOTrainer: leave-one-out, ratio of whole
               responses, k1 with beta 0.05 in the reward. D_i = N |m_i|, which averages a number that
               is the same at all counted tokens: the mean over responses.
    cispo      MiniMax-M1 (2506.13585) eq. 4; TRL "cispo": weight at most 5 (ScaleRL, 2510.13786), no
               low edge. D_i = all counted tokens.
    gspo       GSPO (2507.18071) eq. 5, clip 3e-4 / 4e-4 (section 5.1); TRL
               importance_sampling_level="sequence", loss_type="grpo". D_i = N |m_i|.
    sapo       SAPO (2511.20347): the clip made smooth; TRL "sapo". D_i = N |m_i|.
    luspo      LUSPO (2602.05261): gspo's loss with each response weighed by its length, clip
               2e-3 / 2.5e-3 (section 5.1); TRL importance_sampling_level="sequence", loss_type="luspo".
               D_i = N.
    vespo      VESPO (2602.10693): a smooth weight of the whole response; TRL "vespo". D_i = all counted
               tokens.
    reinforce  Williams (1992): -reward * log-prob of the response, mean over responses. D_i = N.
    """
    if name not in PRESETS:
        raise InputError(f"objective {name!r} is not known; choose from {', '.join(PRESETS)}")
    return Objective.parse({**PRESETS[name].model_dump(), **overrides})


def read_objective(text: str) -> Objective:
    """A preset by name, or with options changed: `grpo`, `grpo,beta=0.04,temperature=0.7`; the text becomes its name.

    Values are JSON numbers, true, false or null, and words as they stand. Raises InputError in one line.
    """
    name, *changes = text.split(",")
    overrides: dict[str, Any] = {}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals or field in overrides:
            raise InputError(
                f"objective {text!r} is not allowed: give NAME or NAME,OPTION=VALUE,.., as in grpo,beta=0.04"
            )
        try:
            overrides[field] = json.loads(value)
        except json.JSONDecodeError:
            overrides[field] = value
    return preset(name, **overrides, **({"name": text} if overrides else {}))
