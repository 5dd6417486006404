"""One training of one arm, paired with those of other arms: the same start, prompts and random numbers for a seed.

Rollouts are sampled online from the policy as it is, scored by the arm and by the start, and serve one optimizer step or
several. A training lives in its folder and goes on where it was stopped, whenever that was: its curve is the same to
the bit. Whoever wants the rows as they come (a progress bar, W&B) passes a callback.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn
from transformers import PreTrainedModel

from lsverify import adapters
from lsverify.advantages import kl_estimate
from lsverify.arms import make_arm
from lsverify.checkpoints import Checkpoint, read_checkpoint
from lsverify.curves import (
    Curve,
    CurveFile,
    LongRangeRow,
    Row,
    StepRow,
    TestRow,
    ToFull,
    read_curve,
)
from lsverify.errors import InputError, TrainingBroke
from lsverify.long_range import cells
from lsverify.memory import HighWaterMark
from lsverify.models import build
from lsverify.norms import Norms, distance, norm, promoted, total
from lsverify.objective import prepare
from lsverify.optimizers import TorchStep
from lsverify.paths import StepResult, full_autograd
from lsverify.precision import computing, deterministic, threads
from lsverify.problems import Problem
from lsverify.references import Gradients, take_gradients
from lsverify.rollouts_online import examined, rolled_out, scored
from lsverify.scoring import adapters_off
from lsverify.trainings import Training
from lsverify.whole_files import write_whole

CONFIG = "training.json"


def train(
    training: Training, folder: Path, *, report: Callable[[Row], None] = lambda row: None
) -> Curve:
    """Train, or go on with what is in `folder`, to the end; `report` gets each row that is made, in order.

    The folder holds training.json, curve.jsonl and checkpoint.safetensors. Raises `InputError` for a folder of another
    training and for files that are not a training's, `TrainingBroke` when the gradient is not finite.
    """
    claim(folder, training)
    checkpoint, curve = read_checkpoint(folder), read_curve(folder)
    at = checkpoint.step if checkpoint else 0
    if checkpoint and at == training.steps:
        return curve
    standing = curve.up_to(at) if checkpoint else Curve(())
    with _running(training) as run, CurveFile(folder, standing) as file:
        if checkpoint:
            checkpoint.put_back(run.model, run.optimizer)
        for rows in run.steps(at):
            for row in rows:
                file.add(row)
                report(row)
            if training.at_rest(step := rows[0].step):
                file.settle()
                Checkpoint.of(run.model, run.optimizer, step).write(folder)
        return file.curve


def claim(folder: Path, training: Training) -> None:
    """Write what the folder is for, or hold the training to it."""
    file = folder / CONFIG
    if not file.exists():
        write_whole(file, training.model_dump_json(indent=1) + "\n")
    elif _claimed(file) != training:
        raise InputError(
            f"{folder} holds another training than this one: see {CONFIG} in it, and use another folder or remove it"
        )


def _claimed(file: Path) -> Training | None:
    """What a folder is for; options that it does not name have their defaults. None where it is no training of now."""
    try:
        return Training.model_validate_json(file.read_text("utf-8"))
    except (ValidationError, InputError):
        return None


def beginning(training: Training) -> PreTrainedModel:
    """The policy that a training starts from."""
    model = build(training.arch, seed=0, dtype=training.dtype)
    return (
        model if training.lora_rank is None else adapters.begin(model, training.lora_rank, seed=0)
    )


@contextmanager
def trained_policy(training: Training, folder: Path | None) -> Iterator[nn.Module]:
    """The policy as its training's folder has it, or as it begins without one; computing as the training does.

    Raises `InputError` for a folder of another training, or without a checkpoint.
    """
    model = beginning(training)
    if folder is not None:
        claim(folder, training)
        checkpoint = read_checkpoint(folder)
        if checkpoint is None:
            raise InputError(f"{folder} has no checkpoint: train there first")
        checkpoint.put_back(model, TorchStep(model, training.update))
    with _as_trained(training, model):
        yield model


@contextmanager
def _as_trained(training: Training, *models: nn.Module) -> Iterator[None]:
    """On one thread, in the training's precision, by deterministic algorithms."""
    with ExitStack() as stack:
        stack.enter_context(threads(1))
        stack.enter_context(deterministic())
        for model in models:
            stack.enter_context(computing(model, training.dtype))
        yield


@contextmanager
def _running(training: Training) -> Iterator[_Run]:
    """Under adapters the start is the policy itself with these off: a large model is there once."""
    model = beginning(training)
    start = model if training.lora_rank is not None else beginning(training)
    with _as_trained(training, *{id(each): each for each in (start, model)}.values()):
        yield _Run(training, start, model)


