"""Detach policies and their grammar.

A policy says where a branch begins, how far the sweep goes back, and which part of d loss / d z it carries. With a
prompt of P tokens the live tail keeps k of them in every branch, so the captured prefix has B = P - k tokens, and the
sweep returns the state term of the last m of these: the gradient is that of the objective with the prompt stopped at
B - m. `layers` and `kinds` choose among the state's tensors once, at B; inside the prompt the sweep is complete.
`roulette:p` sweeps with probability p and scales the state term by 1/p. `stale:n` captures once for n optimizer steps.

A load-balancing loss (`Objective.aux_coef`) is a loss of prompt tokens too. Those before the stop, and under `detach` all
before B, are constants: they count in its value and in the frozen choices, and their part of it has no gradient, so the
state term that a policy leaves out includes that. `layers` and `kinds` choose at B and leave the part whole, `roulette`
scales it as it does the rest of the sweep, and `stale` refuses the loss: its prompt was routed by older parameters.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsverify.errors import InputError

if TYPE_CHECKING:
    from lsverify.prompt import PromptState

ALLOWED = (
    "exact, detach, window:M, tail:K, layers:0,2-3, kinds:attention,recurrent, roulette:P, stale:N, or several joined "
    "by +, as in tail:K+window:M+kinds:recurrent"
)
# The kinds of state that carry a gradient; an indexer's keys only choose positions.
KINDS = ("attention", "sliding", "latent", "recurrent", "conv")


@dataclass(frozen=True)
class Policy:
    """`tail` is k, the prompt tokens replayed in each branch; `window` is m, None for the whole prefix.

    `layers` and `kinds` choose the part of the state that is swept, None for all of it; `probability` is that of a
    sweep; `refresh` is the number of optimizer steps that one capture serves, None where each step captures anew.
    """

    spec: str
    tail: int = 1
    window: int | None = None
    layers: frozenset[int] | None = None
    kinds: frozenset[str] | None = None
    probability: float | None = None
    refresh: int | None = None

    def boundary(self, prompt_length: int) -> int:
        """B, the number of captured tokens; 0 when the live tail covers the prompt."""
        return max(prompt_length - self.tail, 0)

    def stop(self, prompt_length: int) -> int:
        """The position up to which the prompt counts as constant: 0 means that no token's share is lost."""
        boundary = self.boundary(prompt_length)
        return 0 if self.window is None else max(boundary - self.window, 0)

    def clamped(self, prompt_length: int) -> bool:
        """Whether the policy asks for more of this prompt than there is."""
        too_wide = self.window is not None and self.window > self.boundary(prompt_length)
        return self.tail > prompt_length or too_wide

    @property
    def chooses(self) -> bool:
        """Whether only a part of d loss / d z at B is carried, or a scaled one."""
        return not (self.layers is None and self.kinds is None and self.probability is None)

    def carries(self, layer: int | None, kind: str) -> bool:
        """Whether the state tensors of this layer (None: the whole model's) and kind are swept."""
        return (self.layers is None or layer in self.layers) and (
            self.kinds is None or kind in self.kinds
        )

    def scale(self, prompt_hash: str, seed: int) -> float:
        """What the prompt's state term is multiplied by: 1, or under roulette 1/p or 0."""
        if self.probability is None:
            return 1.0
        return coin_up(self.probability, prompt_hash, seed) / self.probability

    @property
    def reference(self) -> str:
        """The reference that the policy claims, in words of the receipt."""
        return ", ".join(filter(None, (self._where(), self._what())))

    def _where(self) -> str:
        if self.window is None:
            return "" if self.chooses else "full"
        if self.tail > 1:
            return f"stopped at P-{self.tail + self.window}"
        return f"stopped at B-{self.window}" if self.window else "stopped at B"

    def _what(self) -> str:
        """What is carried through the boundary, when it is not the whole."""
        if self.refresh is not None:
            return f"captured every {self.refresh} steps"
        parts = [part for part in self.spec.split("+") if part.startswith(("layers", "kinds"))]
        chosen = f"only {' and '.join(parts)} at B" if self.layers or self.kinds else ""
        expected = "" if self.probability is None else "full in expectation"
        return ", ".join(filter(None, (chosen, expected)))


