"""Fused GPU kernels (Triton) for the steps of the optimisation loop, each with its gradient in closed form.

Every function here has a plain torch twin, in the module that calls it, which says what it means; `usable` decides.
The twins run on the CPU and wherever Triton is missing, and the tests hold each kernel against its twin.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

switched_on = os.environ.get("APHQ_KERNELS", "1") != "0"
interpreted = False  # on the CPU too, slowly, by Triton's own interpreter (TRITON_INTERPRET=1): for tests


def usable(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return switched_on and x.dtype == torch.float32 and (x.is_cuda or interpreted) and _triton_works()


@functools.cache
def _triton_works() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