class _Run:
    """A training at work: `steps` trains."""

    def __init__(self, training: Training, start: nn.Module, model: nn.Module) -> None:
        self.training, self.objective = training, training.loss
        self.start, self.model = start, model
        self.course = training.course()
        self.arm = make_arm(
            training.arm, seed=training.numbers, chunk=training.chunk, serial=training.serial
        )
        self.optimizer = TorchStep(model, training.update)
        self.memory = HighWaterMark()

    def steps(self, at: int) -> Iterator[list[Row]]:
        """The rows of each step after step `at`, the last of its prompts; before the first one those of step 0."""
        if at == 0:
            yield self._tests(0)
        for step in range(at + 1, self.training.steps + 1):
            begun = time.perf_counter()
            with _counting(self.model) as tokens:
                rollout, beside = divmod(step - 1, self.training.steps_per_rollout)
                if (step - 1) % self.training.steps_per_prompts == 0:
                    self.arm.begin()
                if beside == 0:
                    problem, rolled = self._rollout(rollout, tokens)
                problem = replace(problem, seed=self.training.numbers << 32 | step)
                result = self.arm.step(self.model, problem, self.objective)
            made = self._made(step, problem, result)
            self.optimizer.step()
            row = StepRow(
                step=step,
                **rolled,
                **made,
                drift=self.arm.drift(self.model, problem, self.objective),
                tokens_forwarded=tokens.count,
                seconds=time.perf_counter() - begun,
                peak_resident=self.memory.read().peak,
            )
            yield [row, *self._tests(step)] if self.training.tests_at(step) else [row]

    def _rollout(self, rollout: int, tokens: _Tokens) -> tuple[Problem, dict[str, Any]]:
        """Sampled from the policy and scored by the arm and by the start, and what a row says about it."""
        training, temperature = self.training, self.objective.temperature
        with tokens.aside():
            problem, entropy = rolled_out(
                self.model,
                self.course.tasks(
                    training.numbers, rollout // training.rollouts_per_prompts, training.prompts
                ),
                seed=training.numbers,
                rollout=rollout,
                members=training.responses,
                temperature=temperature,
                ends=self.course.ends,
            )
            with self._at_start():
                ref = scored(self.start, problem, temperature)
        old = [logp.double() for logp in self.arm.score(self.model, problem, self.objective)]
        rewards = torch.tensor([each.reward for each in problem.responses], dtype=torch.float64)
        kl = kl_estimate("k3", torch.cat(_sampled(problem)), torch.cat(ref))
        return problem.replace_logps(old=old, ref=ref), {
            "reward": float(rewards.mean()),
            "reward_sd": float(rewards.std(correction=0)),
            "kl_to_start": float(kl.mean()),
            "entropy": entropy,
            "response_length": sum(problem.response_lengths) / len(problem),
        }

    def _at_start(self) -> AbstractContextManager[None]:
        return nullcontext() if self.start is not self.model else adapters_off(self.model)

    def _made(self, step: int, problem: Problem, result: StepResult) -> dict[str, Any]:
        """What a row says about the step's gradient, which is left where it is."""
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}
        length = math.hypot(*(norm(promoted(g)) for g in gradients.values() if g is not None))
        if not math.isfinite(length):
            raise TrainingBroke(
                f"step {step}: the gradient's norm is {length}; use an lr below {self.training.lr}"
            )
        plan = prepare(self.objective, problem)
        sides = [plan.clip_side(i, logp) for i, logp in enumerate(result.log_probs or ())]
        every = self.training.compare_every
        due = every and (step - 1) % every == 0
        return {
            "loss": result.loss,
            "gradient_norm": length,
            "clip_share": float((torch.cat(sides) != 0).double().mean()),
            "to_full": self._to_full(problem) if due else None,
        }

    def _to_full(self, problem: Problem) -> ToFull:
        """The arm's own scores, which may be of something else than the problem, are no part of what it is held to."""
        ours = take_gradients(self.model)
        own = problem.replace_logps(old=_sampled(problem))
        full_autograd(self.model, own, self.objective, batched=not self.training.serial)
        found = apart(ours, take_gradients(self.model))
        for name, parameter in self.model.named_parameters():
            parameter.grad = ours.get(name)
        return ToFull(cosine=found.cosine, rel_l2=found.rel_l2, norm_ratio=found.norm_ratio)

    def _tests(self, step: int) -> list[Row]:
        """The numbers are those of the seed itself in every arm: the yardstick trains with others and is examined with these."""
        training = self.training
        numbers: dict[str, Any] = {
            "seed": training.seed,
            "members": training.test_responses,
            "temperature": self.objective.temperature,
        }
        rows: list[Row] = []
        if training.long_range and step in (0, training.steps):
            found = cells(
                self.model,
                self.course,
                training.long_range,
                number=training.long_range_prompts,
                **numbers,
            )
            rows.append(LongRangeRow(step=step, cells=tuple(found)))
        some = self.course.test[: training.test_prompts]
        rewards = examined(self.model, some, ends=self.course.ends, **numbers)
        return [*rows, TestRow(step=step, rewards=tuple(rewards))]


def _sampled(problem: Problem) -> list[torch.Tensor]:
    """The sampler's log-probs, N tensors [R_i]: those of the policy that the rollout is of."""
    found = [each.sampler_logp for each in problem.responses]
    return [logp for logp in found if logp is not None]


def apart(ours: Gradients, full: Gradients) -> Norms:
    """Over all parameters; one without gradient counts as zero."""
    pairs = []
    for name, other in full.items():
        own = ours[name]
        if own is None and other is None:
            continue
        like = own if other is None else other
        assert like is not None
        zero = torch.zeros_like(like)
        pairs.append(distance(*(promoted(zero if g is None else g) for g in (own, other))))
    return total(pairs)


class _Tokens:
    """Tokens that pass a model's embedding, but for what happens aside."""

    def __init__(self) -> None:
        self.count, self._aside = 0, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._aside = True
        yield
        self._aside = False

    def __call__(self, module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        if not self._aside:
            self.count += output.numel() // output.shape[-1]


@contextmanager
def _counting(model: Any) -> Iterator[_Tokens]:
    tokens = _Tokens()
    handle = model.get_input_embeddings().register_forward_hook(tokens)
    try:
        yield tokens
    finally:
        handle.remove()
