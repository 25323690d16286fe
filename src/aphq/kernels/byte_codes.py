"""The codes of a tensor as signed bytes.

A code less its zero-point may not fit in a byte; the byte holds it less a `shift`, and the sums of products make up for
that: sum (a + s)(b + t) = sum a b + t sum a + s sum b + n s t.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import BLOCK, round_even


@triton.jit
def as_bytes(v, low, high, shift):
    """round(v) between low and high, less shift; int8"""
    return (round_even(tl.minimum(tl.maximum(v, low), high)) - shift).to(tl.int8)


@triton.jit
def _codes(x_ptr, code_ptr, scale, low, high, shift, size, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < size
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(code_ptr + i, as_bytes(x / scale, low, high, shift), mask=inside)


def codes(x: Tensor, scale: float, low: int, high: int, shift: int) -> Tensor:
    """round(x / scale) between low and high, less shift: int8, of the shape of x"""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    numbers = (scale, float(low), float(high), float(shift), x.numel())
    if x.numel():
        _codes[(triton.cdiv(x.numel(), BLOCK),)](x, out, *numbers, block=BLOCK)
    return out
