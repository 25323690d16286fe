"""A linear layer whose weight and bias learn, with the sums over many tokens spread over the GPU. Twin: `F.linear`.

The gradient of a small weight over thousands of tokens is one product with few output tiles and a long inner
dimension, and that of a bias a sum over it: both leave most of the GPU idle unless the tokens are cut into pieces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 64  # of a tile of the column sums
TILES_WANTED = 128  # about one per multiprocessor
TILE = 128 * 128  # of a matrix product


@triton.jit
def _column_sums(
    x_ptr, sum_ptr, rows, columns, row_block: tl.constexpr, column_block: tl.constexpr, passes: tl.constexpr
):
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    total = tl.zeros((column_block,), tl.float32)
    for step in range(passes):
        row = (tl.program_id(0) * passes + step) * row_block + tl.arange(0, row_block)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        total += tl.sum(
            tl.load(x_ptr + row[:, None].to(tl.int64) * columns + column[None, :], mask=inside, other=0.0), axis=0
        )
    tl.store(sum_ptr + tl.program_id(0) * columns + column, total, mask=column < columns)


def column_sums(x: Tensor) -> Tensor:
    """[rows, columns] -> [columns]"""
    rows, columns = x.shape
    passes = 4
    grid = (triton.cdiv(rows, ROWS * passes), triton.cdiv(columns, COLUMNS))  # only the first may exceed 65 535
    sums = torch.empty(grid[0], columns, dtype=torch.float32, device=x.device)
    _column_sums[grid](x, sums, rows, columns, row_block=ROWS, column_block=COLUMNS, passes=passes)
    return sums.sum(0)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad^T x, [rows, out] and [rows, in] -> [out, in], the rows in as many pieces as it takes to fill the GPU."""
    pieces = max(1, min(16, TILES_WANTED * TILE // (grad.shape[1] * x.shape[1])))
    while len(x) % pieces:
        pieces -= 1
    if pieces == 1:
        return grad.T @ x
    return torch.bmm(grad.unflatten(0, (pieces, -1)).mT, x.unflatten(0, (pieces, -1))).sum(0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias, with gradients for all three."""
    result: Tensor = _Linear.apply(x, weight, bias)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0]).contiguous()
        rows = x.reshape(-1, weight.shape[1])
        grad_x = (grad @ weight).reshape(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = weight_gradient(grad, rows) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, column_sums(grad) if ctx.needs_input_grad[2] else None
