"""Rollouts of the policy as it is now: prompts by key, responses drawn by inverse distribution from keyed numbers.

Policies of equal weights draw equal tokens, since every number belongs to its (seed, step, prompt, response, token) and
rows are computed together in one order: prompts of one length at a time, whatever their order in a rollout. A response
ends with one of the course's `ends`, or at its task's `most` tokens. This makes data for training and for the test; it
judges no path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import Cache

from lsverify.cache import map_state, new_cache
from lsverify.courses import Asked
from lsverify.errors import TrainingBroke
from lsverify.keyed import ORDER, RESPONSES, TEST, keyed_uniform
from lsverify.objective import token_entropy, token_logp
from lsverify.problems import Group, Problem, Response
from lsverify.prompt import continue_from, unwrapped

# Tokens whose state is alive at once while responses are drawn: 1.5 GB of keys and values for a model of 135M parameters.
MOST_TOKENS = 2**15


@torch.no_grad()
def drawn(
    model: nn.Module,
    prompts: Tensor,
    length: int,
    uniforms: Tensor,
    temperature: float = 1.0,
    ends: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Responses of `length` tokens to prompts [n, P], by uniforms [n, G, R] in [0, 1).

    Token t of each is where the distribution function passes its uniform. Returns tokens [n, G, R] int64, their
    log-probs and the entropies of what they were drawn from, [n, G, R] float64 in nats; fewer columns where every
    response has drawn one of `ends` before. Raises `TrainingBroke`.
    """
    last, open_rows = torch.tensor(ends, dtype=torch.int64), torch.ones(uniforms[..., 0].numel())
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
        open_rows[torch.isin(tokens[-1], last)] = 0
        if not open_rows.any():
            break
        if at + 1 < length:
            position = prompts.shape[1] + at
            logits, cache = continue_from(model, tokens[-1][:, None], cache, position, keep=1)
    found, logp, entropy = (
        torch.stack(each, -1).unflatten(0, (-1, members)) for each in (tokens, log_probs, entropies)
    )
    return found, logp, entropy


@torch.no_grad()
def scored(model: nn.Module, problem: Problem, temperature: float = 1.0) -> list[Tensor]:
    """N log-probs [R_i] float64 of a rollout's responses under any policy; its groups are of one size."""
    members = len(problem.groups[0])
    found: dict[int, Tensor] = {}
    for places in _alike([len(group.prompt) for group in problem.groups]):
        own = [place * members + j for place in places for j in range(members)]
        prompts = torch.stack([problem.groups[place].prompt for place in places])
        responses = [problem.responses[i].tokens for i in own]
        tokens = pad_sequence(responses, batch_first=True)
        logits, cache = _begun(model, prompts, members)
        if tokens.shape[1] > 1:
            keep = tokens.shape[1] - 1
            rest, _ = continue_from(model, tokens[:, :-1], cache, prompts.shape[1], keep)
            logits = torch.cat([logits, rest], 1)
        for i, row, response in zip(own, logits.to(torch.float64), responses, strict=True):
            found[i] = token_logp(row[: len(response)], response, temperature)
    return [found[i] for i in range(len(problem))]


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


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One response [R] int64, its log-probs and entropies [R] float64; `ended` where it ends by itself or must."""

    tokens: Tensor
    logp: Tensor
    entropy: Tensor
    ended: bool

    def rewarded(self, task: Asked) -> Response:
        return Response(
            tokens=self.tokens.clone(),
            mask=torch.ones(len(self.tokens), dtype=torch.bool),
            reward=task.reward(self.tokens),
            truncated=not self.ended,
            old_logp=self.logp.clone(),
            sampler_logp=self.logp.clone(),
        )


def responses_to(
    model: nn.Module,
    tasks: Sequence[Asked],
    *,
    key: int,
    step: int,
    members: int,
    temperature: float,
    ends: Sequence[int] = (),
) -> Iterator[tuple[int, list[Drawn]]]:
    """The place of each task and `members` responses to it, those of one length after another."""
    last = torch.tensor(ends, dtype=torch.int64)
    for places in _alike([(len(task.prompt), task.most) for task in tasks]):
        first = tasks[places[0]]
        most = first.most
        together = max(MOST_TOKENS // (members * (len(first.prompt) + most)), 1)
        for at in range(0, len(places), together):
            some = places[at : at + together]
            prompts = torch.tensor([tasks[place].prompt for place in some])
            uniforms = uniforms_of(key, step, some, members, most)
            found = drawn(model, prompts, most, uniforms, temperature, ends)
            for place, tokens, logp, entropy in zip(some, *found, strict=True):
                rows = zip(tokens, logp, entropy, strict=True)
                yield place, [_cut(*row, most=most, ends=last) for row in rows]


def _cut(tokens: Tensor, logp: Tensor, entropy: Tensor, *, most: int, ends: Tensor) -> Drawn:
    """Up to the first of `ends`, which belongs to the response. Without any a response has its length and is whole."""
    at = torch.isin(tokens, ends).nonzero()
    length = int(at[0]) + 1 if len(at) else most
    ended = bool(len(at)) or not len(ends)
    return Drawn(tokens=tokens[:length], logp=logp[:length], entropy=entropy[:length], ended=ended)


def _alike(kinds: Sequence[object]) -> list[list[int]]:
    """The places of equal kinds, in the order of first appearance."""
    found: dict[object, list[int]] = {}
    for place, kind in enumerate(kinds):
        found.setdefault(kind, []).append(place)
    return list(found.values())


def rolled_out(
    model: nn.Module,
    tasks: Sequence[Asked],
    *,
    seed: int,
    rollout: int,
    members: int,
    temperature: float,
    ends: Sequence[int] = (),
) -> tuple[Problem, float]:
    """A group of `members` responses to each task, rewarded by it, and the mean entropy over their tokens, in nats.

    The sampler's log-probs stand for the old ones until these are scored.
    """
    found = dict(
        responses_to(
            model,
            tasks,
            key=RESPONSES | seed,
            step=rollout,
            members=members,
            temperature=temperature,
            ends=ends,
        )
    )
    groups = tuple(
        Group(
            prompt=torch.tensor(task.prompt),
            responses=tuple(one.rewarded(task) for one in found[place]),
        )
        for place, task in enumerate(tasks)
    )
    entropy = torch.cat([one.entropy for place in range(len(tasks)) for one in found[place]])
    return Problem(groups=groups), float(entropy.mean())


def examined(
    model: nn.Module,
    tasks: Sequence[Asked],
    *,
    seed: int,
    members: int,
    temperature: float,
    ends: Sequence[int] = (),
) -> list[float]:
    """[P] the mean reward of each task over `members` responses. The numbers are the same at every test of a seed."""
    return rewards_of(
        model, tasks, key=TEST | seed, step=0, members=members, temperature=temperature, ends=ends
    )


def rewards_of(
    model: nn.Module,
    tasks: Sequence[Asked],
    *,
    key: int,
    step: int,
    members: int,
    temperature: float,
    ends: Sequence[int] = (),
) -> list[float]:
    """The same by the numbers of any key and step."""
    rewards = [0.0] * len(tasks)
    for place, own in responses_to(
        model, tasks, key=key, step=step, members=members, temperature=temperature, ends=ends
    ):
        rewards[place] = sum(tasks[place].reward(one.tokens) for one in own) / members
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
