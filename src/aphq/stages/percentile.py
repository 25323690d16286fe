"""The exact percentile of a stream of positive numbers, in two passes and constant memory.

The bits of positive floats, read as integers, sort like the floats. So a histogram of the upper 16 bits finds the
bucket the percentile falls in, and a second one of the lower 16 bits inside that bucket finds the number itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

HALF = 16
BUCKETS = 1 << HALF


def positive_percentile(stream: Callable[[], Iterable[Tensor]], share: float) -> float:
    """The smallest positive value with at least `share` of all positive values at or below it; 0 if there is none.

    `stream()` gives the same float32 tensors each time it is called; it is called twice.
    """
    upper = _histogram(stream, lambda bits: bits >> HALF)
    count = int(upper.sum())
    if count == 0:
        return 0.0
    rank = max(1, math.ceil(share * count))
    bucket, before = _locate(upper, rank)
    lower = _histogram(stream, lambda bits: bits[(bits >> HALF) == bucket] & (BUCKETS - 1))
    remainder, _ = _locate(lower, rank - before)
    return torch.tensor((bucket << HALF) | remainder, dtype=torch.int32).view(torch.float32).item()


def _histogram(stream: Callable[[], Iterable[Tensor]], key: Callable[[Tensor], Tensor]) -> Tensor:
    counts = torch.zeros(BUCKETS, dtype=torch.long)
    for values in stream():
        flat = values.reshape(-1)
        bits = flat[flat > 0].view(torch.int32)
        counts += torch.bincount(key(bits), minlength=BUCKETS).cpu()
    return counts


def _locate(counts: Tensor, rank: int) -> tuple[int, int]:
    """The bucket that holds the `rank`-th value (from 1), and how many values come before that bucket."""
    totals = counts.cumsum(0)
    bucket = int(torch.searchsorted(totals, rank))
    return bucket, int(totals[bucket] - counts[bucket])
