"""The two ends of a step: the mixed input of a batch, and the weighted error of its output, read from the cache once.

Twins: the plain branches of `mixed_rows` and `weighted_error` in `stages.batches`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import BLOCK, NEVER_SPECIALIZED, drop_arguments, dropped
from aphq.quant.drop import Drop


@triton.jit(do_not_specialize=NEVER_SPECIALIZED)
def _mix(teacher_ptr, student_ptr, index_ptr, out_ptr, step_ptr, seed, threshold, first, width, block: tl.constexpr):
    chunks = tl.cdiv(width, block)
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    column = chunk * block + tl.arange(0, block)
    inside = column < width
    source = tl.load(index_ptr + row).to(tl.int64) * width + column
    element = row.to(tl.int64) * width + column
    from_teacher = dropped(element + first, seed, step_ptr, threshold)
    x = tl.load(teacher_ptr + source, mask=inside & from_teacher, other=0.0)
    x += tl.load(student_ptr + source, mask=inside & (from_teacher == 0), other=0.0)
    tl.store(out_ptr + element, x, mask=inside)


def mixed_rows(teacher: Tensor, student: Tensor, index: Tensor, drop: Drop) -> Tensor:
    """Rows `index`, each element the student's with the probability of `drop`, the teacher's otherwise."""
    out = torch.empty(len(index), *teacher.shape[1:], dtype=torch.float32, device=teacher.device)
    width = teacher[0].numel()
    grid = (len(index) * triton.cdiv(width, BLOCK),)
    _mix[grid](teacher, student, index, out, *drop_arguments(drop, out), width, block=BLOCK)
    return out


@triton.jit
def _error(
    out_ptr, target_ptr, index_ptr, weight_ptr, sum_ptr, grad_ptr, upstream_ptr, factor_ptr, width,
    weights: tl.constexpr, backward: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    chunks = tl.cdiv(width, block)
    row, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    column = chunk * block + tl.arange(0, block)
    inside = column < width
    element = row.to(tl.int64) * width + column
    source = tl.load(index_ptr + row).to(tl.int64) * width + column
    error = tl.load(out_ptr + element, mask=inside, other=0.0) - tl.load(target_ptr + source, mask=inside, other=0.0)
    weighted = error * tl.load(factor_ptr + row)
    if weights == "shared":
        weighted = weighted * tl.load(weight_ptr + column, mask=inside, other=0.0)
    elif weights == "each":
        weighted = weighted * tl.load(weight_ptr + source, mask=inside, other=0.0)
    if backward:
        tl.store(grad_ptr + element, weighted * (2 * tl.load(upstream_ptr)), mask=inside)
    else:
        tl.store(sum_ptr + tl.program_id(0), tl.sum(error * weighted, axis=0))


def weighted_error(
    out: Tensor, target: Tensor, index: Tensor, shared: Tensor | None, each: Tensor | None, row_factors: Tensor
) -> Tensor:
    """sum(factor * weights * (out - target[index])^2), with weights shared by all rows, one set for each, or none."""
    result: Tensor = _WeightedError.apply(out, target, index, shared, each, row_factors)
    return result


class _WeightedError(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        target: Tensor,
        index: Tensor,
        shared: Tensor | None,
        each: Tensor | None,
        row_factors: Tensor,
    ) -> Tensor:
        out = out.contiguous()
        width = out[0].numel()
        grid = (len(index) * triton.cdiv(width, BLOCK),)
        sums = torch.empty(grid, dtype=torch.float32, device=out.device)
        kind = "shared" if shared is not None else "none" if each is None else "each"
        weight = next((w.contiguous() for w in (shared, each) if w is not None), out)
        row_factors = row_factors.contiguous()
        options: dict[str, Any] = {"weights": kind, "block": BLOCK}
        _error[grid](out, target, index, weight, sums, out, out, row_factors, width, backward=False, **options)
        ctx.save_for_backward(out, target, index, weight, row_factors)
        ctx.rest = (grid, width, options)
        return sums.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, target, index, weight, row_factors = ctx.saved_tensors
        grid, width, options = ctx.rest
        grad = torch.empty_like(out)
        _error[grid](out, target, index, weight, out, grad, grads[0], row_factors, width, backward=True, **options)
        return grad, None, None, None, None, None
