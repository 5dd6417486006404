"""Selective scans (mamba, falcon_mamba, jamba, zamba): the library's scan always starts from a zero state.

Per channel d and state n, with step dt_t, decay rate A (negative) and input x_t:

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t          y_t = C_t . h_t + D x_t

is linear in the state it starts from: a scan from h_0 is the scan from zero, which is the library's, plus

    exp(A (dt_1 + ... + dt_t)) h_0                    and C_t times that.

Both factors are at most one, so the sum loses nothing. One token takes another function in the library, which writes
the new state into the tensor it read the old one from and leaves autograd with a changed operand: here it is the same
scan at length one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lsverify.continuation.stand_ins import argument, calls, forward_with, function

_SCAN, _ONE_TOKEN = "mamba_selective_scan", "mamba_selective_state_update"


def mended_forward(module: nn.Module, _: nn.Module) -> Callable[..., Any] | None:
    """The forward of a mixer that calls the selective scan, continuing from the state in its cache."""
    return _Continued(module) if calls(module, _SCAN) else None


class _Continued:
    def __init__(self, mixer: nn.Module) -> None:
        self._mixer = mixer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = argument(self._mixer, "cache", args, kwargs)
        state = None if cache is None else cache.get_recurrent_state(self._mixer.layer_idx)
        if state is None:
            return forward_with(self._mixer, {})(*args, **kwargs)
        scan = function(self._mixer, _SCAN)
        # A mixer of several heads scans them one after the other; its state is [b, heads, d, n].
        starts = iter(state.unbind(1) if state.dim() == 4 else (state,))
        stand_ins = {_SCAN: _scan_from(starts, scan), _ONE_TOKEN: _one_token(scan)}
        return forward_with(self._mixer, stand_ins)(*args, **kwargs)


def _scan_from(starts: Iterator[Tensor], scan: Callable[..., Any]) -> Callable[..., Any]:
    """The library's scan, each call of it from the next of `starts` [b, d, n].

    x, dt, z [b, d, T]; A [d, n]; B, C [b, n, T]; D, delta_bias [d]. Gives y [b, d, T] and the last state [b, d, n].
    """

    def continued(
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **options: Any,
    ) -> Any:
        # The gate multiplies the whole of y, so it has to wait for the second part.
        y, last = scan(
            x,
            dt,
            A,
            B,
            C,
            D=D,
            delta_bias=delta_bias,
            delta_softplus=delta_softplus,
            return_last_state=True,
            **options,
        )
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = F.softplus(step) if delta_softplus else step
        carried = _carried(next(starts), step.float(), A.float())
        y = y + torch.einsum("bdnt,bnt->bdt", carried, C.to(carried.dtype)).to(y.dtype)
        y = y if z is None else y * F.silu(z)
        last = last + carried[..., -1].to(last.dtype)
        return (y, last) if return_last_state else y

    return continued


def _carried(start: Tensor, step: Tensor, A: Tensor) -> Tensor:
    """What is left of `start` [b, d, n] after each of the steps [b, d, T]: [b, d, n, T]."""
    decay = torch.exp(A[None, :, :, None] * step.cumsum(-1)[:, :, None])
    return decay * start[..., None]


def _one_token(scan: Callable[..., Any]) -> Callable[..., Any]:
    """The scan at length one, with the calling convention of the library's decode step: `state` is overwritten."""

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
        y, last = _scan_from(iter((state.clone(),)), scan)(
            x[..., None],
            dt[..., None],
            A,
            B[..., None],
            C[..., None],
            D=None if D is None else D.float(),
            z=None if z is None else z[..., None],
            delta_bias=dt_bias,
            delta_softplus=dt_softplus,
            return_last_state=True,
        )
        state.copy_(last)
        result: Tensor = y[..., 0].to(x.dtype)
        return result

    return continued
