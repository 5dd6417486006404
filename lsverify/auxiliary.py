"""The load-balancing loss of mixtures of experts, as a sum over tokens.

It is transformers' `load_balancing_loss_func` (Switch Transformers, arXiv 2101.03961, eq. 4, over top-k choices), times
the objective's `aux_coef`:

    aux = E * sum_e f_e * P_e,    f_e = C_e / M,    P_e = S_e / M

with E experts; C_e the number of top-k choices of e and S_e the sum of the router's probabilities of e, over the counted
tokens in every layer with a router; M = such layers times counted tokens. The library averages over layers before it
multiplies, where Switch has a loss for each layer. f couples all tokens and has no gradient; frozen by a scoring pass it
leaves a sum over tokens,

    aux = sum over layers and tokens of sum_e (E * f_e / M) * p_e

so each response's pass, and each chunk of the prompt, carries the part of its own tokens.

Counted is every token of the step whose output predicts another, whatever the objective's mask and micro-batches are: the
prompt's, and a response's but for its last one, which no path here forwards (a trainer that forwards it counts it).
Padding never counts. `aux_prompt` says how often a prompt does: `per_response`, since an ordinary batch has it in every
row, or `once` for each distinct prompt.

Router logits are seen at the modules that the model's class names for the library's own recording. The library sums in
float32 whatever the model's dtype; here sums are in float64, and equality to 1e-12 is shown against its code with those
casts read as float64 (`balance_oracle`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lsverify.errors import InputError
from lsverify.objective_options import Objective
from lsverify.padding import PromptSide
from lsverify.problems import Problem
from lsverify.prompt import unwrapped

LIBRARY = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
_OTHERS = ("router_z_loss_coef", "z_loss_coefficient", "seq_aux", "aux_loss_alpha")


@dataclass(frozen=True, kw_only=True)
class Routers:
    """A model's routers in its own order, each with the place of the logits in its output; E and k."""

    modules: tuple[tuple[nn.Module, int], ...]
    experts: int
    top_k: int

    @contextmanager
    def watched(self, seen: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Inside, `seen(router, logits [rows, E])` is called for each call of each router, rows in order of tokens."""

        def hook(number: int, place: int) -> Any:
            def called(module: nn.Module, args: Any, output: Any) -> None:
                logits = output[place] if isinstance(output, tuple) else output
                seen(number, logits.reshape(-1, logits.shape[-1]))

            return called

        handles = [
            module.register_forward_hook(hook(number, place))
            for number, (module, place) in enumerate(self.modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def routers_of(model: nn.Module) -> Routers:
    """The routers that the library's loss for this model is about, under an adapter or not.

    Raises `InputError`, one line with the model type and the reason, where there is no such loss or it is another.
    """
    head = unwrapped(model)
    config = head.config.get_text_config()

    def no(reason: str) -> InputError:
        return InputError(
            f"aux_coef is above 0, but model type {head.config.model_type!r} {reason}: use aux_coef=0"
        )

    modules = tuple(_recorded(head))
    if not modules:
        raise no("has no router whose logits the library records")
    tensors = (*head.named_parameters(), *head.named_buffers())
    biased = [name for name, _ in tensors if name.endswith("correction_bias")]
    if biased:
        # Its choices are of score plus bias; the library's loss would count others.
        raise no(f"balances its experts by a correction bias ({biased[0]}), not by this loss")
    function = library_loss(model)
    if function is None:
        other = [name for name in _OTHERS if getattr(config, name, None)]
        raise no(f"has no {LIBRARY} in the library" + (f", but {other[0]}" if other else ""))
    if list(inspect.signature(function).parameters) != _ARGUMENTS:
        raise no(f"has a {LIBRARY} of its own kind")
    sizes = [
        getattr(head, name, None) or getattr(config, name, None)
        for name in ("num_experts", "num_experts_per_tok")
    ]
    experts, top_k = sizes
    if experts is None or top_k is None:
        raise no("does not say how many experts it has and chooses")
    return Routers(modules=modules, experts=experts, top_k=top_k)


def library_loss(model: nn.Module) -> Any:
    """transformers' own function for this model's class: (gate_logits, num_experts, top_k, attention_mask); or None."""
    head = unwrapped(model)
    return getattr(sys.modules[type(head).__module__], LIBRARY, None)


def _recorded(head: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """What the classes of a model say the library records as `router_logits`: modules, and places in their outputs."""
    found: set[int] = set()
    for owner in head.modules():
        specs = (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")
        for spec in specs if isinstance(specs, list) else [specs] if specs else []:
            target: Any = getattr(spec, "target_class", spec)
            where = f".{layer.strip('.')}." if (layer := getattr(spec, "layer_name", None)) else ""
            for name, module in owner.named_modules():
                if id(module) not in found and isinstance(module, target) and where in f".{name}.":
                    found.add(id(module))
                    yield module, getattr(spec, "index", 1)


def token_weights(problem: Problem, aux_prompt: str) -> tuple[Tensor, ...]:
    """N tensors [P_i + R_i - 1] float64: how much each token of a response's own pass counts."""
    prompts = [problem.prompt_hash(group) for group in problem.group_of]
    weights = []
    for i, prompt in enumerate(prompts):
        own = torch.ones(len(problem.tokens(i)) - 1, dtype=torch.float64)
        if aux_prompt == "once":
            own[: len(problem.prompt(i))] = 1 / prompts.count(prompt)
        weights.append(own)
    return tuple(weights)


def probabilities(logits: Tensor) -> Tensor:
    """[rows, E]: the softmax in the logits' dtype, then at least float32, as the library has it."""
    probs = logits.softmax(-1)
    return probs.float() if probs.dtype in (torch.bfloat16, torch.float16) else probs


@dataclass(kw_only=True, eq=False)
class Tally:
    """Sums over counted tokens and layers: choices C [E], probabilities S [E], and their number M."""

    routers: Routers
    choices: Tensor = field(init=False)
    probabilities: Tensor = field(init=False)
    size: float = 0.0

    def __post_init__(self) -> None:
        self.choices = torch.zeros(self.routers.experts, dtype=torch.float64)
        self.probabilities = torch.zeros(self.routers.experts, dtype=torch.float64)

    @contextmanager
    def adding(self, weights: Tensor | float) -> Iterator[None]:
        """Adds what the passes inside route; weights of the tokens [T] of one pass, or one for all of every pass."""
        with self.routers.watched(lambda _, logits: self.add(logits, weights)):
            yield

    @torch.no_grad()
    def add(self, logits: Tensor, weights: Tensor | float) -> None:
        """logits [T, E] of one layer; the order among equal probabilities is torch's."""
        # Choices that are only counted are none of the model's: nobody who watches those is to see them.
        with torch._C.DisableTorchFunction():
            probs = probabilities(logits.detach())
            chosen = probs.topk(self.routers.top_k, dim=-1).indices.cpu()
            each = _per_token(weights, probs).double().cpu()
            self.choices.index_add_(
                0, chosen.flatten(), each[:, None].expand(chosen.shape).flatten()
            )
            self.probabilities += (probs.double().cpu() * each[:, None]).sum(0)
            self.size += float(each.sum())

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        both = Tally(routers=self.routers, size=self.size + other.size)
        both.choices = self.choices + other.choices
        both.probabilities = self.probabilities + other.probabilities
        return both


class Routed:
    """What routers said in passes over consecutive tokens, layer by layer, with the graph."""

    def __init__(self) -> None:
        self._calls: dict[int, list[Tensor]] = {}

    def keep(self, router: int, logits: Tensor) -> None:
        """One call of a router: logits [rows, E]."""
        self._calls.setdefault(router, []).append(logits)

    def layers(self) -> list[Tensor]:
        """For each router that was called, [T, E]."""
        return [torch.cat(calls) for calls in self._calls.values()]


class Balance:
    """The loss with its counts frozen, part by part. `Balance()`, of an objective without it, adds nothing anywhere.

    captured: the value of the prompt tokens before the boundary, which no branch forwards; 0 where none is captured.
    """

    def __init__(
        self,
        tally: Tally | None = None,
        objective: Objective | None = None,
        problem: Problem | None = None,
        captured: Tally | None = None,
    ) -> None:
        self.captured = 0.0
        self._tally = tally
        self._weights: tuple[Tensor, ...] = ()
        if tally is None or objective is None or problem is None:
            return
        self._counted = objective.aux_prompt
        self._weights = token_weights(problem, objective.aux_prompt)
        frequency = tally.choices / tally.size
        self._slopes = objective.aux_coef * tally.routers.experts * frequency / tally.size
        if captured is not None:
            self.captured = float((self._slopes * captured.probabilities).sum())

    def __bool__(self) -> bool:
        return self._tally is not None

    @contextmanager
    def watched(self) -> Iterator[Routed]:
        """Keeps what is routed in the passes inside."""
        routed = Routed()
        with self._tally.routers.watched(routed.keep) if self._tally else nullcontext():
            yield routed

    def whole(self, i: int) -> Tensor:
        """[P + R - 1] weights of response i's own pass."""
        return self._weights[i] if self else torch.empty(0)

    def branches(self, members: Sequence[int], boundary: int) -> Tensor:
        """[n * T] weights of n branches from B on, padded on the right to the longest."""
        rows = [self.whole(i)[boundary:] for i in members]
        return pad_sequence(rows, batch_first=True).flatten()

    def of_prompt(self, members: Sequence[int]) -> float:
        """The weight of each captured token of the prompt that these members share."""
        return prompt_weight(self._counted, members) if self else 0.0

    def part(self, routed: Routed, weights: Tensor | float) -> Tensor:
        """[] the loss of the tokens routed: weights [T], or one for all of them."""
        parts = []
        for logits in routed.layers():
            probs = probabilities(logits)
            own = probs @ self._slopes.to(probs)
            parts.append((_per_token(weights, probs) * own).sum())
        return torch.stack(parts).sum()

    def added_to(
        self, loss: Tensor, routed: Routed, weights: Tensor, differentiated: Tensor | None = None
    ) -> Tensor:
        """The loss [] and these tokens' part of it; with other weights in its gradient where they are given."""
        if not self:
            return loss
        part = self.part(routed, weights)
        if differentiated is not None:
            moving = self.part(routed, differentiated)
            part = part.detach() + (moving - moving.detach())
        return loss + part


def prompt_weight(aux_prompt: str, members: Sequence[int]) -> float:
    """How often each token of a prompt counts that these members share."""
    return 1.0 if aux_prompt == "once" else float(len(members))


class BatchBalance:
    """The loss of one padded pass over all responses, which needs no counting before; nothing without `aux_coef`."""

    def __init__(self, model: nn.Module, problem: Problem, objective: Objective) -> None:
        self._problem, self._objective, self._routed = problem, objective, Routed()
        self._routers = routers_of(model) if objective.aux_coef else None

    def watched(self) -> AbstractContextManager[None]:
        """Keeps what is routed in the pass inside."""
        return self._routers.watched(self._routed.keep) if self._routers else nullcontext()

    def added_to(self, loss: Tensor, padding: PromptSide) -> Tensor:
        """The loss [] and the batch's, whose last column was not forwarded."""
        if self._routers is None:
            return loss
        batch, tally = self._problem.padded(padding), Tally(routers=self._routers)
        weights = torch.zeros(len(batch), batch.input_ids.shape[1] - 1, dtype=torch.float64)
        rows = token_weights(self._problem, self._objective.aux_prompt)
        for row, start, own in zip(weights, batch.first_column.tolist(), rows, strict=True):
            row[start : start + len(own)] = own
        for logits in self._routed.layers():
            tally.add(logits, weights.flatten())
        balance = Balance(tally, self._objective, self._problem)
        return balance.added_to(loss, self._routed, weights.flatten())


def _per_token(weights: Tensor | float, probs: Tensor) -> Tensor:
    """[rows] in the dtype of the probabilities [rows, E]."""
    if not isinstance(weights, Tensor):
        return probs.new_full((len(probs),), weights)
    if len(weights) != len(probs):
        raise InputError(
            f"a router was called for {len(probs)} tokens in a pass over {len(weights)}: the load-balancing loss "
            "needs every token at every router, once; use aux_coef=0"
        )
    return weights.to(probs)
