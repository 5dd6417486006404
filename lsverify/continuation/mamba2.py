"""Mamba-2 mixers (mamba2, bamba, falcon_h1, zamba2, nemotron_h, granitemoehybrid): one token at a time.

Several tokens continue rightly: the library's chunked scan takes a state to start from. One token takes another
function, which differs in two ways: it writes the new state into the tensor it read the old one from, so autograd
finds a changed operand, and it does not limit the step dt to `time_step_limit` as the chunked scan does, so where a
step lies outside, decoding is another function than the full pass. Here one token is a chunk of length one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lsverify.continuation.stand_ins import calls, forward_with, function, references

_SCAN, _ONE_TOKEN = "mamba2_chunk_scan", "mamba2_selective_state_update"


def mended_forward(module: nn.Module, _: nn.Module) -> Callable[..., Any] | None:
    """The forward of a mixer that calls the chunked scan, with one token scanned as a chunk."""
    if not calls(module, _ONE_TOKEN):
        return None
    limit = getattr(module, "time_step_limit", (0.0, math.inf))
    one_token = _one_token(function(module, _SCAN), tuple(limit))
    return forward_with(module, references(module) | {_ONE_TOKEN: one_token})


def _one_token(scan: Callable[..., Any], dt_limit: tuple[float, float]) -> Callable[..., Any]:
    """The chunked scan at length one, with the calling convention of the library's decode step.

    state [b, h, p, n] is overwritten; x, z [b, h, p]; B, C [b, g, n]. The step's values come repeated over p, decay
    rates over p and n: dt [b, h, p], A [h, p, n], D and dt_bias [h, p]. Gives y [b, h, p].
    """

    def continued(
        state: Tensor,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **_: Any,
    ) -> Tensor:
        y, last = scan(
            x[:, None],
            dt[:, None, :, 0],
            A[:, 0, 0],
            B[:, None],
            C[:, None],
            chunk_size=1,
            D=None if D is None else D[:, 0],
            z=None,
            dt_bias=None if dt_bias is None else dt_bias[:, 0],
            initial_states=state.clone(),
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            return_final_states=True,
        )
        state.copy_(last)
        y = y[:, 0] if z is None else y[:, 0] * F.silu(z)
        result: Tensor = y.to(x.dtype)
        return result

    return continued
