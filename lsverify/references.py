"""The references that a path is held to, and what the references themselves are held to.

`full` is full autograd, serial and unpadded. `stopped` evaluates the prompt up to a stop position with one copy of the
parameters and everything after it with another, in one ordinary graph with nothing detached: the second copy's
gradient is the response term, the first copy's the state term. It shares the cache with the path, so it counts only
where the two copies sum to `full`, which uses no cache; `split_gradient` gives the same two terms without a cache for
models whose keys and values are made token by token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.cache_utils import Cache

from lsverify.auxiliary import Balance, Routed
from lsverify.cache import Slot, map_state, new_cache
from lsverify.errors import InputError
from lsverify.objective import Objective, Plan, Scores, prepare
from lsverify.paths import full_autograd
from lsverify.problems import Problem
from lsverify.prompt import continue_from, unwrapped
from lsverify.scoring import frozen_balance, full_logits
from lsverify.span_masks import span_arguments
from lsverify.spans import Spans

Gradients = dict[str, Tensor | None]
# Parameters by name, and where the tokens that they evaluate end.
Piece = tuple[Mapping[str, Tensor], int | None]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A gradient by parameter name (None: the parameter is not reached), the loss, and log-probs [R_i]."""

    gradients: Gradients
    loss: float
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which part of d loss / d z at the boundary a reference carries on into the prompt.

    boundary: B for a prompt of P tokens. share: for a response and a state tensor, what its cotangent is multiplied
    by: 0 where the tensor is detached at B, 1 where it is carried, 1/p or 0 where a coin decides. swept: for a response,
    what the gradient of a loss of the prompt's own tokens before B is multiplied by: 1, or as the coin decides.
    """

    boundary: Callable[[int], int]
    share: Callable[[int, Slot], float]
    swept: Callable[[int], float] = lambda _: 1.0

    def rest(self) -> Filter:
        """What this one leaves out."""
        return Filter(
            boundary=self.boundary,
            share=lambda member, slot: 1.0 - self.share(member, slot),
            swept=lambda member: 1.0 - self.swept(member),
        )

    def of(self, cache: Cache, member: int) -> Cache:
        """The state at the boundary: its values as they are, its cotangents multiplied by their shares."""

        def weighted(slot: Slot, tensor: Tensor) -> Tensor:
            share = self.share(member, slot) if tensor.requires_grad else 1.0
            if share == 1.0:
                return tensor
            # What is detached has no gradient, which is not the same as one of zero.
            constant = tensor.detach()
            return constant + share * (tensor - constant) if share else constant

        return map_state(cache, weighted)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The two terms of the full gradient when the prompt is cut at a stop position, or filtered at a boundary."""

    response: Reference
    state: Gradients

    def total(self) -> Gradients:
        """Response term plus state term: must equal `full`."""
        return {name: _sum(g, self.state[name]) for name, g in self.response.gradients.items()}


def take_gradients(model: nn.Module) -> Gradients:
    """Every trainable parameter's gradient by name, taken out of the model (`.grad` is None afterwards)."""
    taken: Gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            taken[name] = parameter.grad
        parameter.grad = None
    return taken


def full_reference(model: nn.Module, problem: Problem, objective: Objective) -> Reference:
    """Full autograd, one unpadded response at a time."""
    take_gradients(model)
    result = full_autograd(model, problem, objective)
    assert result.log_probs is not None
    return Reference(gradients=take_gradients(model), loss=result.loss, log_probs=result.log_probs)


def stopped_reference(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    stop: Callable[[int], int],
    scores: Scores | None = None,
    *,
    carried: Filter | None = None,
    captured: Callable[[int], Mapping[str, Tensor]] | None = None,
    parts: int = 1,
) -> Stopped:
    """The gradient with prompt tokens before `stop(P)` held constant, and the part this leaves out.

    parts: how many passes a stretch of tokens is evaluated in, one after the other; only rounding depends on it. carried: what of d loss / d z reaches the prompt's other tokens, all of it if None. captured: the parameters under
    which a response's constant tokens are evaluated, by name; the model's own if None. A load-balancing loss of
    the prompt's own tokens goes with the copy that evaluates them.
    """
    if captured is not None and objective.aux_coef:
        raise InputError(
            "a state kept over steps has no load-balancing loss of one step: use aux_coef=0"
        )
    constant, live = _copy(model), _copy(model)
    plan = prepare(objective, problem, scores or Scores())
    balance = frozen_balance(model, problem, objective)

    def logits(i: int) -> Tensor:
        start = stop(len(problem.prompt(i)))
        pieces: list[Piece] = [(captured(i) if captured else constant, start), (live, None)]
        if carried is not None:
            pieces.insert(1, (live, carried.boundary(len(problem.prompt(i)))))
        return _in_pieces(model, problem, i, pieces, carried, parts)

    response = _accumulated(plan, len(problem), logits, live, _Shares(balance, problem, carried))
    state = _gradients(constant)
    if carried is not None:
        left_out = _left_out(model, problem, plan, carried.rest(), balance)
        state = {name: _sum(g, left_out[name]) for name, g in state.items()}
    return Stopped(response=response, state=state)


