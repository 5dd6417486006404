"""TRL's own loss code as an outside oracle: the same log-probs, masks and rewards through its trainers' methods.

A bare `GRPOTrainer` or `RLOOTrainer` gets the attributes that its loss reads, a sampler that returns the problem's
responses, a reward that returns the problem's, and models that answer with given log-probs. Everything between (advantages,
truncation, the sampler's correction, ratio, clip, KL, masks, denominators, accumulation) is the installed package's code.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lsverify.errors import InputError
from lsverify.objective import Objective, prepare
from lsverify.problem_types import Problem
from lsverify.trl_options import rloo_options, trl_options

PAD, END, WORD = 0, 1, 2
"""Token ids that the bare trainer sees: it reads of them only whether a response ended."""


class Loss(NamedTuple):
    """A loss and its gradients with respect to log-probs and entropies: N tensors [R_i] each.

    size is the sum of the responses' absolute parts where they are known: what rounding in the value is relative to.
    """

    value: float
    gradient: list[Tensor]
    entropy_gradient: list[Tensor]
    size: float = 0.0


def trl_loss(
    problem: Problem,
    logps: Sequence[Tensor],
    options: Mapping[str, Any],
    *,
    entropies: Sequence[Tensor] | None = None,
    micro_batch: int | None = None,
    rloo: bool = False,
    default_dtype: torch.dtype = torch.float64,
) -> Loss:
    """What TRL makes of a problem and the current policy's log-probs, N tensors [R_i] float64, in float64.

    options      keywords of `GRPOConfig`, or of `RLOOConfig` with `rloo`.
    entropies    N tensors [R_i] of the current policy; None: zeros.
    micro_batch  responses in one forward pass; the others of the step are accumulated. None: all in one.
    default_dtype  what torch makes of plain floats meanwhile: some of TRL's constants and the sampler's log-probs take
                 it, whatever the model's precision.

    Raises InputError without TRL, for options that it refuses, for groups of different size, which its batches cannot
    hold, for micro-batches that do not divide the responses, and for holes with `rloo`, which has no mask for them.
    """
    if len(set(problem.group_sizes)) > 1:
        raise InputError(f"TRL's groups are of one size; these are {problem.group_sizes}")
    if rloo and not all(bool(each.mask.all()) for each in problem.responses):
        raise InputError("RLOOTrainer has no mask for holes; give responses without")
    if micro_batch is not None and len(problem) % micro_batch:
        raise InputError(f"micro_batch={micro_batch} does not divide the {len(problem)} responses")
    counts = [torch.zeros(len(each), dtype=torch.float64) for each in problem.responses]
    policy, entropy = (
        _pad([each.double() for each in rows]).requires_grad_()
        for rows in (logps, entropies or counts)
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(default_dtype)
    try:
        trainer = _trainer(problem, options, micro_batch or len(problem), rloo)
        batch = trainer._generate_and_score_completions([{"prompt": ""} for _ in logps])
        value = _accumulated(trainer, _Says(policy, entropy), batch)
    finally:
        torch.set_default_dtype(before)
    gradients = torch.autograd.grad(value, (policy, entropy), allow_unused=True)
    cut = [
        [row[: len(each)] for row, each in zip(rows, problem.responses, strict=True)]
        for rows in (torch.zeros_like(policy) if each is None else each for each in gradients)
    ]
    return Loss(value.detach().item(), cut[0], cut[1])


def our_loss(
    objective: Objective,
    problem: Problem,
    logps: Sequence[Tensor],
    entropies: Sequence[Tensor] | None = None,
) -> Loss:
    """The same of `Plan.part`, summed over responses."""
    plan = prepare(objective, problem)
    rows = [each.double().clone().requires_grad_() for each in logps]
    zeros = [torch.zeros_like(each) for each in rows]
    spread = [each.double().clone().requires_grad_() for each in entropies or zeros]
    bonus: list[Tensor] | list[None] = spread if objective.entropy_bonus else [None] * len(rows)
    parts = torch.stack(
        [plan.part(i, *pair) for i, pair in enumerate(zip(rows, bonus, strict=True))]
    )
    value = parts.sum()
    gradients = torch.autograd.grad(value, [*rows, *spread], allow_unused=True)
    filled = [
        torch.zeros_like(leaf) if each is None else each
        for each, leaf in zip(gradients, [*rows, *spread], strict=True)
    ]
    return Loss(
        value.detach().item(),
        filled[: len(rows)],
        filled[len(rows) :],
        float(parts.detach().abs().sum()),
    )


def apart(ours: Loss, theirs: Loss) -> float:
    """The larger relative distance, of values (to the size of ours) and of gradients in L2.

    0 where both are exactly 0, infinity where either is not finite.
    """
    mine, other = (torch.cat([*each.gradient, *each.entropy_gradient]) for each in (ours, theirs))
    pairs = (
        (abs(ours.value - theirs.value), ours.size or abs(theirs.value)),
        (float((mine - other).norm()), float(other.norm())),
    )
    relative = [gap / size if size else (0.0 if gap == 0 else math.inf) for gap, size in pairs]
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def disagreement(
    objective: Objective,
    problem: Problem,
    logps: Sequence[Tensor],
    entropies: Sequence[Tensor] | None = None,
) -> float:
    """`apart` of our loss and TRL's, for an objective that TRL can say."""
    rloo = objective.ratio == "trajectory"
    theirs = trl_loss(
        problem,
        logps,
        (rloo_options if rloo else trl_options)(objective),
        entropies=entropies,
        micro_batch=objective.micro_batch,
        rloo=rloo,
    )
    return apart(our_loss(objective, problem, logps, entropies), theirs)


