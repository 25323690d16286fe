"""Randomness by name: every draw depends on the recipe's seed and what it is for, never on what ran before.

So a run that is stopped and started again draws the same numbers, and stages can be left out without moving others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_for(seed: int, *purpose: str) -> int:
    digest = hashlib.sha256("\0".join((str(seed), *purpose)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # torch takes 63 bits


@contextmanager
def seeded(seed: int, *purpose: str, device: torch.device) -> Iterator[None]:
    """The default generators, seeded for `purpose` inside the block and as before after it."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(seed, *purpose))
        yield


def generator_for(seed: int, *purpose: str) -> torch.Generator:
    """A CPU generator of its own."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))
