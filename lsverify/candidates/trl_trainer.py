"""The training step of TRL's `GRPOTrainer` as a candidate: `lsverify gate --candidate lsverify.candidates.trl_trainer:step`.

A real trainer is built around the model and takes one real `training_step`. TRL's own code does all of this: padding,
masks, truncation, advantages, the sampler's correction, the forward pass with its fused head, loss, accumulation, backward.
Ours is the data that a problem holds: the rollouts (through `rollout_func`), rewards (a reward function), and the old and
reference log-probs, with which TRL's scoring passes without a graph are answered.

Three things have no counterpart in TRL and are arranged so that its code runs as it is:

- Its groups are of one size. A smaller group is filled up with responses that no reward function scores, which TRL leaves
  out of means and deviations; their rows are dropped before the loss, and their mask keeps them out of its denominators.
- It takes a response as complete where the last token is an end token. It is shown stand-ins while it scores, and gets
  the problem's tokens before anything is forwarded.
- It loads a reference model for beta > 0, and starts an engine for a sampler's correction. Both are switched on after it
  is built, since what they would compute is given.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lsverify.errors import InputError
from lsverify.objective import Objective
from lsverify.paths import StepResult
from lsverify.precision import promoting
from lsverify.problems import Problem
from lsverify.put_back import PutBack
from lsverify.trl_options import trl_options

try:
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import split_tensor_dict
except ImportError:
    raise InputError("TRL is not installed: pip install 'lsverify[trl]'") from None

PAD, END, WORD = 0, 1, 2
"""The tokenizer's ids. Padding is all that the model ever sees of them."""
REFERENCE = "reference"
"""What stands for a reference model; the problem's log-probs answer for it."""


