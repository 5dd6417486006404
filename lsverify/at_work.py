"""Many independent judgements, in order, here or in several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

R = TypeVar("R")
# Neighbours share references, so a process gets a stretch of them.
LONGEST_STRETCH = 64


@contextmanager
def at_work(
    judge: Callable[..., R], workers: int
) -> Iterator[Callable[[Sequence[tuple[Any, ...]]], Iterable[R]]]:
    """Inside, maps argument tuples to results, in their order; `judge` is a function on module level."""
    if workers == 1:
        yield lambda given: [judge(*arguments) for arguments in given]
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:

        def spread(given: Sequence[tuple[Any, ...]]) -> Iterable[R]:
            stretch = max(1, min(LONGEST_STRETCH, -(-len(given) // workers)))
            return pool.map(judge, *zip(*given, strict=True), chunksize=stretch)

        yield spread
