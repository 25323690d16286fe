"""How much memory a stretch of work took at most, on the GPU and on the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