def _accumulated(trainer: Any, model: _Says, batch: dict[str, Any]) -> Tensor:
    """The sum of TRL's losses over the micro-batches of one optimizer step."""
    from trl.trainer.utils import split_tensor_dict

    steps = trainer.current_gradient_accumulation_steps
    parts = split_tensor_dict(batch, steps)
    return torch.stack([trainer._compute_loss(model, part) for part in parts]).sum()


class _Says:
    """A model that answers with given log-probs and entropies [N, T]; a row's prompt is its number."""

    training = True
    is_gradient_checkpointing = False

    def __init__(self, logps: Tensor, entropies: Tensor | None = None) -> None:
        self.logps, self.entropies = logps, entropies

    def __call__(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        rows = input_ids[:, 0]
        entropy = None if self.entropies is None else self.entropies[rows]
        return SimpleNamespace(log_probs=self.logps[rows], entropy=entropy)


def _trainer(problem: Problem, options: Mapping[str, Any], micro_batch: int, rloo: bool) -> Any:
    """A trainer with what its scoring and its loss read, and nothing else."""
    config, kind = _config(problem, options, micro_batch, rloo)
    from accelerate import Accelerator  # there wherever TRL is

    trainer: Any = object.__new__(kind)
    # What the constructor copies from the config under the same name; the loss reads them there.
    for name, value in vars(config).items():
        if not hasattr(kind, name):
            setattr(trainer, name, value)
    responses = problem.responses
    trainer.args = config
    trainer.accelerator = Accelerator(cpu=True)
    trainer.state = SimpleNamespace(global_step=0)
    trainer.current_gradient_accumulation_steps = config.gradient_accumulation_steps
    trainer.epsilon_low = config.epsilon
    trainer.epsilon_high = config.epsilon if config.epsilon_high is None else config.epsilon_high
    trainer.aux_loss_enabled = False
    trainer._entropy_bonus_enabled = getattr(config, "entropy_coef", 0.0) != 0
    trainer.tools = trainer.environments = trainer.environment_factories = None
    trainer._tokenizer = SimpleNamespace(pad_token_id=PAD)
    trainer.eos_token_ids = [END]
    trainer.model = _Says(_pad([each.old_logp for each in responses]))
    references = [each.ref_logp for each in responses if each.ref_logp is not None]
    trainer.ref_model = _Says(_pad(references)) if references else None
    trainer.reward_funcs, trainer.reward_func_names = [None], ["given"]
    trainer.reward_weights = torch.ones(1, dtype=torch.float64)
    trainer._metrics = {"train": defaultdict(list)}
    trainer._logs = defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list))
    trainer._pending_extra_logs, trainer._pending_metrics = defaultdict(list), defaultdict(list)
    rewards = torch.tensor([[each.reward] for each in responses], dtype=torch.float64)
    trainer._calculate_rewards = lambda *_: rewards
    trainer._generate = lambda _: _sampled(problem, rloo, trainer)
    return trainer


def _config(
    problem: Problem, options: Mapping[str, Any], micro_batch: int, rloo: bool
) -> tuple[Any, type]:
    try:
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
    except ImportError:
        raise InputError("TRL is not installed: pip install 'lsverify[trl]'") from None
    common = {
        "output_dir": "unused",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "num_generations": problem.group_sizes[0],
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": len(problem) // micro_batch,
        # The data serve two passes, so that the second is off-policy and old log-probs are kept.
        "num_iterations": 2,
    }
    with warnings.catch_warnings():
        # TrainingArguments warns of defaults that TRL's configs set themselves.
        warnings.simplefilter("ignore", FutureWarning)
        kinds = (RLOOConfig, RLOOTrainer) if rloo else (GRPOConfig, GRPOTrainer)
        try:
            return kinds[0](**common, **options), kinds[1]
        except (TypeError, ValueError) as error:
            raise InputError(f"TRL refuses its options: {error}") from None


def _sampled(problem: Problem, rloo: bool, trainer: Any) -> tuple[Any, ...]:
    """What a trainer's `_generate` returns."""
    responses = problem.responses
    prompts = [[row] for row in range(len(responses))]
    completions = [
        [WORD] * (len(each) - 1) + [WORD if each.truncated else END] for each in responses
    ]
    if rloo:
        return prompts, completions, [""] * len(responses)
    holes = not all(bool(each.mask.all()) for each in responses)
    tool_mask = [each.mask.int().tolist() for each in responses] if holes else None
    given = [each.sampler_logp for each in responses if each.sampler_logp is not None]
    sampler = [
        torch.where(each.mask, own, 0.0).tolist()
        for own, each in zip(given, responses, strict=False)
    ]
    return prompts, completions, tool_mask, [""] * len(responses), sampler or None, {}, None, None


def _pad(rows: Sequence[Tensor]) -> Tensor:
    """[N, T] float64."""
    return pad_sequence(list(rows), batch_first=True, padding_value=-1.0).detach().double()
