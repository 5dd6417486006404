"""Gated linear recurrences (recurrent_gemma): the library keeps their state on the module, not in the cache.

The state stays there from one sequence to the next, and a chunk of several tokens is convolved as if nothing came
before it. Here conv window and recurrent state live in the cache like any other: the convolution runs over the window
and the chunk, and the recurrence, whose library code does take a state, is handed the cache's for one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def mended_forward(module: nn.Module, model: nn.Module) -> Callable[..., Any] | None:
    """The forward of a block that holds a recurrence and its state, continuing from the state in its cache."""
    if not (hasattr(module, "rg_lru") and hasattr(module, "conv1d_state")):
        return None
    return _Continued(module, _layer_of(module, model))


def _layer_of(block: nn.Module, model: nn.Module) -> int:
    """The number of the decoder layer that `block` is part of; the block itself does not know."""
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for number, layer in enumerate(layers):
                if any(part is block for part in layer.children()):
                    return number
    raise AssertionError("a recurrent block stands in a list of layers")


class _Continued:
    def __init__(self, block: Any, layer: int) -> None:
        self._block, self._layer = block, layer

    def __call__(
        self,
        input_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = True,
        cache: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """input_states [b, T, hidden] to the block's output [b, T, hidden]."""
        block = self._block
        gate = block.act_fn(block.linear_y(input_states))
        x = self._convolved(block.linear_x(input_states).transpose(1, 2), cache)
        x = self._recurred(x.transpose(1, 2), position_ids, cache)
        return block.linear_out(x * gate), None

    def _convolved(self, x: Tensor, cache: Any) -> Tensor:
        """x [b, width, T], convolved with what the window before it holds."""
        length = x.shape[-1]
        full = cache.update_conv_state(
            x, self._layer, conv_kernel_size=self._block.conv1d_width - 1
        )
        # The library's convolution pads both ends by all but one of its taps: its first outputs are the causal ones.
        convolved: Tensor = self._block.conv_1d(full)[..., : full.shape[-1]][..., -length:]
        return convolved

    def _recurred(self, x: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        """x [b, T, width] through the recurrence, from the cache's state."""
        recurrence = self._block.rg_lru
        before = recurrence.recurrent_states
        state = cache.layers[self._layer].recurrent_states[0]
        if state is None:
            state = torch.zeros_like(x[:, 0], dtype=torch.float32)
        try:
            recurrence.recurrent_states = state
            result: Tensor = recurrence(x, position_ids)
            cache.update_recurrent_state(recurrence.recurrent_states, self._layer)
        finally:
            recurrence.recurrent_states = before
        return result