def _left_out(
    model: nn.Module, problem: Problem, plan: Plan, rest: Filter, balance: Balance
) -> Gradients:
    """The state term that a filter leaves out: through the whole prompt, evaluated with a copy of its own."""
    prompt, live = _copy(model), _copy(model)

    def logits(i: int) -> Tensor:
        boundary = rest.boundary(len(problem.prompt(i)))
        return _in_pieces(model, problem, i, [(prompt, boundary), (live, None)], rest)

    _accumulated(plan, len(problem), logits, live, _Shares(balance, problem, rest))
    return _gradients(prompt)


def banded_reference(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    edges: Callable[[int], Sequence[int]],
) -> tuple[Reference, list[Gradients]]:
    """The response term, and the state term by bands of prompt tokens, from one graph per response.

    edges: for a prompt of P tokens where each band ends, not decreasing, the last one B; bands may be empty. Every
    band is evaluated with parameters of its own, so what reaches them is that band's part of the state term.
    """
    live = _sharing(model)
    bands = [_sharing(model) for _ in edges(1)]
    plan = prepare(objective, problem, Scores())

    def logits(i: int) -> Tensor:
        ends = edges(len(problem.prompt(i)))
        pieces: list[Piece] = [*zip(bands, ends, strict=True), (live, None)]
        return _in_pieces(model, problem, i, pieces, None)

    balance = frozen_balance(model, problem, objective)
    response = _accumulated(plan, len(problem), logits, live, _Shares(balance, problem, None))
    return response, [_gradients(band) for band in bands]


def _in_pieces(
    model: nn.Module,
    problem: Problem,
    i: int,
    pieces: Sequence[Piece],
    carried: Filter | None,
    parts: int = 1,
) -> Tensor:
    """Logits [R_i, V] from one graph over (weights, end) pieces of response i's tokens; the filter before the last.

    Each piece in `parts` passes, where no span forbids it.
    """
    tokens, length = problem.tokens(i)[:-1], len(problem.responses[i].tokens)
    continuing, spans = _Continuing(model), problem.spans(i)
    cache: Cache = new_cache(unwrapped(model).config)
    answered = len(tokens) - length
    logits: list[Tensor] = []
    start = 0
    for weights, end in pieces:
        if end is None and carried is not None:
            cache = carried.of(cache, i)
        named = {f"model.{name}": value for name, value in weights.items()}
        stop = len(tokens) if end is None else end
        for at, to in _stretches(start, stop, 1 if spans else parts):
            kept = max(to - max(at, answered), 0)
            found, cache = functional_call(
                continuing, named, args=(tokens[at:to], cache, at, max(kept, 1), spans)
            )
            logits += [found] if kept else []
        start = stop
    return torch.cat(logits) if len(logits) > 1 else logits[0]


def _stretches(start: int, stop: int, parts: int) -> Iterator[tuple[int, int]]:
    """What is from start to stop, in at most `parts` even stretches of one token or more."""
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return ((at, to) for at, to in pairwise(edges) if at < to)


