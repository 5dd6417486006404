"""Rotary tables that change with the total length: a prompt's state then depends on what follows it.

Neither can share a capture once a response crosses the length they were trained for, and both must be refused
(`NotShareable`). They are no families: tests build them with `lsverify.models.tiny`.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import LlamaConfig, Phi3Config, PreTrainedConfig

from lsverify.families.sizes import GROUPED, SHARED

TRAINED_LENGTH = 24


def _dynamic() -> PreTrainedConfig:
    """Frequencies stretched as the length grows beyond `TRAINED_LENGTH`."""
    return LlamaConfig(
        **GROUPED,
        **SHARED | {"max_position_embeddings": TRAINED_LENGTH},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    )


def _longrope() -> PreTrainedConfig:
    """One table up to `TRAINED_LENGTH`, another beyond it."""
    return Phi3Config(
        **{name: value for name, value in GROUPED.items() if name != "head_dim"},
        **SHARED,
        original_max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 6,
            "long_factor": [4.0] * 6,
            "original_max_position_embeddings": TRAINED_LENGTH,
        },
    )


CHANGING: dict[str, Callable[[], PreTrainedConfig]] = {"dynamic": _dynamic, "longrope": _longrope}
