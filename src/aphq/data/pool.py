"""Work in threads, results in order: decoding is fast on many cores and never depends on how many there are."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """One thread per core, capped: past 16 the threads only queue for Python's lock and for the disk."""
    return min(16, os.cpu_count() or 1)


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int | None = None, ahead: int | None = None
) -> Iterator[Result]:
    """Yield `work(item)` for each item in order, with up to `ahead` further items in flight in `threads` threads.

    Whoever reads the iterator may stop early: what has not started is then cancelled.
    """
    threads = threads or default_threads()
    ahead = ahead or 2 * threads
    pool = ThreadPoolExecutor(threads, thread_name_prefix="aphq-data")
    flight: deque[Future[Result]] = deque()
    try:
        for item in items:
            flight.append(pool.submit(work, item))
            if len(flight) > ahead:
                yield flight.popleft().result()
        while flight:
            yield flight.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
