"""Problems of task prompts for a warm-started policy: its own responses, with the rewards that the task gives them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from lsverify.families.sizes import VOCABULARY
from lsverify.problems import Group, Problem, Response
from lsverify.tasks import Task


@torch.no_grad()
def sampled(model: nn.Module, prompts: Tensor, length: int, generator: Generator) -> Tensor:
    """Responses [N, length] int64 to prompts [N, P], at temperature 1. The whole row runs for each token: rows are short."""
    tokens = prompts
    for _ in range(length):
        logits = model(input_ids=tokens, use_cache=False).logits[:, -1].to("cpu", torch.float64)
        tokens = torch.cat(
            [tokens, torch.multinomial(logits.softmax(-1), 1, generator=generator)], 1
        )
    return tokens[:, prompts.shape[1] :]


@torch.no_grad()
def mean_reward(
    model: nn.Module, tasks: Sequence[Task], *, seed: int = 0, samples: int = 1
) -> float:
    """The mean reward of `samples` responses to each task, each as long as its answer."""
    generator = torch.Generator().manual_seed(seed)
    alike: dict[tuple[int, int], list[Task]] = {}
    for task in tasks:
        alike.setdefault((len(task.prompt), len(task.answer)), []).append(task)
    total = 0.0
    for (_, length), some in alike.items():
        prompts = torch.tensor([task.prompt for task in some for _ in range(samples)])
        responses = sampled(model, prompts, length, generator).unflatten(0, (len(some), samples))
        total += sum(
            task.reward(one) for task, own in zip(some, responses, strict=True) for one in own
        )
    return total / (samples * len(tasks))


def task_problem(
    model: nn.Module,
    tasks: Sequence[Task],
    *,
    group_sizes: Sequence[int],
    response_lengths: Sequence[int],
    seed: int,
) -> Problem:
    """One group for each task, of responses sampled from `model` with the rewards of the task.

    `response_lengths` is taken in the order of members, from the front again where it is shorter than the problem. In a
    group of equal rewards the last response is edited, so that there is something to learn. Log-probs are zero until
    `problems.off_policy` sets them.
    """
    lengths = itertools.cycle(response_lengths)
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for task, size in zip(tasks, group_sizes, strict=True):
        own = list(itertools.islice(lengths, size))
        prompts = torch.tensor([task.prompt]).expand(size, -1)
        drawn = sampled(model, prompts, max(own), generator)
        responses = [tokens[:length].clone() for tokens, length in zip(drawn, own, strict=True)]
        if size > 1 and len({task.reward(tokens) for tokens in responses}) == 1:
            responses[-1] = edited(task, responses[-1])
        prompt = torch.tensor(task.prompt)
        made = tuple(_response(tokens, task.reward(tokens)) for tokens in responses)
        groups.append(Group(prompt=prompt, responses=made))
    return Problem(groups=tuple(groups), seed=seed)


def edited(task: Task, tokens: Tensor) -> Tensor:
    """A response as long as this one with another reward: all wrong where it has any right, else begun as the answer."""
    other = tokens.clone()
    answer = torch.tensor(task.answer[: len(tokens)])
    begun = other[: len(answer)]
    right = begun == answer
    begun.copy_(torch.where(right, (begun + 1) % VOCABULARY, begun) if right.any() else answer)
    return other


def _response(tokens: Tensor, reward: float) -> Response:
    zeros = torch.zeros(len(tokens), dtype=torch.float64)
    return Response(
        tokens=tokens,
        mask=torch.ones(len(tokens), dtype=torch.bool),
        reward=reward,
        old_logp=zeros,
        ref_logp=zeros,
    )
