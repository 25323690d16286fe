"""How much memory a stretch of work took at most, on the GPU and on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
BESIDE_A_GPU = 2**30  # batches on their way to and from the GPU


def cache_bytes(budget: int, device: torch.device) -> int:
    """What cached activations may take of a host budget for the whole process.

    Models, images and libraries are there already. Where the host also computes, two thirds of the rest are for that:
    the backward pass of a batch through a block of Swin-B takes 3 GiB. Mapped files do not count: the system takes
    back their pages when it needs them."""
    left = max(0, budget - private_bytes())
    return left // 3 if device.type == "cpu" else max(0, left - BESIDE_A_GPU)


def private_bytes() -> int:
    """Memory of this process that no file stands behind; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(text for text in STATUS.read_text().splitlines() if text.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024
    return 0


class PeakMemory:
    """Counts from its creation on; on the host where Linux lets a process reset its own high-water mark, else from the
    start of the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with contextlib.suppress(OSError):
            CLEAR.write_text("5")

    def read(self) -> dict[str, int]:
        """Bytes: "gpu" (on a GPU) and "host" (where the system tells)."""
        found = {}
        if self.device.type == "cuda":
            found["gpu"] = torch.cuda.max_memory_allocated(self.device)
        with contextlib.suppress(OSError, ValueError, StopIteration):
            line = next(text for text in STATUS.read_text().splitlines() if text.startswith("VmHWM:"))
            found["host"] = int(line.split()[1]) * 1024
        return found