class _Continuing(nn.Module):
    """`continue_from` as a module, so that it can be called with other parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, cache: Cache, start: int, keep: int, spans: Spans
    ) -> tuple[Tensor, Cache]:
        return continue_from(self.model, tokens, cache, start, keep, spans)


def split_gradient(
    model: nn.Module, problem: Problem, objective: Objective, stop: Callable[[int], int]
) -> Stopped:
    """The same two terms from one uncached forward pass per response: a witness without any cache.

    Each module that holds parameters is evaluated with one copy at positions before the stop and with the other from
    there on. Valid where such modules work token by token on [1, T, ...] and keys and values are cached as they come
    out of them; not for latent attention, which expands cached latents anew, nor for convolutions, scans and experts
    (and so without their load-balancing loss).
    """
    constant, live = _copy(model), _copy(model)
    plan = prepare(objective, problem, Scores())

    def logits(i: int) -> Tensor:
        tokens, length = problem.tokens(i)[:-1], len(problem.responses[i].tokens)
        with _split_modules(model, constant, live, stop(len(problem.prompt(i)))):
            positions = torch.arange(len(tokens))[None]
            spans = span_arguments(model, problem.spans(i), len(tokens))
            output = model(input_ids=tokens[None], position_ids=positions, use_cache=False, **spans)
        kept: Tensor = output.logits[0, -length:]
        return kept

    response = _accumulated(plan, len(problem), logits, live, _Shares(Balance(), problem, None))
    return Stopped(
        response=response, state={n: p.grad for n, p in constant.items() if p.requires_grad}
    )


@contextmanager
def _split_modules(
    model: nn.Module, constant: Mapping[str, Tensor], live: Mapping[str, Tensor], stop: int
) -> Iterator[None]:
    canonical = {id(p): name for name, p in model.named_parameters()}
    holders = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]

    def split(module: nn.Module) -> Any:
        own = {name: canonical[id(p)] for name, p in module.named_parameters(recurse=False)}
        forward, names = type(module).forward, list(own)

        def run(weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            saved = {name: module._parameters[name] for name in names}
            for name in names:
                module._parameters[name] = weights[own[name]]  # type: ignore[assignment]
            try:
                out: Tensor = forward(module, inputs)
            finally:
                module._parameters.update(saved)
            return out

        def both(inputs: Tensor) -> Tensor:
            if stop == 0:
                return run(live, inputs)
            return torch.cat([run(constant, inputs[:, :stop]), run(live, inputs[:, stop:])], dim=1)

        return both

    before = [vars(module).get("forward") for module in holders]
    for module in holders:
        module.forward = split(module)
    try:
        yield
    finally:
        for module, earlier in zip(holders, before, strict=True):
            del module.forward
            if earlier is not None:
                module.forward = earlier


def _copy(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }


def _sharing(model: nn.Module) -> dict[str, Tensor]:
    """The parameters' values, not copied, with gradients of their own."""
    return {
        name: p.detach().requires_grad_(p.requires_grad) for name, p in model.named_parameters()
    }


def _gradients(copy: Mapping[str, Tensor]) -> Gradients:
    return {name: p.grad for name, p in copy.items() if p.requires_grad}


@dataclass(frozen=True)
class _Shares:
    """The load-balancing loss of a response's pass, with the prompt's part of its gradient as the filter has it."""

    balance: Balance
    problem: Problem
    carried: Filter | None

    def added_to(self, loss: Tensor, routed: Routed, i: int) -> Tensor:
        weights = self.balance.whole(i)
        if self.carried is None or not self.balance:
            return self.balance.added_to(loss, routed, weights)
        differentiated = weights.clone()
        boundary = self.carried.boundary(len(self.problem.prompt(i)))
        differentiated[:boundary] *= self.carried.swept(i)
        return self.balance.added_to(loss, routed, weights, differentiated)


def _accumulated(
    plan: Plan,
    count: int,
    logits: Callable[[int], Tensor],
    weights: Mapping[str, Tensor],
    shares: _Shares,
) -> Reference:
    total, log_probs = 0.0, []
    for i in range(count):
        with shares.balance.watched() as routed:
            member = plan.member(i, logits(i))
        loss = shares.added_to(member.loss, routed, i)
        loss.backward()
        total += loss.detach().item()
        log_probs.append(member.logp.detach())
    gradients = {name: p.grad for name, p in weights.items() if p.requires_grad}
    return Reference(gradients=gradients, loss=total, log_probs=tuple(log_probs))


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


@torch.no_grad()
def central_difference(
    model: nn.Module,
    problem: Problem,
    objective: Objective,
    direction: Mapping[str, Tensor],
    steps: Sequence[float] = (1e-3, 5e-4, 2.5e-4),
) -> tuple[float, float]:
    """The loss's derivative along `direction` (by parameter name) at the current parameters, and its error estimate.

    Central differences at shrinking steps, extrapolated to step 0 (Richardson); the error estimate is the last
    correction, infinite where a single step leaves nothing to correct. The parameters are restored exactly. The counts
    of a load-balancing loss are those at the current parameters.
    """
    plan, balance = prepare(objective, problem, Scores()), frozen_balance(model, problem, objective)
    parameters = dict(model.named_parameters())
    before = {name: parameters[name].clone() for name in direction}

    def loss_at(step: float) -> float:
        for name, along in direction.items():
            parameters[name].copy_(before[name] + step * along)
        return sum(map(loss_of, range(len(problem))))

    def loss_of(i: int) -> float:
        with balance.watched() as routed:
            member = plan.member(i, full_logits(model, problem, i))
        return balance.added_to(member.loss, routed, balance.whole(i)).item()

    try:
        row = [(loss_at(h) - loss_at(-h)) / (2 * h) for h in steps]
    finally:
        for name in direction:
            parameters[name].copy_(before[name])
    correction = math.inf
    for order in range(1, len(steps)):
        better = [
            fine + (fine - coarse) / ((steps[i] / steps[i + order]) ** 2 - 1)
            for i, (coarse, fine) in enumerate(itertools.pairwise(row))
        ]
        correction = abs(better[-1] - row[-1])
        row = better
    return row[-1], correction
