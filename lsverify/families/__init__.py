"""Tiny configs of real architectures, one file per kind of layer, and the registry of them all.

Every kind of layer that an architecture has is present; windows and selections are shorter than prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from transformers import PreTrainedConfig

_FILES = ("dense", "sliding", "experts", "latent", "delta_net", "state_space")

TINY: dict[str, Callable[[], PreTrainedConfig]] = {}
for _file in _FILES:
    if find_spec(f"{__name__}.{_file}") is not None:
        TINY |= import_module(f"{__name__}.{_file}").FAMILIES
