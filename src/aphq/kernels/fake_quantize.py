"""A learned activation quantizer with random drops: one pass forward, one back. Twin: `quant.affine._FakeQuantize`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import BLOCK, NEVER_SPECIALIZED, drop_arguments, dropped, through_codes
from aphq.quant.drop import Drop


@triton.jit
def _offsets(b, h, inner, size3, stride0, stride1, stride2, stride3, dense: tl.constexpr):
    """Where element `inner` of matrix (b, h) lies."""
    start = b.to(tl.int64) * stride0 + h * stride1
    if dense:
        return start + inner
    return start + (inner // size3) * stride2 + (inner % size3) * stride3


@triton.jit(do_not_specialize=NEVER_SPECIALIZED)
def _forward(
    x_ptr, y_ptr, scale_ptr, zero_ptr, step_ptr, seed, threshold, first, top, heads, matrix, padded, size3,
    stride0, stride1, stride2, stride3,
    dense: tl.constexpr, grouped: tl.constexpr, relu: tl.constexpr, drops: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(padded, block)
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks  # row = (b, h)
    b, h = row // heads, row % heads
    inner = chunk * block + tl.arange(0, block)
    inside = inner < matrix
    x = tl.load(x_ptr + _offsets(b, h, inner, size3, stride0, stride1, stride2, stride3, dense), mask=inside)
    group = h if grouped else 0
    scale, zero = tl.load(scale_ptr + group), tl.load(zero_ptr + group)
    if relu:
        x = tl.maximum(x, 0.0)
    y, _, _, _ = through_codes(x, scale, -zero, top - zero)
    if drops:
        element = row.to(tl.int64) * matrix + inner
        y = tl.where(dropped(element + first, seed, step_ptr, threshold), x, y)
    tl.store(y_ptr + row.to(tl.int64) * padded + inner, tl.where(inside, y, 0.0), mask=inner < padded)


@triton.jit(do_not_specialize=NEVER_SPECIALIZED)
def _backward(
    grad_ptr, x_ptr, grad_x_ptr, partial_ptr, scale_ptr, zero_ptr, step_ptr, seed, threshold, first, top, heads,
    matrix, size3, x_stride0, x_stride1, x_stride2, x_stride3, g_stride0, g_stride1, g_stride2, g_stride3,
    dense: tl.constexpr, grad_dense: tl.constexpr, grouped: tl.constexpr, relu: tl.constexpr, drops: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(matrix, block)
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    b, h = row // heads, row % heads
    inner = chunk * block + tl.arange(0, block)
    inside = inner < matrix
    x = tl.load(
        x_ptr + _offsets(b, h, inner, size3, x_stride0, x_stride1, x_stride2, x_stride3, dense), mask=inside, other=0.0
    )
    grad = tl.load(
        grad_ptr + _offsets(b, h, inner, size3, g_stride0, g_stride1, g_stride2, g_stride3, grad_dense),
        mask=inside, other=0.0,
    )  # fmt: skip
    group = h if grouped else 0
    scale, zero = tl.load(scale_ptr + group), tl.load(zero_ptr + group)
    positive = x > 0
    if relu:
        x = tl.maximum(x, 0.0)
    _, code, v, unclamped = through_codes(x, scale, -zero, top - zero)
    element = row.to(tl.int64) * matrix + inner
    slope = code - tl.where(unclamped, v, 0.0)
    if drops:
        drop = dropped(element + first, seed, step_ptr, threshold)
        slope = tl.where(drop, 0.0, slope)
        unclamped = unclamped | drop
    if relu:
        unclamped = unclamped & positive
    tl.store(grad_x_ptr + element, tl.where(unclamped, grad, 0.0), mask=inside)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(grad * slope, axis=0))


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, top: int, drop: Drop | None, relu: bool = False, extra_rows: int = 0
) -> Tensor:
    """Q(x), or Q(relu(x)), with the elements `drop` says left in float; gradients for x and scale.

    `extra_rows` of zeros are added to each matrix of a four-dimensional x."""
    if x.ndim == 4 and x.stride(-1) != 1 and x.stride(-2) == 1:  # a transposed matrix: keep it one
        assert extra_rows == 0, "rows are added to matrices as they lie"
        return fake_quantize(x.transpose(-1, -2), scale, zero_point, top, drop, relu).transpose(-1, -2)
    result: Tensor = _FakeQuantize.apply(x, scale, zero_point, top, drop, relu, extra_rows)
    return result


def _as_matrices(x: Tensor, grouped: bool) -> tuple[Tensor, int]:
    """(a four-dimensional view, heads): per-tensor data is one long row."""
    if grouped:
        return x, x.shape[1]
    return x.contiguous().view(1, 1, 1, -1), 1


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        top: int,
        drop: Drop | None,
        relu: bool,
        extra_rows: int,
    ) -> Tensor:
        grouped = scale.numel() > 1 or extra_rows > 0
        view, heads = _as_matrices(x, grouped)
        shape = x.shape if extra_rows == 0 else (*x.shape[:2], x.shape[2] + extra_rows, x.shape[3])
        y = torch.empty(shape, dtype=torch.float32, device=x.device)
        matrix, columns = view.shape[2] * view.shape[3], view.shape[3]
        padded = matrix + extra_rows * columns
        grid = (view.shape[0] * heads * triton.cdiv(padded, BLOCK),)
        _forward[grid](
            view, y, scale, zero_point, *drop_arguments(drop, x), float(top), heads, matrix, padded, columns,
            *view.stride(),
            dense=_dense(view), grouped=scale.numel() > 1, relu=relu, drops=drop is not None, block=BLOCK,
        )  # fmt: skip
        ctx.save_for_backward(x, scale, zero_point)
        ctx.rest = (top, drop, relu, grouped)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, zero_point = ctx.saved_tensors
        top, drop, relu, grouped = ctx.rest
        view, heads = _as_matrices(x, grouped)
        grad, _ = _as_matrices(grads[0], grouped)
        grad_x = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        matrix, columns = view.shape[2] * view.shape[3], view.shape[3]
        chunks = triton.cdiv(matrix, BLOCK)
        partial = torch.empty(view.shape[0], heads, chunks, dtype=torch.float32, device=x.device)
        _backward[(view.shape[0] * heads * chunks,)](
            grad, view, grad_x, partial, scale, zero_point, *drop_arguments(drop, x), float(top), heads, matrix,
            columns, *view.stride(), *grad.stride(),
            dense=_dense(view), grad_dense=_dense(grad), grouped=scale.numel() > 1, relu=relu, drops=drop is not None,
            block=BLOCK,
        )  # fmt: skip
        grad_scale = partial.sum((0, 2) if scale.numel() > 1 else (0, 1, 2)).reshape(scale.shape)
        return grad_x, grad_scale, None, None, None, None, None


def _dense(view: Tensor) -> bool:
    """Whether each matrix lies in one piece."""
    return view.stride(3) == 1 and view.stride(2) == view.shape[3]
