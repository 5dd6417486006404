"""What a training is: everything that its curve follows from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lsverify.arms import YARDSTICK, policy_of
from lsverify.courses import Course, course_of, require_course
from lsverify.errors import InputError
from lsverify.keyed import MOST_SEED
from lsverify.objective import Objective
from lsverify.objective_options import read_objective
from lsverify.own_tasks import OWN, content_of
from lsverify.paths import Update
from lsverify.scoring import CHUNK
from lsverify.text_tasks import TEXT, corpus_hash


class Training(BaseModel):
    """What a training is; equal ones have equal curves. Frozen. `parse` raises `InputError` in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    arch: str = "warm:llama"
    task: str = "recall"
    """A kind of `lsverify.tasks`, `text:KIND` of `lsverify.text_tasks`, or `file:PATH` of `lsverify.own_tasks`."""
    arm: str = "full"
    """`full`, `other_seeds`, `scrambled`, or a policy."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED // 2)
    """Of prompts and of the random numbers of responses and tests. It does not change the start's weights of a warm start."""
    steps: int = Field(default=300, ge=1)
    """Optimizer steps."""
    prompts: int = Field(default=8, ge=1)
    """Per rollout."""
    responses: int = Field(default=16, ge=2)
    """Per prompt."""
    steps_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps that one rollout serves, all but the first of them off-policy."""
    rollouts_per_prompts: int = Field(default=1, ge=1)
    """Rollouts that the same prompts serve. `stale:N` keeps their captures for N of all the steps that they serve."""
    reward: str | None = None
    """MODULE:NAME of the function that rewards the responses to a file's prompts. Imported when the training is made."""
    most: int | None = Field(default=None, ge=1)
    """Tokens of a response to a file's prompt at most; None: those of the answer, or 32."""
    content: str | None = None
    """Digests of what the task reads besides this project's code, found where left out; others than these are refused."""
    lengths: tuple[int, ...] = ()
    """Prompt tokens of drawn tasks, in turn; empty: the task's own. The frozen test set keeps its lengths."""
    objective: str = "grpo"
    lr: float = Field(default=7e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    dtype: Literal["float64", "float32"] = "float64"
    """float64: oracle precision, where paths that differ by rounding alone draw the same tokens to the end. In float32 they part."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Of adapters that are trained over the frozen start, and begin without effect; None: every parameter is trained."""
    serial: bool = False
    """Full autograd takes one response at a time: slower on tiny models, with one graph alive instead of all."""
    chunk: int = Field(default=CHUNK, ge=1)
    """Tokens of a captured chunk."""
    test_every: int = Field(default=50, ge=1)
    """Optimizer steps between tests; there is one before the first step and one after the last."""
    test_responses: int = Field(default=4, ge=1)
    """Per prompt of the test set."""
    test_prompts: int | None = Field(default=None, ge=1)
    """Of the test set, from its front; None: all."""
    long_range: tuple[int, ...] = ()
    """Prompt lengths of the test by distance (`lsverify.long_range`), taken with the first and the last test; empty: none."""
    long_range_prompts: int = Field(default=16, ge=1)
    """Of that test, for each length and distance."""
    compare_every: int = Field(default=25, ge=0)
    """Steps between comparisons of the gradient with full autograd's, from the first step on; 0: none."""
    checkpoint_every: int = Field(default=25, ge=1)
    """Times that the prompts change between checkpoints."""

    @model_validator(mode="before")
    @classmethod
    def _found(cls, values: Any) -> Any:
        """With the content that the task has now."""
        if not isinstance(values, Mapping) or not isinstance(task := values.get("task", ""), str):
            return values
        given, found = values.get("content"), None
        if task.startswith(OWN):
            reward = values.get("reward")
            if isinstance(reward, str | None):
                found = content_of(Path(task.removeprefix(OWN)), reward)
        elif task.startswith(TEXT):
            found = corpus_hash()
        if given not in (None, found):
            raise ValueError(
                f"task {task!r} has changed: its content was {given}, and is {found}: train anew in another folder"
            )
        return {**values, "content": found}

    @model_validator(mode="after")
    def _fits(self) -> Training:
        policy = policy_of(self.arm)
        if policy is not None and (policy.refresh or 1) > self.steps_per_prompts:
            raise ValueError(
                f"arm {self.arm!r} outlives its prompts, which serve {self.steps_per_prompts} steps: raise "
                "rollouts_per_prompts or steps_per_rollout"
            )
        read_objective(self.objective)
        require_course(
            self.arch, self.task, lengths=self.lengths, reward=self.reward, most=self.most
        )
        return self

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Training:
        """From plain values; InputError with one line for what cannot be used."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise InputError(f"training: {_one_line(error)}") from None

    @property
    def loss(self) -> Objective:
        return read_objective(self.objective)

    def course(self) -> Course:
        """What is learned; reads the file or the tokenizer that the task needs."""
        return course_of(
            self.arch, self.task, lengths=self.lengths, reward=self.reward, most=self.most
        )

    @property
    def steps_per_prompts(self) -> int:
        return self.steps_per_rollout * self.rollouts_per_prompts

    def tests_at(self, step: int) -> bool:
        return step % self.test_every == 0 or step == self.steps

    def at_rest(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        rest = self.steps_per_prompts * self.checkpoint_every
        return step > 0 and (step % rest == 0 or step == self.steps)

    @property
    def numbers(self) -> int:
        """The seed of prompts and responses."""
        return self.seed + (MOST_SEED // 2 + 1) * (self.arm == YARDSTICK)

    @property
    def update(self) -> Update:
        return Update(
            kind="adamw",
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
        )


def _one_line(error: ValidationError) -> str:
    lines = []
    for each in error.errors():
        field = ".".join(map(str, each["loc"]))
        message = each["msg"].removeprefix("Value error, ")
        if each["type"] == "extra_forbidden":
            lines.append(f"no option {field!r}; there are {', '.join(Training.model_fields)}")
        else:
            lines.append(f"{field} is {each['input']!r}: {message}" if field else message)
    return "; ".join(lines)
