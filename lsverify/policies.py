"""Detach policies and their grammar.

A policy says where a branch begins and how far the sweep goes back. With a prompt of P tokens the live tail keeps
k of them in every branch, so the captured prefix has B = P - k tokens, and the sweep returns the state term of
the last m of these. The gradient is then that of the objective with the prompt stopped at B - m.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lsverify.errors import InputError

ALLOWED = "exact, detach, window:M (M >= 0), tail:K (K >= 1), or tail:K+window:M"


@dataclass(frozen=True)
class Policy:
    """`tail` is k, the prompt tokens replayed in each branch; `window` is m, None for the whole prefix."""

    spec: str
    tail: int = 1
    window: int | None = None

    def boundary(self, prompt_length: int) -> int:
        """B, the number of captured tokens; 0 when the live tail covers the prompt."""
        return max(prompt_length - self.tail, 0)

    def stop(self, prompt_length: int) -> int:
        """The position up to which the prompt counts as constant: 0 means that nothing is lost."""
        boundary = self.boundary(prompt_length)
        return 0 if self.window is None else max(boundary - self.window, 0)

    def clamped(self, prompt_length: int) -> bool:
        """Whether the policy asks for more of this prompt than there is."""
        too_wide = self.window is not None and self.window > self.boundary(prompt_length)
        return self.tail > prompt_length or too_wide

    @property
    def reference(self) -> str:
        """The reference that the policy claims, in words of the receipt."""
        if self.window is None:
            return "full"
        if self.tail > 1:
            return f"stopped at P-{self.tail + self.window}"
        return f"stopped at B-{self.window}" if self.window else "stopped at B"


def parse_policy(spec: str) -> Policy:
    """Read a policy, for instance `window:64`.

    Raises `InputError`, one line, when the text is no policy.
    """
    fields: dict[str, int] = {}
    if spec == "exact":
        return Policy(spec)
    if spec == "detach":
        return Policy(spec, window=0)
    for part in spec.split("+"):
        match = re.fullmatch(r"(window|tail):([0-9]{1,9})", part)
        if match is None or match[1] in fields:
            raise InputError(f"policy {spec!r} is not known: use {ALLOWED}")
        fields[match[1]] = int(match[2])
    if fields.get("tail", 1) < 1:
        raise InputError(
            f"policy {spec!r}: the live tail needs at least 1 token, use tail:1 or more"
        )
    return Policy(spec, tail=fields.get("tail", 1), window=fields.get("window", 0))
