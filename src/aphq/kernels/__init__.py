"""Fused GPU kernels (Triton) for the steps of the optimisation loop, each with its gradient in closed form.

Every function here has a plain torch twin, in the module that calls it, which says what it means; `usable` decides.
The twins run on the CPU and wherever Triton does not work, and the tests hold each kernel against its twin. On a CPU
the widest of them have a compiled form of their own, in `compiled`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable

import torch
from torch import Tensor

log = logging.getLogger(__name__)
switched_on = os.environ.get("APHQ_KERNELS", "1") != "0"
interpreted = False  # on the CPU too, slowly, by Triton's own interpreter (TRITON_INTERPRET=1): for tests


def usable(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return x.dtype == torch.float32 and wanted_on(x.device) and _triton_works(x.device)


def wanted_on(device: torch.device) -> bool:
    """Whether a device is one for kernels, if they work there."""
    return switched_on and (device.type == "cuda" or interpreted)


@functools.cache
def _triton_works(device: torch.device) -> bool:
    """Whether a kernel can be compiled and launched: Triton needs a C compiler, and a GPU that it knows."""

    def launch() -> None:
        from aphq.kernels.relu import relu_and_clamped

        relu_and_clamped(torch.zeros(1, device=device), 1.0)

    return passes(launch, "Triton")


def passes(check: Callable[[], None], which: str) -> bool:
    """Whether a trial of some kernels succeeds; if not, the log says why."""
    try:
        check()
    except Exception as problem:
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        log.warning("%s kernels do not work here (%s); running without them, with the same result", which, reason)
        return False
    return True
