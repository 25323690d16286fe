"""Uniform affine numbers: x ~ (q - zero_point) * scale with an integer q in [0, 2^bits - 1].

One form serves all: zero-points are integers inside the code range, so 0 is always exact; a symmetric format is the
affine one with its zero-point fixed at 2^(bits-1). Scales broadcast against the tensor: shape [1] is per tensor,
[out, 1] per output channel of a weight, [heads, 1, 1] per head of [batch, heads, tokens, channels].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aphq import kernels
from aphq.kernels import compiled
from aphq.quant.drop import Drop

SMALLEST_SCALE = 1e-8  # a tensor of zeros still needs a scale to divide by


def top_code(bits: int) -> int:
    """The largest code, 2^bits - 1; the smallest is 0."""
    return 2**bits - 1


def affine_from_range(lower: Tensor, upper: Tensor, bits: int, symmetric: bool = False) -> tuple[Tensor, Tensor]:
    """(scale, zero-point) whose codes span [lower, upper], widened to hold 0."""
    lower, upper = lower.clamp_max(0), upper.clamp_min(0)
    if symmetric:
        half = 2 ** (bits - 1)
        scale = (torch.maximum(-lower, upper) / (half - 1)).clamp_min(SMALLEST_SCALE)
        return scale, torch.full_like(scale, half)
    scale = ((upper - lower) / top_code(bits)).clamp_min(SMALLEST_SCALE)
    return scale, (-lower / scale).round().clamp(0, top_code(bits))


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """The nearest codes, as whole floats."""
    return ((x / scale).round() + zero_point).clamp(0, top_code(bits))


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    return (codes - zero_point) * scale


def integers(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """The nearest codes, counted from the zero-point: it is moved into the bounds, which saves two passes."""
    return clamp_((x / scale).round_(), -zero_point, top_code(bits) - zero_point)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int) -> Tensor:
    """What `x` becomes when it passes through `bits`-bit integers: dequantize(quantize(x)), to the bit."""
    return integers(x, scale, zero_point, bits).mul_(scale)


def clamp_inclusive(x: Tensor, low: float, high: float) -> Tensor:
    """Clamped, with a gradient of 1 up to and at the bounds, where torch's own has 1 or 0, depending on its version."""
    return torch.where((x >= low) & (x <= high), x, x.detach().clamp(low, high))


def clamp_(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """In place; two passes, because torch's own clamp with tensors for bounds is several times slower on a CPU."""
    return x.clamp_min_(low).clamp_max_(high)


def fake_quantize_learned(
    x: Tensor, scale: Tensor, zero_point: Tensor, bits: int, drop: Drop | None = None, relu: bool = False
) -> Tensor:
    """`fake_quantize` of x, or of relu(x), with gradients for `x` and `scale`; QDrop leaves some elements in float."""
    per_head = x.ndim == 4 and scale.shape == (x.shape[1], 1, 1)
    if kernels.usable(x) and (scale.numel() == 1 or per_head):
        from aphq.kernels.fake_quantize import fake_quantize as fused

        return fused(x, scale, zero_point, top_code(bits), drop, relu)
    if kernels.usable(x) and by_rows(scale, x) and drop is None and not relu:  # each output channel is a "head"
        rows = fake_quantize_learned(x.reshape(1, len(x), 1, -1), scale.view(-1, 1, 1), zero_point.view(-1, 1, 1), bits)
        return rows.view(x.shape)
    if compiled.usable(x):
        return compiled.fake_quantize(x, scale, zero_point, top_code(bits), drop, relu)
    if relu:
        x = x.relu()
    result: Tensor = _FakeQuantize.apply(x, scale, zero_point, top_code(bits), None if drop is None else drop.kept(x))
    return result


def by_rows(scale: Tensor, weight: Tensor) -> bool:
    """Whether every row of a weight has a scale. The output channels of a transposed convolution are its columns, as
    many as rows or not."""
    return scale.ndim == weight.ndim and scale.numel() == scale.shape[0] == len(weight)


class _FakeQuantize(torch.autograd.Function):
    """Straight-through rounding with its gradients in closed form: one pass forward and one back.

    With v = x / scale and c = clamp(round(v), -zp, top - zp), y = c * scale has dy/dx = [c not clamped] and
    dy/dscale = c - v * [c not clamped].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, top: int, keep: Tensor | None) -> Tensor:
        low, high = -zero_point, top - zero_point
        ctx.save_for_backward(x, scale, low, high, keep)
        out = clamp_((x / scale).round_(), low, high).mul_(scale)
        return out if keep is None else torch.where(keep, out, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, scale, low, high, keep = ctx.saved_tensors
        grad = grads[0]
        v = x / scale
        rounded = v.round()
        code = clamp_(rounded.clone(), low, high)
        inside = code == rounded
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = grad * (inside if keep is None else inside.logical_or(keep.logical_not()))
        if ctx.needs_input_grad[1]:
            slope = code.sub_(v.mul_(inside)).mul_(grad)
            grad_scale = (slope if keep is None else slope.mul_(keep)).sum_to_size(scale.shape)
        return grad_x, grad_scale, None, None, None