def require_chosen(policy: Policy, state: PromptState) -> None:
    """Raises `InputError` when the policy names layers or kinds of which the state has nothing."""
    rows = state.inventory()
    if not rows:  # a prompt of one token: nothing is captured, whatever is chosen
        return
    layers, kinds = {row.layer for row in rows}, {row.kind for row in rows}
    numbers = sorted(layer for layer in layers if layer is not None)
    if absent := sorted((policy.layers or frozenset()) - layers):
        raise InputError(
            f"policy {policy.spec!r}: layer {absent[0]} has no state, the layers that have are {numbers}"
        )
    if absent_kinds := sorted((policy.kinds or frozenset()) - kinds):
        raise InputError(
            f"policy {policy.spec!r}: this model's state has no kind {absent_kinds[0]!r}, it has {', '.join(sorted(kinds))}"
        )


def coin_up(probability: float, prompt_hash: str, seed: int) -> bool:
    """One coin per step and distinct prompt: a function of both alone, so equal on all ranks and free of rollouts."""
    digest = hashlib.sha256(f"roulette:{seed}:{prompt_hash}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < probability * 2.0**64


def parse_policy(spec: str) -> Policy:
    """Read a policy, for instance `window:64` or `window:64+kinds:recurrent`.

    Raises `InputError`, one line, when the text is no policy.
    """
    fields: dict[str, Any] = {}
    if spec == "exact":
        return Policy(spec)
    if spec == "detach":
        return Policy(spec, window=0)
    for part in spec.split("+"):
        name, colon, value = part.partition(":")
        if not colon or name not in _READ or name in fields:
            raise InputError(f"policy {spec!r} is not known: use {ALLOWED}")
        fields[name] = _READ[name](spec, value)
    swept = fields.keys() & {"layers", "kinds", "roulette"}
    if "stale" in fields and fields.keys() - {"stale", "tail"}:
        raise InputError(
            f"policy {spec!r}: stale cannot be swept, since recomputing at new parameters does not reproduce the old "
            "state; use stale:N or tail:K+stale:N"
        )
    return Policy(
        spec,
        tail=fields.get("tail", 1),
        window=fields.get("window", None if swept else 0),
        layers=fields.get("layers"),
        kinds=fields.get("kinds"),
        probability=fields.get("roulette"),
        refresh=fields.get("stale"),
    )


def _count(least: int, what: str) -> Callable[[str, str], int]:
    def read(spec: str, value: str) -> int:
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise InputError(f"policy {spec!r} is not known: use {ALLOWED}")
        if int(value) < least:
            raise InputError(f"policy {spec!r}: {what}")
        return int(value)

    return read


def _layers(spec: str, value: str) -> frozenset[int] | None:
    """`all`, or numbers and ranges from 0."""
    if value == "all":
        return None
    chosen: set[int] = set()
    for part in value.split(","):
        match = re.fullmatch(r"([0-9]{1,4})(?:-([0-9]{1,4}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(
                f"policy {spec!r}: layers are all, or numbers and ranges from 0, as in layers:0,2-3"
            )
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(chosen)


def _kinds(spec: str, value: str) -> frozenset[str] | None:
    if value == "all":
        return None
    chosen = value.split(",")
    if "index" in chosen:
        raise InputError(
            f"policy {spec!r}: an indexer's keys choose positions and carry no gradient; use {', '.join(KINDS)}"
        )
    if unknown := [kind for kind in chosen if kind not in KINDS]:
        raise InputError(
            f"policy {spec!r}: kind {unknown[0]!r} is not known, use all, or some of {', '.join(KINDS)}"
        )
    return frozenset(chosen)


def _probability(spec: str, value: str) -> float:
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", value) or not 0.0 < float(value) <= 1.0:
        raise InputError(f"policy {spec!r}: roulette needs a probability above 0 and at most 1")
    return float(value)


_READ: dict[str, Callable[[str, str], Any]] = {
    "window": _count(0, "a window has 0 or more tokens"),
    "tail": _count(1, "the live tail needs at least 1 token, use tail:1 or more"),
    "layers": _layers,
    "kinds": _kinds,
    "roulette": _probability,
    "stale": _count(1, "a capture serves at least 1 optimizer step, use stale:1 or more"),
}
