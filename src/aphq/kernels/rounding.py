"""The soft weight of learned rounding and its penalty, forward and back. Twin: `quant.rounding.LearnedRounding`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import BLOCK

TINY: tl.constexpr = tl.constexpr(1e-30)  # whose logarithm is a number


@triton.jit
def _soft(alpha, zeta, gamma):
    """(h before clipping to [0, 1], its slope)"""
    sigmoid = tl.sigmoid(alpha)
    return sigmoid * (zeta - gamma) + gamma, sigmoid * (1 - sigmoid) * (zeta - gamma)


@triton.jit
def _forward(
    alpha_ptr, floor_ptr, scale_ptr, zero_ptr, beta_ptr, weight_ptr, penalty_ptr, size, columns, top, zeta, gamma,
    per_row: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < size
    row = i // columns if per_row else i * 0
    scale, zero = tl.load(scale_ptr + row, mask=inside), tl.load(zero_ptr + row, mask=inside)
    raw, _ = _soft(tl.load(alpha_ptr + i, mask=inside), zeta, gamma)
    h = tl.minimum(tl.maximum(raw, 0.0), 1.0)
    code = tl.minimum(tl.maximum(tl.load(floor_ptr + i, mask=inside) + h, 0.0), top)
    tl.store(weight_ptr + i, (code - zero) * scale, mask=inside)
    decided = tl.exp2(tl.load(beta_ptr) * tl.log2(tl.maximum(tl.abs(2 * h - 1), TINY)))
    tl.store(penalty_ptr + tl.program_id(0), tl.sum(tl.where(inside, 1 - decided, 0.0), axis=0))


@triton.jit
def _backward(
    grad_ptr, pull_ptr, alpha_ptr, floor_ptr, scale_ptr, beta_ptr, grad_alpha_ptr, size, columns, top, zeta, gamma,
    per_row: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < size
    row = i // columns if per_row else i * 0
    scale = tl.load(scale_ptr + row, mask=inside)
    raw, slope = _soft(tl.load(alpha_ptr + i, mask=inside), zeta, gamma)
    slope = tl.where((raw >= 0) & (raw <= 1), slope, 0.0)
    h = tl.minimum(tl.maximum(raw, 0.0), 1.0)
    code = tl.load(floor_ptr + i, mask=inside) + h
    of_weight = tl.where((code >= 0) & (code <= top), tl.load(grad_ptr + i, mask=inside) * scale, 0.0)
    beta, side = tl.load(beta_ptr), 2 * h - 1
    sign = tl.where(side > 0, 1.0, tl.where(side < 0, -1.0, 0.0))
    away = 2 * beta * tl.exp2((beta - 1) * tl.log2(tl.maximum(tl.abs(side), TINY))) * sign
    tl.store(grad_alpha_ptr + i, (of_weight - tl.load(pull_ptr) * away) * slope, mask=inside)


def soft_weight(
    alpha: Tensor,
    floor_code: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    top: int,
    zeta: float,
    gamma: float,
    beta: Tensor,
) -> tuple[Tensor, Tensor]:
    """(the weight, its penalty as partial sums); gradients for alpha alone."""
    result: tuple[Tensor, Tensor] = _SoftWeight.apply(alpha, floor_code, scale, zero_point, beta, top, zeta, gamma)
    return result


class _SoftWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        alpha: Tensor,
        floor_code: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        beta: Tensor,
        top: int,
        zeta: float,
        gamma: float,
    ) -> tuple[Tensor, Tensor]:
        grid = (triton.cdiv(alpha.numel(), BLOCK),)
        numbers = (alpha.numel(), alpha[0].numel(), float(top), zeta, gamma)
        options: dict[str, Any] = {"per_row": scale.numel() > 1, "block": BLOCK}
        weight, penalty = torch.empty_like(alpha), torch.empty(grid, dtype=torch.float32, device=alpha.device)
        _forward[grid](alpha, floor_code, scale, zero_point, beta, weight, penalty, *numbers, **options)
        ctx.save_for_backward(alpha, floor_code, scale, beta)
        ctx.rest = (grid, numbers, options)
        return weight, penalty

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        alpha, floor_code, scale, beta = ctx.saved_tensors
        grid, numbers, options = ctx.rest
        grad_alpha = torch.empty_like(alpha)
        # the penalty is only ever summed, so every entry of its gradient is the same number
        pull = grads[1] if grads[1].stride(0) == 0 else grads[1][:1]
        _backward[grid](
            grads[0].contiguous(), pull, alpha, floor_code, scale, beta, grad_alpha, *numbers, **options
        )  # fmt: skip
        return grad_alpha, None, None, None, None, None, None, None
