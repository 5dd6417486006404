"""A check inside a GRPO training of TRL: now and then, the trainer's own gradient against full autograd, on a few rows.

`ParityCallback(every=50).attach(trainer)` before `trainer.train()`. See `docs/trl.md`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from lsverify.errors import InputError
from lsverify.norms import Norms, distance, promoted, total
from lsverify.objective import Objective
from lsverify.paths import full_autograd
from lsverify.pretrained import dropouts
from lsverify.problems import Group, Problem, Response
from lsverify.references import Gradients, take_gradients
from lsverify.scoring import full_score
from lsverify.trl_options import objective_of

try:
    from trl import GRPOTrainer
except ImportError:
    raise InputError("TRL is not installed: pip install 'lsverify[trl]'") from None

log = logging.getLogger(__name__)
PER_TOKEN = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
PER_ROW = ("prompt_ids", "prompt_mask", "advantages")
KNOWN = {*PER_TOKEN, *PER_ROW, "num_items_in_batch"}


class ParityCallback(TrainerCallback):
    """Logs how far the trainer's gradient of a slice of its batch is from full autograd's: serial, unpadded, uncached.

    every       optimizer steps between two checks; the first step is checked.
    rows        responses in the slice, drawn from the step's last micro-batch by `seed` and step; those with an
                advantage other than 0 come first.
    max_tokens  completion tokens kept of each, from its start; None: all. Prompts stay whole.
    limit       a relative L2 above which, or undefined, a warning is logged; None: never.
    stop        whether a breach of the limit also ends the training.
    seed        of the rows' choice; the training's random state is left alone.

    The trainer's log gets `lsverify/rel_l2` (infinite where it is undefined), `lsverify/cosine` and
    `lsverify/norm_ratio`, over all trainable parameters together. Gradients that the step has accumulated, metrics and
    random state are the same after a check as before, to the bit. A check costs a forward and a backward pass over the slice
    on either side, and room for two more gradients. A load-balancing loss of experts is left out on both sides.

    Raises InputError for options out of range.
    """

    def __init__(
        self,
        every: int = 50,
        rows: int = 2,
        limit: float | None = None,
        seed: int = 0,
        *,
        max_tokens: int | None = None,
        stop: bool = False,
    ) -> None:
        for name, value in {"every": every, "rows": rows, "max_tokens": max_tokens}.items():
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give 1 or more")
        if limit is not None and not limit > 0:
            raise InputError(f"limit is {limit}; give a relative L2 above 0, or None for no limit")
        if stop and limit is None:
            raise InputError("stop=True has nothing to stop at: give a limit")
        self.every, self.rows, self.limit, self.seed = every, rows, limit, seed
        self.max_tokens, self.stop = max_tokens, stop
        self.trainer: Any = None

    def attach(self, trainer: Any) -> ParityCallback:
        """Add this callback to a `GRPOTrainer`, which must be built: callbacks are not told their trainer otherwise.

        Raises InputError for another trainer and for one whose gradient cannot be replayed: an objective that has no
        counterpart here, active dropout, more than one process, and `max_tokens` with a sampler's correction of whole
        responses.
        """
        if not isinstance(trainer, GRPOTrainer):
            raise InputError(
                f"ParityCallback attaches to a GRPOTrainer, not to a {type(trainer).__name__}"
            )
        objective = objective_of(trainer.args)
        if rates := dropouts(trainer.model.config, trainer.model):
            name, rate = next(iter(rates.items()))
            raise InputError(f"{name}={rate:g} makes every pass another one: train without dropout")
        if trainer.accelerator.num_processes > 1:
            raise InputError(
                f"there are {trainer.accelerator.num_processes} processes; ParityCallback works in one"
            )
        if self.max_tokens and objective.sampler_correction.startswith("sequence"):
            raise InputError(
                f"sampler_correction {objective.sampler_correction} is of whole responses: leave max_tokens out"
            )
        # The trainer's advantages are taken as they are, whatever they were made of.
        self.objective = objective.model_copy(update={"advantage": "none"})
        self.trainer = trainer
        trainer.add_callback(self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.trainer is None:
            raise InputError("call ParityCallback(..).attach(trainer) instead of callbacks=[..]")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Weights are still those of the step's gradient here, and its batch is still buffered."""
        if state.global_step % self.every:
            return
        try:
            norms = self._check(state.global_step)
        except InputError as refused:  # of this step's data, which are no reason to end a training
            log.warning(f"step {state.global_step}: not checked: {refused}")
            return
        error = torch.inf if norms.rel_l2 is None else norms.rel_l2
        numbers = {"rel_l2": error, "cosine": norms.cosine, "norm_ratio": norms.norm_ratio}
        for name, value in numbers.items():
            metric = torch.nan if value is None else value
            self.trainer._metrics["train"][f"lsverify/{name}"].append(metric)
        if self.limit is not None and not error <= self.limit:
            log.warning(
                f"step {state.global_step}: the trainer's gradient is {error:.3g} in relative L2 from full autograd's, "
                f"above the limit {self.limit:g}"
            )
            control.should_training_stop |= self.stop

    def _check(self, step: int) -> Norms:
        trainer = self.trainer
        steps = trainer.args.steps_per_generation
        batch = trainer._buffered_inputs[(trainer._step - 1) % steps]
        inputs = sliced(batch, self._drawn(batch, step), self.max_tokens)
        # TRL divides by the tokens of all the micro-batches that it generated together: here that is the slice alone.
        inputs["num_items_in_batch"] = _counted(inputs).sum() * steps
        with _set_aside(trainer):
            theirs = _theirs(trainer, inputs)
            ours = _ours(trainer.model, inputs, self.objective)
        return _distance(theirs, ours, trainer.current_gradient_accumulation_steps)

    def _drawn(self, batch: Mapping[str, Any], step: int) -> list[int]:
        """Row numbers, ascending."""
        if unknown := [key for key, each in batch.items() if key not in KNOWN and each is not None]:
            raise InputError(f"the batch has {unknown[0]!r}, which ParityCallback cannot replay")
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + step)
        order = torch.randperm(len(batch["advantages"]), generator=generator).tolist()
        first = _counted(batch)[:, : self.max_tokens].any(1).tolist()
        moved = (batch["advantages"] != 0).tolist()
        order = [row for row in order if first[row]]
        if not order:
            raise InputError("no row of the batch has a token that counts")
        return sorted(sorted(order, key=lambda row: not moved[row])[: self.rows])


