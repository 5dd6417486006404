"""Rollouts of the policy as it is now: prompts by key, responses drawn by inverse distribution from keyed numbers.

Policies of equal weights draw equal tokens, since every number belongs to its (seed, step, prompt, response, token) and
all rows are computed together in one order. This makes data for training and for the test; it judges no path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lsverify.cache import map_state, new_cache
from lsverify.cases import is_warm
from lsverify.errors import InputError, TrainingBroke
from lsverify.keyed import keyed_uniform, keyed_words
from lsverify.objective import token_entropy, token_logp
from lsverify.problems import Group, Problem, Response
from lsverify.prompt import continue_from, unwrapped
from lsverify.tasks import KINDS, Task
from lsverify.tasks import draw as draw_tasks
from lsverify.warm_starts import SIZE, SPLIT_SEED, Recipe, recipe_of, split_of

MOST_SEED = 2**31 - 1
# Each purpose has keys of its own: the numbers of one say nothing about those of another.
PROMPTS, RESPONSES, TEST, ORDER = (purpose << 32 for purpose in range(4))


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a training learns: tasks of one kind, with the recipe's prompt lengths in turn, and the frozen test set."""

    task: str
    recipe: Recipe
    test: tuple[Task, ...]

    def tasks(self, seed: int, turn: int, number: int) -> list[Task]:
        """`number` tasks of one prompt length; those of a place are the same whatever else is drawn."""
        length = self.recipe.lengths[turn % len(self.recipe.lengths)]
        high, low, *_ = keyed_words(PROMPTS | seed, turn, np.arange(number), 0, 0)
        return [self._one(length, int(own)) for own in (high << np.uint64(31)) ^ low]

    def _one(self, length: int, seed: int) -> Task:
        if self.task == "recall":
            return self.recipe.task(length, seed)
        return KINDS[self.task](length, torch.Generator().manual_seed(seed))


def course_of(arch: str, task: str) -> Course:
    """Of a policy and a kind of task: recall as its warm start learned it, others at its prompt lengths. Raises `InputError`."""
    if task not in KINDS:
        raise InputError(f"task {task!r} is not known: use one of {', '.join(KINDS)}")
    recipe = recipe_of(arch) if is_warm(arch) else Recipe()
    if task != "recall":
        test = draw_tasks(task, recipe.lengths, SIZE, seed=SPLIT_SEED)
    else:
        test = split_of(arch) if is_warm(arch) else recipe.split(SPLIT_SEED)
    return Course(task=task, recipe=recipe, test=tuple(test))


