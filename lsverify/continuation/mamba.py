"""Selective scans (mamba, falcon_mamba, jamba, zamba): the library's scan always starts from a zero state.

Per channel d and state n, with step dt_t, decay rate A (negative) and input x_t:

    h_t = exp(A dt_t) h_{t-1} + dt_t B_t x_t          y_t = C_t . h_t + D x_t

is linear in the state it starts from. With S_t = dt_1 + ... + dt_t, a scan from h_0 is the scan from zero, which is
the library's, plus what is left of h_0; and the last state is a sum that needs no scan:

    y_t = y_t(from zero) + C_t . exp(A S_t) h_0
    h_T = exp(A S_T) h_0 + sum_t exp(A (S_T - S_t)) dt_t B_t x_t

Every factor is at most one, so the sums lose nothing. The last state is taken from here even where the library gives
one: the fast kernel that may stand behind its scan has no backward pass for it, and the sweep begins there.

One token takes another function in the library, which writes the new state into the tensor it read the old one from
and leaves autograd with a changed operand: here it is the same scan at length one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lsverify.continuation.stand_ins import argument, calls, forward_with, function, references

_SCAN, _ONE_TOKEN = "mamba_selective_scan", "mamba_selective_state_update"


def mended_forward(module: nn.Module, _: nn.Module) -> Callable[..., Any] | None:
    """The forward of a mixer that calls the selective scan, continuing from the state in its cache."""
    return _Continued(module) if calls(module, _SCAN) else None


class _Continued:
    def __init__(self, mixer: nn.Module) -> None:
        self._mixer = mixer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = argument(self._mixer, "cache", args, kwargs)
        state = cache.get_recurrent_state(self._mixer.layer_idx)
        scan = function(self._mixer, _SCAN)
        stand_ins = references(self._mixer) | {
            _SCAN: _scan_from(_by_head(state), scan),
            _ONE_TOKEN: _one_token(scan),
        }
        return forward_with(self._mixer, stand_ins)(*args, **kwargs)


def _by_head(state: Tensor | None) -> Iterator[Tensor | None]:
    """The states [b, d, n] that a mixer's scans start from; one of several heads scans them one after the other."""
    if state is None:
        while True:
            yield None
    yield from state.unbind(1) if state.dim() == 4 else (state,)


def _scan_from(starts: Iterator[Tensor | None], scan: Callable[..., Any]) -> Callable[..., Any]:
    """The library's scan, each call of it from the next of `starts` [b, d, n], None for zero.

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
        # The gate multiplies the whole of y, so it has to wait for what is left of the start.
        y = scan(
            x, dt, A, B, C, D=D, delta_bias=delta_bias, delta_softplus=delta_softplus, **options
        )
        step = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
        step = (F.softplus(step) if delta_softplus else step).float()
        elapsed = step.cumsum(-1)
        written = torch.exp(A.float()[:, :, None] * (elapsed[..., -1:] - elapsed)[:, :, None])
        last = torch.einsum("bdnt,bdt,bnt->bdn", written, step * x.float(), B.float())
        start = next(starts)
        if start is not None:
            left = torch.exp(A.float()[:, :, None] * elapsed[:, :, None]) * start[..., None]
            y = y + torch.einsum("bdnt,bnt->bdt", left, C.to(left.dtype)).to(y.dtype)
            last = last + left[..., -1]
        y = y if z is None else y * F.silu(z)
        return (y, last) if return_last_state else y

    return continued


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
