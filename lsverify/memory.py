"""Memory and time of a step, measured from outside.

Two measures of memory. `LiveBytes` counts the storages of tensors that are alive, exact to the byte and the same on
every run; it does not see a kernel's workspace nor the allocator's slack. `resident_peak` asks the kernel for the
most that the process held, which does see these, and the noise with them.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lsverify.errors import InputError

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class LiveBytes(TorchDispatchMode):
    """Counts, while the context is open, the bytes of every tensor storage that an operation made and that is alive.

    `peak`: the most at any operation's end, forward or backward; `now`: at this moment; `left`: at the end of the
    context. Storages from before the context count nothing, views count nothing, tensors saved for backward count.
    The garbage collector is paused inside, so that the count does not depend on when it would have run: a tensor
    that only a reference cycle holds is alive.

    explain_at: a peak known from an earlier run; when the count gets there for the first time, `composition` is
    filled with bytes by "operation [shape] dtype", largest first.
    """

    def __init__(self, *, explain_at: int | None = None) -> None:
        super().__init__()
        self.now = self.peak = self.left = 0
        self.composition: dict[str, int] = {}
        self._explain_at = explain_at
        self._alive: dict[int, tuple[weakref.ref[Any], int, str]] = {}
        self._collector_was_on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Torch compiles nothing under other modes, and never again compiles what was called there once."""
        return True

    def __enter__(self) -> LiveBytes:
        self._collector_was_on = gc.isenabled()
        gc.collect()
        gc.disable()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.left = self.now
        self._alive.clear()
        if self._collector_was_on:
            gc.enable()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # torch.tensor() makes its storage out of sight and hands it to lift_fresh.
        makes_its_input = func is torch.ops.aten.lift_fresh.default
        known = set() if makes_its_input else {s._cdata for s in _storages((args, kwargs))}
        output = func(*args, **kwargs)
        for storage in _storages(output):
            if storage._cdata in self._alive:
                self._resize(storage)
            elif storage._cdata not in known:
                self._add(storage, func, output)
        if self.now > self.peak:
            self.peak = self.now
            if self.now == self._explain_at:
                self._compose()
        return output

    def _add(self, storage: torch.UntypedStorage, func: Any, output: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        what = f"{func} {_shapes(output)}" if self._explain_at is not None else ""
        self._alive[key] = (weakref.ref(storage, partial(self._release, key)), size, what)
        self.now += size

    def _resize(self, storage: torch.UntypedStorage) -> None:
        reference, size, what = self._alive[storage._cdata]
        self._alive[storage._cdata] = (reference, storage.nbytes(), what)
        self.now += storage.nbytes() - size

    def _release(self, key: int, reference: weakref.ref[Any]) -> None:
        if key in self._alive:
            self.now -= self._alive.pop(key)[1]

    def _compose(self) -> None:
        sizes: Counter[str] = Counter()
        for _, size, what in self._alive.values():
            sizes[what] += size
        self.composition = dict(sizes.most_common())


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    if isinstance(value, Tensor):
        if value.layout is torch.strided and value.device.type != "meta":
            yield value.untyped_storage()
    elif isinstance(value, torch.UntypedStorage):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, dict):
        yield from _storages(tuple(value.values()))


def _shapes(output: Any) -> str:
    tensor = (
        output if isinstance(output, Tensor) else next(v for v in output if isinstance(v, Tensor))
    )
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


@dataclass(kw_only=True)
class Resident:
    """Resident bytes of this process: when a stretch began and at its peak. None: this system cannot tell."""

    baseline: int | None = None
    peak: int | None = None

    @property
    def growth(self) -> int | None:
        """Peak over baseline, in bytes."""
        if self.baseline is None or self.peak is None:
            return None
        return self.peak - self.baseline


class HighWaterMark:
    """The kernel's high-water mark, set back at construction."""

    def __init__(self) -> None:
        gc.collect()
        _return_free_memory()
        self._possible = _reset_high_water_mark()
        self._baseline = _status_bytes("VmRSS") if self._possible else None

    def read(self) -> Resident:
        if not self._possible:
            return Resident()
        return Resident(baseline=self._baseline, peak=_status_bytes("VmHWM"))


@contextmanager
def resident_peak() -> Iterator[Resident]:
    """Measures the stretch inside: the kernel's high-water mark is set back at its start and read at its end.

    Linux only (VmHWM, and 5 written to clear_refs); elsewhere, or where this is forbidden, the result stays None.
    Not to be nested: an inner stretch sets back the mark of the outer one.
    """
    measured, mark = Resident(), HighWaterMark()
    try:
        yield measured
    finally:
        found = mark.read()
        measured.baseline, measured.peak = found.baseline, found.peak


def _reset_high_water_mark() -> bool:
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field_name: str) -> int:
    line = next(
        line for line in STATUS.read_text().splitlines() if line.startswith(f"{field_name}:")
    )
    return int(line.split()[1]) * 1024


def _return_free_memory() -> None:
    """Ask the C library for what it holds in reserve, which would count as baseline and hide growth."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class Phases:
    """Seconds and resident peak of each named phase of a step; an accelerator is synchronised at every border.

    A phase lasts from `begin` to the next `begin` or `end`. Entered again, it adds its seconds and keeps the larger
    peak. `with phases("capture"):` is begin and end in one.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.resident: dict[str, Resident] = {}
        self._name: str | None = None

    def begin(self, name: str) -> None:
        """End the phase that is open, unless it has this name, and open this one."""
        if name == self._name:
            return
        self.end()
        self._name, self._mark = name, HighWaterMark()
        self._start = _synchronised_clock()

    def end(self) -> None:
        """End the phase that is open, if any."""
        if self._name is None:
            return
        name, self._name = self._name, None
        self.seconds[name] = self.seconds.get(name, 0.0) + _synchronised_clock() - self._start
        found = self._mark.read()
        self.resident[name] = max(
            found, self.resident.get(name, found), key=lambda resident: resident.peak or 0
        )

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Raises InputError inside another phase, whose time and peak it would cut in two."""
        if self._name is not None:
            raise InputError(f"phase {name!r} begins inside {self._name!r}: end that phase first")
        self.begin(name)
        try:
            yield
        finally:
            self.end()


def _synchronised_clock() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter()