@torch.no_grad()
def drawn(
    model: nn.Module, prompts: Tensor, length: int, uniforms: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Responses of `length` tokens to prompts [n, P], by uniforms [n, G, R] in [0, 1).

    Token t of each is where the distribution function passes its uniform. Returns tokens [n, G, R] int64, their
    log-probs and the entropies of what they were drawn from, [n, G, R] float64 in nats. Raises `TrainingBroke`.
    """
    members = uniforms.shape[1]
    logits, cache = _begun(model, prompts, members)
    tokens, log_probs, entropies = [], [], []
    for at in range(length):
        tempered = logits[:, -1].to(torch.float64) / temperature
        if not bool(tempered.isfinite().all()):
            raise TrainingBroke("a logit is not finite: the steps before were too large, lower lr")
        below = tempered.softmax(-1).cumsum(-1)
        passed = below <= uniforms[..., at].reshape(-1, 1) * below[:, -1:]
        tokens.append(passed.sum(-1).clamp(max=below.shape[-1] - 1))
        log_probs.append(token_logp(tempered, tokens[-1]))
        entropies.append(token_entropy(tempered))
        if at + 1 < length:
            position = prompts.shape[1] + at
            logits, cache = continue_from(model, tokens[-1][:, None], cache, position, keep=1)
    found, logp, entropy = (
        torch.stack(each, -1).unflatten(0, (-1, members)) for each in (tokens, log_probs, entropies)
    )
    return found, logp, entropy


@torch.no_grad()
def scored(model: nn.Module, problem: Problem, temperature: float = 1.0) -> list[Tensor]:
    """N log-probs [R_i] float64 of a rollout's responses under any policy; prompts and responses have one length each."""
    prompts = torch.stack([group.prompt for group in problem.groups])
    tokens = torch.stack([response.tokens for response in problem.responses])
    logits, cache = _begun(model, prompts, len(problem.groups[0]))
    if tokens.shape[1] > 1:
        rest, _ = continue_from(model, tokens[:, :-1], cache, prompts.shape[1], tokens.shape[1] - 1)
        logits = torch.cat([logits, rest], 1)
    rows = zip(logits.to(torch.float64), tokens, strict=True)
    return [token_logp(row, own, temperature) for row, own in rows]


def _begun(model: nn.Module, prompts: Tensor, members: int) -> tuple[Tensor, Cache]:
    """Logits [n G, 1, V] after prompts [n, P], and the state, each row for `members` responses."""
    logits, cache = continue_from(model, prompts, new_cache(unwrapped(model).config), 0, keep=1)

    def shared(_: object, tensor: Tensor) -> Tensor:
        # A tensor without axes is one number of the layer, such as its window.
        return tensor.repeat_interleave(members, 0) if tensor.dim() else tensor

    return logits.repeat_interleave(members, 0), map_state(cache, shared)


def uniforms_of(key: int, step: int, prompts: Sequence[int], members: int, length: int) -> Tensor:
    """[n, G, R] float64 of the prompts at these places, with `members` responses of `length` tokens."""
    places, responses = np.asarray(prompts)[:, None, None], np.arange(members)[:, None]
    return torch.from_numpy(keyed_uniform(key, step, places, responses, np.arange(length)))


def rolled_out(
    model: nn.Module,
    tasks: Sequence[Task],
    *,
    seed: int,
    rollout: int,
    members: int,
    temperature: float,
) -> tuple[Problem, float]:
    """A group of `members` responses to each of some tasks of one prompt length, rewarded by it, and the mean entropy in nats.

    The sampler's log-probs stand for the old ones until these are scored.
    """
    length = len(tasks[0].answer)
    uniforms = uniforms_of(RESPONSES | seed, rollout, range(len(tasks)), members, length)
    prompts = torch.tensor([task.prompt for task in tasks])
    tokens, log_probs, entropy = drawn(model, prompts, length, uniforms, temperature)
    groups = tuple(
        Group(prompt=prompt, responses=tuple(map(_rewarded, [task] * members, own, logp)))
        for task, prompt, own, logp in zip(tasks, prompts, tokens, log_probs, strict=True)
    )
    return Problem(groups=groups), float(entropy.mean())


def examined(
    model: nn.Module, tasks: Sequence[Task], *, seed: int, members: int, temperature: float
) -> list[float]:
    """[P] the mean reward of each task over `members` responses. The numbers are the same at every test of a seed."""
    alike: dict[tuple[int, int], list[int]] = {}
    for place, task in enumerate(tasks):
        alike.setdefault((len(task.prompt), len(task.answer)), []).append(place)
    rewards = [0.0] * len(tasks)
    for (_, length), places in alike.items():
        prompts = torch.tensor([tasks[place].prompt for place in places])
        uniforms = uniforms_of(TEST | seed, 0, places, members, length)
        tokens, _, _ = drawn(model, prompts, length, uniforms, temperature)
        for place, own in zip(places, tokens, strict=True):
            rewards[place] = sum(tasks[place].reward(one) for one in own) / members
    return rewards


def scrambled(problem: Problem, *, seed: int) -> Problem:
    """The same responses, each behind its prompt's tokens in another order, which follows from seed and prompt."""
    groups = []
    for place, group in enumerate(problem.groups):
        content = int(problem.prompt_hash(place)[:8], 16)
        keys = keyed_uniform(ORDER | seed, content, 0, 0, np.arange(len(group.prompt)))
        order = torch.from_numpy(np.argsort(keys, kind="stable"))
        groups.append(Group(prompt=group.prompt[order], responses=group.responses))
    return Problem(groups=tuple(groups), seed=problem.seed)


def _rewarded(task: Task, tokens: Tensor, logp: Tensor) -> Response:
    return Response(
        tokens=tokens.clone(),
        mask=torch.ones(len(tokens), dtype=torch.bool),
        reward=task.reward(tokens),
        old_logp=logp.clone(),
        sampler_logp=logp.clone(),
    )
