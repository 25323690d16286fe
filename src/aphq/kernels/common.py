"""What the kernels share: rounding, random drops, and the gradient of a quantizer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aphq.quant.drop import Drop

BLOCK = 2048  # elements per program of the elementwise kernels
NEVER_SPECIALIZED = ["seed", "threshold", "first"]  # differ between quantizers, which share the compiled kernel


@triton.jit
def mix_bits(x):
    """A bijection of 32-bit words whose output bits look random (a multiply-xorshift finaliser)."""
    x = (x ^ (x >> 16)) * 0x045D9F3B
    x = (x ^ (x >> 16)) * 0x045D9F3B
    return x ^ (x >> 16)


@triton.jit
def dropped(element, seed, step_ptr, threshold):
    """Whether each element stays in float at this step; the same answer forward and backward.

    The twin is `aphq.quant.drop.hashed_mask`."""
    step = tl.load(step_ptr).to(tl.uint32)
    key = mix_bits(step + mix_bits(seed.to(tl.uint32)))
    bits = mix_bits(mix_bits(element.to(tl.uint32) + key) ^ seed.to(tl.uint32))
    return (bits & 255) >= threshold


@triton.jit
def round_even(x):
    """Nearest integer, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def through_codes(x, scale, low, high):
    """(quantized value, code less zero-point, x / scale, whether it was not clamped)"""
    v = x / scale
    rounded = round_even(tl.minimum(tl.maximum(v, low - 2), high + 2))
    code = tl.minimum(tl.maximum(rounded, low), high)
    return tl.where(v == v, code * scale, v), code, v, code == rounded


def drop_arguments(drop: Drop | None, x: Tensor) -> tuple[Tensor, int, int, int]:
    """(step, seed, threshold, first) for a kernel over the elements of `x`."""
    return (x, 0, 256, 0) if drop is None else (drop.step, drop.seed, drop.threshold, drop.first(x.numel()))
