"""Attention probabilities through a quantizer: scale, bias, softmax, codes and drops in one pass, and one back.

Twin: `models.attention.probabilities` and a quantizer; or, where the quantizer's scale is `relative` to the largest
probability of a row, `models.attention.exponentials`, a quantizer and a division by their sum. That largest is one over
the sum, so exponentials with one scale are probabilities whose scale is divided by the sum of their row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import NEVER_SPECIALIZED, drop_arguments, dropped, through_codes
from aphq.quant.drop import Drop

ONE_WARP = 256


@triton.jit
def _softmax_row(
    scores_ptr, bias_ptr, matrix, row, column, inside, padded_columns, padded_rows, columns, rows, heads, periods,
    factor, biased: tl.constexpr,
):  # fmt: skip
    at = (matrix.to(tl.int64) * padded_rows + row) * padded_columns + column
    scores = tl.load(scores_ptr + at, mask=inside, other=-float("inf")) * factor
    if biased:  # [periods, heads, rows, columns], the same for every `periods`-th member of the batch
        member = (matrix // heads) % periods
        at = ((member * heads + matrix % heads).to(tl.int64) * rows + row) * columns + column
        scores += tl.load(bias_ptr + at, mask=inside & (row + column * 0 < rows), other=0.0)
    raised = tl.exp(scores - tl.max(scores, axis=0))
    total = tl.sum(raised, axis=0)
    return raised / total, total


@triton.jit(do_not_specialize=NEVER_SPECIALIZED)
def _forward(
    scores_ptr, bias_ptr, y_ptr, scale_ptr, zero_ptr, step_ptr, seed, threshold, first, top,
    padded_columns, padded_rows, columns, rows, heads, periods, factor,
    biased: tl.constexpr, grouped: tl.constexpr, drops: tl.constexpr, relative: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    matrix, row = tl.program_id(0) // padded_rows, tl.program_id(0) % padded_rows
    column = tl.arange(0, block)
    inside = column < columns
    p, total = _softmax_row(
        scores_ptr, bias_ptr, matrix, row, column, inside, padded_columns, padded_rows, columns, rows, heads, periods,
        factor, biased,
    )  # fmt: skip
    group = matrix % heads if grouped else 0
    scale, zero = tl.load(scale_ptr + group), tl.load(zero_ptr + group)
    if relative:
        scale = scale / total
    y, _, _, _ = through_codes(p, scale, -zero, top - zero)
    if drops:
        element = (matrix.to(tl.int64) * rows + row) * columns + column
        y = tl.where(dropped(element + first, seed, step_ptr, threshold), p, y)
    at = (matrix.to(tl.int64) * padded_rows + row) * padded_columns + column
    tl.store(y_ptr + at, tl.where(inside & (row + column * 0 < rows), y, 0.0), mask=column < padded_columns)


@triton.jit(do_not_specialize=NEVER_SPECIALIZED)
def _backward(
    grad_ptr, scores_ptr, bias_ptr, grad_scores_ptr, partial_ptr, scale_ptr, zero_ptr, step_ptr, seed, threshold, first,
    top, padded_columns, padded_rows, columns, rows, heads, periods, factor,
    biased: tl.constexpr, grouped: tl.constexpr, drops: tl.constexpr, relative: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    matrix, row = tl.program_id(0) // padded_rows, tl.program_id(0) % padded_rows
    column = tl.arange(0, block)
    inside = column < columns
    p, total = _softmax_row(
        scores_ptr, bias_ptr, matrix, row, column, inside, padded_columns, padded_rows, columns, rows, heads, periods,
        factor, biased,
    )  # fmt: skip
    group = matrix % heads if grouped else 0
    scale, zero = tl.load(scale_ptr + group), tl.load(zero_ptr + group)
    if relative:
        scale = scale / total
    y, code, v, unclamped = through_codes(p, scale, -zero, top - zero)
    slope = code - tl.where(unclamped, v, 0.0)
    if relative:
        slope = slope / total
    if drops:
        element = (matrix.to(tl.int64) * rows + row) * columns + column
        drop = dropped(element + first, seed, step_ptr, threshold)
        slope = tl.where(drop, 0.0, slope)
        unclamped = unclamped | drop
        y = tl.where(drop, p, y)
    at = (matrix.to(tl.int64) * padded_rows + row) * padded_columns + column
    grad = tl.load(grad_ptr + at, mask=inside & (row + column * 0 < rows), other=0.0)
    tl.store(partial_ptr + tl.program_id(0), tl.sum(grad * slope, axis=0))
    passed = tl.where(unclamped, grad, 0.0)
    # the sum divides what the quantizer is given, or, if the scale is relative, what it gave
    common = tl.sum(grad * y, axis=0) if relative else tl.sum(passed * p, axis=0)
    grad = p * (passed - common) * factor
    tl.store(grad_scores_ptr + at, tl.where(inside, grad, 0.0), mask=column < padded_columns)


def quantized_softmax(
    scores: Tensor,
    factor: float,
    bias: Tensor | None,
    scale: Tensor,
    zero_point: Tensor,
    top: int,
    drop: Drop | None,
    size: tuple[int, int] | None = None,
    relative: bool = False,
) -> Tensor:
    """Q(softmax(factor * scores + bias)) over the last dimension of [batch, heads, rows, columns]; the bias is
    [periods, heads, rows, columns], repeated over the batch. Gradients for the scores and the quantizer's scale, which
    may be `relative` to the largest of each row.

    `size` is the (rows, columns) that count; the result is zero outside them."""
    size = size or (scores.shape[2], scores.shape[3])
    given = (scores.contiguous(), factor, bias, scale, zero_point, top, drop, size, relative)
    result: Tensor = _QuantizedSoftmax.apply(*given)
    return result


class _QuantizedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        factor: float,
        bias: Tensor | None,
        scale: Tensor,
        zero_point: Tensor,
        top: int,
        drop: Drop | None,
        size: tuple[int, int],
        relative: bool,
    ) -> Tensor:
        batch, heads, padded_rows, padded_columns = scores.shape
        rows, columns = size
        y = torch.empty_like(scores)
        bias = scores if bias is None else bias.contiguous()
        step, seed, threshold, first = drop_arguments(drop, scores[:, :, :rows, :columns])
        numbers = (
            *(seed, threshold, first, float(top)),
            *(padded_columns, padded_rows, columns, rows, heads, bias.shape[0], factor),
        )
        options: dict[str, Any] = {
            "biased": bias is not scores,
            "grouped": scale.numel() > 1,
            "drops": drop is not None,
            "relative": relative,
            "block": triton.next_power_of_2(padded_columns),
            "num_warps": 1 if padded_columns <= ONE_WARP else 4,  # a row in one warp needs no shared memory
        }
        _forward[(batch * heads * padded_rows,)](scores, bias, y, scale, zero_point, step, *numbers, **options)
        ctx.save_for_backward(scores, bias, scale, zero_point, step)
        ctx.rest = (numbers, options)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scores, bias, scale, zero_point, step = ctx.saved_tensors
        numbers, options = ctx.rest
        batch, heads, rows, _ = scores.shape
        grad_scores = torch.empty_like(scores)
        partial = torch.empty(batch, heads, rows, dtype=torch.float32, device=scores.device)
        _backward[(batch * heads * rows,)](
            grads[0].contiguous(), scores, bias, grad_scores, partial, scale, zero_point, step, *numbers, **options
        )
        grad_scale = partial.sum((0, 2) if options["grouped"] else (0, 1, 2)).reshape(scale.shape)
        return grad_scores, None, None, grad_scale, None, None, None, None, None
