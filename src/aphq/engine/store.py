"""The store: cached activations on the GPU, in host memory or on disk, whichever still has room.

Activations are rows, one per calibration image; a stage asks for rows by index and gets them on its device.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aphq.engine.ranks import Ranks
from aphq.errors import RunError

log = logging.getLogger(__name__)
WHERE = {"host": "in host memory", "disk": "on disk"}
CACHED_SHARE = 0.6  # of the free GPU memory; the rest is for the step that learns


class Rows(Protocol):
    """Anything with one row per image: cached activations, or the images themselves."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | Tensor) -> Any: ...  # the rows, on the compute device: a tensor or a state


class Activations:
    """Rows in one tier of the store; the memory is given back when the object goes."""

    def __init__(self, data: Tensor, device: torch.device, tier: str, release: Callable[[], None]) -> None:
        self.data, self.device, self.tier = data, device, tier
        self._release = release

    def __len__(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        if isinstance(index, Tensor):
            return self.data.index_select(0, index.to(self.data.device)).to(self.device)
        return self.data[index].to(self.device)

    def __del__(self) -> None:
        self._release()


class Store:
    """Hands out space tier by tier, the fastest first; `peak` says how much of each was used."""

    def __init__(
        self, device: torch.device, *, gpu_bytes: int | None, host_bytes: int | None, folder: Path | None
    ) -> None:
        self.device, self.folder = device, folder
        self.free = {"host": free_host_bytes() // 2 if host_bytes is None else host_bytes}
        if device.type == "cuda":
            gpu = int(torch.cuda.mem_get_info(device)[0] * CACHED_SHARE) if gpu_bytes is None else gpu_bytes
            self.free = {"gpu": gpu, **self.free}
        self.peak = dict.fromkeys((*self.free, "disk"), 0)
        self.used = dict.fromkeys(self.peak, 0)
        self._told: set[str] = set()

    def allocate(self, shape: tuple[int, ...]) -> Activations:
        size = torch.Size(shape).numel() * 4
        tier = next((tier for tier, free in self.free.items() if self.used[tier] + size <= free), "disk")
        if tier != next(iter(self.free)) and tier not in self._told:
            self._told.add(tier)
            gib = next(iter(self.free.values())) / 2**30
            log.info("cached activations outgrow their %.1f GiB: some are kept %s, which is slower", gib, WHERE[tier])
        device = self.device if tier == "gpu" else torch.device("cpu")
        try:
            data = self._on_disk(shape, size) if tier == "disk" else torch.empty(shape, device=device)
        except torch.cuda.OutOfMemoryError:  # another process took what was free when this one began
            self.free[tier] = self.used[tier]
            return self.allocate(shape)
        self.used[tier] += size
        self.peak[tier] = max(self.peak[tier], self.used[tier])

        def release() -> None:
            self.used[tier] -= size

        return Activations(data, self.device, tier, release)

    def room(self, tier: str) -> int:
        """Bytes that still fit into a tier."""
        return self.free[tier] - self.used[tier] if tier in self.free else 0

    def _on_disk(self, shape: tuple[int, ...], size: int) -> Tensor:
        """A file without a name, mapped into memory; its space is reserved now, because a full disk kills later."""
        if not os.path.isdir("/proc/self/fd"):
            raise RunError("spilling activations to disk needs Linux; raise the memory budget")
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix=".activations") as handle:
                os.posix_fallocate(handle.fileno(), 0, size)
                path = f"/proc/self/fd/{handle.fileno()}"
                return torch.from_file(path, shared=True, size=size // 4, dtype=torch.float32).reshape(shape)
        except OSError as problem:
            where = self.folder or tempfile.gettempdir()
            raise RunError(
                f"cannot cache {size / 1e9:.1f} GB of activations in {where}: {problem}; "
                "free some space, raise the memory budget, or use fewer calibration images"
            ) from None


@torch.no_grad()
def push(
    step: Callable[[Tensor], Tensor],
    source: Rows,
    store: Store,
    batch: int,
    ranks: Ranks | None = None,
    name: str = "",
) -> Activations:
    """`step` applied to every row, batch by batch, into the store; several processes do it together."""
    ranks = ranks or Ranks()
    target: Activations | None = None
    finite: Tensor | None = None  # stays on the device until the end: reading it would wait for every batch
    for number, start in enumerate(range(0, len(source), batch)):
        if number > 0 and not ranks.owns(number):
            continue  # everyone does the first, which tells the shape
        out = step(source[slice(start, start + batch)])
        if target is None:
            target = store.allocate((len(source), *out.shape[1:]))
        target.data[start : start + len(out)].copy_(out)
        finite = torch.isfinite(out).all() if finite is None else finite & torch.isfinite(out).all()
    assert target is not None, "a calibration set is never empty"
    if finite is not None and not finite:
        where = f" in {name}" if name else ""
        raise RunError(f"NaN or infinite activations{where}: look for images or weights with extreme values")
    if ranks.count > 1:
        for number, start in enumerate(range(0, len(source), batch)):
            part = target.data[start : start + batch]
            part.copy_(ranks.spread(part, number % ranks.count))
    return target


def free_host_bytes() -> int:
    """Memory a program may still take, by the system's own estimate."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30