def sliced(batch: Mapping[str, Any], rows: Sequence[int], max_tokens: int | None) -> dict[str, Any]:
    """Some rows of a batch of TRL, completions cut to their first tokens."""
    chosen = {
        key: batch[key][list(rows)] for key in (*PER_ROW, *PER_TOKEN) if batch.get(key) is not None
    }
    return {key: each[:, :max_tokens] if key in PER_TOKEN else each for key, each in chosen.items()}


def problem_of(inputs: Mapping[str, Any]) -> Problem:
    """A batch of TRL as a problem: each row a group of its own, its advantage as its reward, old log-probs 0 where none.

    inputs has prompt_ids and prompt_mask [N, P], completion_ids and completion_mask [N, C], advantages [N], and perhaps
    tool_mask, old_per_token_logps, ref_per_token_logps and sampling_per_token_logps [N, C].
    """
    there = {key: each.detach().cpu() for key, each in inputs.items() if each is not None}
    counted = _counted(there)
    groups = []
    for row, mask in enumerate(there["completion_mask"].bool()):
        length = int(mask.sum())

        def logps(name: str, row: int = row, length: int = length) -> Tensor | None:
            return there[name][row, :length].double() if name in there else None

        old = logps("old_per_token_logps")
        response = Response(
            tokens=there["completion_ids"][row, :length].clone(),
            mask=counted[row, :length].clone(),
            reward=float(there["advantages"][row]),
            old_logp=torch.zeros(length, dtype=torch.float64) if old is None else old,
            ref_logp=logps("ref_per_token_logps"),
            sampler_logp=logps("sampling_per_token_logps"),
        )
        prompt = there["prompt_ids"][row][there["prompt_mask"][row].bool()]
        groups.append(Group(prompt=prompt, responses=(response,)))
    return Problem(groups=tuple(groups))


def _counted(inputs: Mapping[str, Any]) -> Tensor:
    """[N, C] bool, what the loss counts."""
    mask: Tensor = inputs["completion_mask"].bool()
    return mask & inputs["tool_mask"].bool() if inputs.get("tool_mask") is not None else mask


def _theirs(trainer: Any, inputs: dict[str, Any]) -> Gradients:
    with trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model_wrapped, inputs)
    loss.backward()
    return take_gradients(trainer.model)


def _ours(model: nn.Module, inputs: Mapping[str, Any], objective: Objective) -> Gradients:
    problem = problem_of(inputs)
    if inputs.get("old_per_token_logps") is None:
        # On-policy TRL takes the current policy as the old one.
        scores = full_score(model, problem, temperature=objective.temperature)
        problem = problem.replace_logps(old=[each.cpu().double() for each in scores])
    full_autograd(model, problem, objective)
    return take_gradients(model)


def _distance(theirs: Gradients, ours: Gradients, accumulated: int) -> Norms:
    """Over all parameters; TRL's loss is divided by the micro-batches of a step, so its gradient is multiplied by them."""
    norms = []
    for name, expected in ours.items():
        pair = [theirs[name], expected]
        like = next((each for each in pair if each is not None), None)
        if like is not None:
            actual, wanted = (
                promoted(torch.zeros_like(like) if each is None else each) for each in pair
            )
            norms.append(distance(actual * accumulated, wanted))
    return total(norms)


@contextmanager
def _set_aside(trainer: Any) -> Iterator[None]:
    """Inside there are no gradients, metrics nobody will read, and a random state of its own."""
    gradients = [(parameter, parameter.grad) for parameter in trainer.model.parameters()]
    metrics, balanced = trainer._metrics, trainer.aux_loss_enabled
    trainer._metrics = {mode: defaultdict(list) for mode in metrics}
    trainer.aux_loss_enabled = False
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        trainer._metrics, trainer.aux_loss_enabled = metrics, balanced
        for parameter, gradient in gradients:
            parameter.grad = gradient