def step(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """The gradient of one optimizer step of TRL, left in `.grad`; all micro-batches of it, where the objective has some.

    Raises InputError for an objective that TRL cannot say, prompts with spans, a problem without the log-probs that the
    objective needs, and micro-batches that do not divide the responses.
    """
    options, micro_batches = _options(objective), _micro_batches(problem, objective)
    _require_data(problem, objective)
    with _left_alone(model), tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(model, problem, options, folder)
        batch = trainer.scored()
        trainer.second_pass(split_tensor_dict(batch, micro_batches))
        losses = [trainer.training_step(model, [], None) for _ in range(micro_batches)]
        log_probs = torch.cat(trainer.log_probs)
    return StepResult(
        loss=float(torch.stack(losses).sum()),
        log_probs=tuple(
            row[: len(each)] for row, each in zip(log_probs, problem.responses, strict=True)
        ),
        reference="full",
    )


def promoted(model: nn.Module, problem: Problem, objective: Objective) -> StepResult:
    """`step` with every request for float32 in TRL's own code read as float64: what is left when its rounding is not.

    Not what TRL computes. It tells the precision of TRL's step from its mathematics, on a model in float64.
    """
    before, backward = torch.get_default_dtype(), ChunkedLogProbFunction.backward

    def promoted_backward(*arguments: Any) -> Any:
        # Autograd calls it outside of the mode that is open around `Tensor.backward`.
        with promoting():
            return backward(*arguments)

    torch.set_default_dtype(torch.float64)
    ChunkedLogProbFunction.backward = staticmethod(promoted_backward)
    try:
        with promoting():
            return step(model, problem, objective)
    finally:
        torch.set_default_dtype(before)
        ChunkedLogProbFunction.backward = staticmethod(backward)


class GivenRollouts(GRPOTrainer):
    """A `GRPOTrainer` that is told what its sampler, its rewards and its scoring passes said. Adds nothing to its loss.

    log_probs  of each micro-batch [b, C] as TRL's forward pass returned them, detached.
    """

    def __init__(self, problem: Problem, **arguments: Any) -> None:
        self.problem = problem
        self.log_probs: list[Tensor] = []
        size = arguments["args"].num_generations
        self.members = [i for group in _filled(problem, size) for i in group]
        self.rows = [None if i is None else problem.responses[i] for i in self.members]
        super().__init__(
            reward_funcs=[self._rewards],
            rollout_func=self._rollouts,
            train_dataset=Dataset.from_dict({"prompt": ["?"]}),
            processing_class=_tokenizer(),
            **arguments,
        )

    def scored(self) -> dict[str, Any]:
        """The batch that TRL makes of the rollouts, one row per response in the problem's order, its tokens put in."""
        self.model.train()
        batch = self._generate_and_score_completions([{"prompt": "?"} for _ in self.members])
        kept = [row for row, member in enumerate(self.members) if member is not None]
        batch = {key: each[kept] if each.ndim else each for key, each in batch.items()}
        tokens = _padded([each.tokens for each in self.problem.responses], PAD)
        return {**batch, "completion_ids": tokens.to(batch["completion_ids"].device)}

    def second_pass(self, batches: list[dict[str, Any]]) -> None:
        """Go on as after a first pass over these micro-batches, which are then used again with their old log-probs."""
        self._buffered_inputs, self._step = batches, len(batches)
        self.args.steps_per_generation = self.current_gradient_accumulation_steps = len(batches)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._given("ref_logp" if model is REFERENCE else "old_logp"), None, None
        found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.log_probs.append(found[0].detach())
        return found

    def _given(self, name: str) -> Tensor:
        """[rows, C] log-probs of the problem, in the precision of the weights, at least float32; 0 where none counts."""
        rows = [
            torch.zeros(1, dtype=torch.float64)
            if each is None
            else torch.where(each.mask, getattr(each, name), 0.0)
            for each in self.rows
        ]
        weights = next(self.model.parameters())
        dtype = torch.promote_types(weights.dtype, torch.float32)
        return _padded(rows, 0.0).to(weights.device, dtype)

    def _rewards(self, **_: Any) -> list[float | None]:
        return [None if each is None else each.reward for each in self.rows]

    def _rollouts(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        """Prompts as they are; of responses their length, whether they ended, and what counts of them."""
        sampler = self.problem.responses[0].sampler_logp is not None
        return {
            "prompt_ids": [
                [PAD] if i is None else self.problem.prompt(i).tolist() for i in self.members
            ],
            "completion_ids": [
                [WORD] * (len(each) - 1) + [WORD if each.truncated else END] if each else [END]
                for each in self.rows
            ],
            "env_mask": [each.mask.int().tolist() if each else [0] for each in self.rows],
            "logprobs": self._given("sampler_logp").tolist() if sampler and self.use_vllm else None,
        }


def _trainer(
    model: nn.Module, problem: Problem, options: dict[str, Any], folder: str
) -> GivenRollouts:
    size = max(*problem.group_sizes, 2)
    beta, sampler = options.pop("beta"), options.pop("use_vllm", False)
    try:
        config = GRPOConfig(
            output_dir=folder,
            report_to="none",
            disable_tqdm=True,
            use_cpu=next(model.parameters()).device.type == "cpu",
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=size * len(problem.groups),
            num_generations=size,
            num_iterations=2,
            **options,
        )
        trainer = GivenRollouts(problem, model=model, args=config)
    except (TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"TRL refuses this step: {said}") from None
    trainer.beta, trainer.ref_model = beta, REFERENCE if beta else None
    trainer.use_vllm, trainer._last_loaded_step = sampler, trainer.state.global_step
    return trainer


def _options(objective: Objective) -> dict[str, Any]:
    if objective.aux_coef:
        raise InputError(
            "TRL's load-balancing loss counts the last token of each response, which no path here forwards: "
            "use aux_coef=0"
        )
    return {
        **trl_options(objective),
        "temperature": objective.temperature,
        # None would take the model's own coefficient.
        "router_aux_loss_coef": 0.0,
    }


def _micro_batches(problem: Problem, objective: Objective) -> int:
    size = objective.micro_batch or len(problem)
    if len(problem) % size:
        raise InputError(f"micro_batch={size} does not divide the {len(problem)} responses")
    return len(problem) // size


def _require_data(problem: Problem, objective: Objective) -> None:
    if any(group.spans for group in problem.groups):
        raise InputError("TRL has no prompts with spans: use spans=none")
    first = problem.responses[0]
    if objective.beta and first.ref_logp is None:
        raise InputError(
            "the objective has beta above 0 and the problem no ref_logp: score it, or use beta=0"
        )
    if objective.sampler_correction != "none" and first.sampler_logp is None:
        raise InputError(
            "the objective has a sampler_correction and the problem no sampler_logp: give it"
        )


def _padded(rows: Sequence[Tensor], value: float) -> Tensor:
    """[N, C], each row padded on its right."""
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


def _filled(problem: Problem, size: int) -> Iterator[list[int | None]]:
    """Per group its members, and None up to TRL's size of a group."""
    for group in range(len(problem.groups)):
        own = [i for i, other in enumerate(problem.group_of) if other == group]
        yield [*own, *[None] * (size - len(own))]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": PAD, "<end>": END, "?": WORD}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="?")),
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="?",
    )


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Undo what a trainer does to its model and its process, and be quiet about responses without a score."""
    before = PutBack(model)
    holders = [m for m in model.modules() if getattr(m, "generation_config", None) is not None]
    generation = [(m.generation_config, dict(vars(m.generation_config))) for m in holders]
    log = logging.getLogger(GRPOTrainer.__module__)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
            yield
    finally:
        log.setLevel(level)
        for config, values in generation:
            vars(config).clear()
            vars(config).update(values)
        before.put_back()
