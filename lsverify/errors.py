"""The errors that a user can cause, each one clear line; the command line turns them into exit code 2."""

from __future__ import annotations


class InputError(ValueError):
    """A value that the user gave cannot be used: the message names it, what is allowed and what to do."""


class StalePromptState(InputError):
    """A captured prompt state no longer fits the weights, adapter, tokens or boundary it is used with."""


class NotShareable(InputError):
    """The prompt's state depends on more than the prompt, so responses cannot share one capture."""


class PrecisionRefused(InputError):
    """The library's own code does not run in the precision that was asked for."""


class TrainingBroke(InputError):
    """A policy's logits or gradient are not finite any more, so its training ends here; rows before stand."""
