"""The scale search's inner loops: the error of many candidate quantizers of one tensor, and sums over its groups.

Twins: `quant.search.Cost.plain`. A tensor is rows of `inner` elements, each row in the group (row modulo groups);
candidates come after the rows, [rows, candidates, inner], so that a batch of matrices stays one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import through_codes

LARGEST_BLOCK = 1024


@triton.jit
def _errors(
    x_ptr, scale_ptr, zero_ptr, out_ptr, top, candidates, groups, inner, squared: tl.constexpr, block: tl.constexpr
):
    """Of a chunk of a row, which is read once: error[row, c, i] = Q_c(x[row, i]) - x[row, i], or the sums of their
    squares [row, chunk, c]."""
    chunks = tl.cdiv(inner, block)
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * block + tl.arange(0, block)
    inside = column < inner
    x = tl.load(x_ptr + row * inner + column, mask=inside, other=0.0)
    group = row % groups
    for c in range(candidates):
        scale, zero = tl.load(scale_ptr + c * groups + group), tl.load(zero_ptr + c * groups + group)
        y, _, _, _ = through_codes(x, scale, -zero, top - zero)
        if squared:
            total = tl.sum((y - x) * (y - x), axis=0)  # an element outside is 0, which every quantizer keeps
            tl.store(out_ptr + (row * chunks + chunk) * candidates + c, total)
        else:
            tl.store(out_ptr + (row * candidates + c) * inner + column, y - x, mask=inside)


@triton.jit
def _product(a_ptr, shift_ptr, b_ptr, sum_ptr, candidates, inner, square: tl.constexpr, block: tl.constexpr):
    """sums[row, c, chunk] of (a + shift) * b, or of (a + shift)^2."""
    chunks = tl.cdiv(inner, block)
    row_c, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * block + tl.arange(0, block)
    inside = column < inner
    a = tl.load(a_ptr + row_c * inner + column, mask=inside, other=0.0)
    a += tl.load(shift_ptr + (row_c // candidates) * inner + column, mask=inside, other=0.0)
    if square:
        b = a
    else:
        b = tl.load(b_ptr + row_c * inner + column, mask=inside, other=0.0)
    tl.store(sum_ptr + row_c * chunks + chunk, tl.sum(a * b, axis=0))


def candidate_errors(x: Tensor, scale: Tensor, zero_point: Tensor, top: int) -> Tensor:
    """x [rows, inner] -> Q(x) - x as [rows, candidates, inner], for scales [candidates, groups]."""
    (candidates, groups), (rows, inner) = scale.shape, x.shape
    errors = torch.empty(rows, candidates, inner, dtype=torch.float32, device=x.device)
    block = _block(inner)
    grid = (rows * triton.cdiv(inner, block),)
    _errors[grid](x, scale, zero_point, errors, float(top), candidates, groups, inner, squared=False, block=block)
    return errors


def squared_errors(x: Tensor, scale: Tensor, zero_point: Tensor, top: int) -> Tensor:
    """x [rows, inner] -> the sum of (Q(x) - x)^2 over each group, [candidates, groups]."""
    (candidates, groups), (rows, inner) = scale.shape, x.shape
    block = _block(inner)
    chunks = triton.cdiv(inner, block)
    sums = torch.empty(rows // groups, groups, chunks, candidates, dtype=torch.float32, device=x.device)
    _errors[(rows * chunks,)](
        x, scale, zero_point, sums, float(top), candidates, groups, inner, squared=True, block=block
    )
    return sums.sum((0, 2)).T


def summed_product(a: Tensor, shift: Tensor, b: Tensor | None) -> Tensor:
    """[rows, candidates]: (a + shift) * b, or (a + shift)^2 without b, summed over a's [rows, candidates, inner]; the
    shift [rows, inner] is the same for all candidates."""
    rows, candidates, inner = a.shape
    block = _block(inner)
    chunks = triton.cdiv(inner, block)
    sums = torch.empty(rows, candidates, chunks, dtype=torch.float32, device=a.device)
    _product[(rows * candidates * chunks,)](
        a, shift, a if b is None else b, sums, candidates, inner, square=b is None, block=block
    )
    return sums.sum(2)


def _block(inner: int) -> int:
    return min(LARGEST_BLOCK, triton.next_power_of_2(inner))
