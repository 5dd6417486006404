"""Prompt states that serve several optimizer steps: the policy `stale:n`.

The state of step t's prompt is then that of parameters up to n - 1 steps old, which is what a rollout engine that
refreshes its cache every n steps would hold. Nothing is swept: recomputing at new parameters would not reproduce the
old state, so the gradient at its best is that of two parameter copies, the prompt's held at the captured ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from lsverify.errors import StalePromptState
from lsverify.prompt import PromptState
from lsverify.spans import Spans
from lsverify.tags import Tags, token_hash, weights_version


class StaleStates:
    """Captured states by prompt and boundary, each for `refresh` optimizer steps from its capture on.

    A step is told from the one before by the weights: calls at equal weights are one step. With `refresh` 1 every step
    captures anew.
    """

    def __init__(self, refresh: int) -> None:
        self.refresh = refresh
        self.step = 0
        self._version: str | None = None
        self._states: dict[tuple[str, int], tuple[int, PromptState]] = {}

    def begin(self, model: nn.Module) -> None:
        """Note the weights; drop the states that have served their steps."""
        version = weights_version(model)
        self.step += self._version not in (None, version)
        self._version = version
        self._states = {
            key: (captured, state)
            for key, (captured, state) in self._states.items()
            if self.step - captured < self.refresh
        }

    def of(
        self,
        prompt: Tensor,
        boundary: int,
        capture: Callable[[], PromptState],
        spans: Spans = (),
    ) -> PromptState:
        """The prompt's state, captured now unless one is kept. prompt [P] int64."""
        key = token_hash(prompt, spans), boundary
        if key not in self._states:
            self._states[key] = self.step, capture()
        return self._states[key][1]

    def kept(self, prompt: Tensor, boundary: int, spans: Spans = ()) -> tuple[int, PromptState]:
        """A state that is kept, and the steps that it has served, the present one counted. Raises KeyError where none is."""
        captured, state = self._states[token_hash(prompt, spans), boundary]
        return self.step - captured + 1, state

    def check(self, state: PromptState, tags: Tags) -> None:
        """Raise `StalePromptState` unless the weights are those that the step began with and all else fits `state`.

        A state that was captured in this step must have their tag; an older one alone may have another.
        """
        if tags.weights != self._version:
            raise StalePromptState(
                f"weights were {self._version} when the step began and are {tags.weights}: a step must not change them"
            )
        older = any(kept is state and at < self.step for at, kept in self._states.values())
        state.check_tags(replace(tags, weights=state.tags.weights) if older else tags)
