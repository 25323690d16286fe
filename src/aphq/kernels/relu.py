"""ReLU and ReLU clamped from above, both at once. Twin: `stages.mlp_reconstruction.relu_and_clamped`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.common import BLOCK


@triton.jit
def _forward(x_ptr, y_ptr, bound, size, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < size
    y = tl.maximum(tl.load(x_ptr + i, mask=inside), 0.0)
    tl.store(y_ptr + i, y, mask=inside)
    tl.store(y_ptr + size + i, tl.minimum(y, bound), mask=inside)


@triton.jit
def _backward(grad_ptr, x_ptr, grad_x_ptr, bound, size, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < size
    x = tl.load(x_ptr + i, mask=inside)
    plain, clamped = tl.load(grad_ptr + i, mask=inside), tl.load(grad_ptr + size + i, mask=inside)
    grad = tl.where(x > 0, plain + tl.where(x <= bound, clamped, 0.0), 0.0)
    tl.store(grad_x_ptr + i, grad, mask=inside)


def relu_and_clamped(x: Tensor, bound: float) -> Tensor:
    """[2, *x.shape]"""
    result: Tensor = _ReluAndClamped.apply(x, bound)
    return result


class _ReluAndClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty(2, *x.shape, dtype=torch.float32, device=x.device)
        _forward[(triton.cdiv(x.numel(), BLOCK),)](x, y, bound, x.numel(), block=BLOCK)
        ctx.save_for_backward(x)
        ctx.bound = bound
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        grad_x = torch.empty_like(x)
        _backward[(triton.cdiv(x.numel(), BLOCK),)](grads[0].contiguous(), x, grad_x, ctx.bound, x.numel(), block=BLOCK)
        return grad_x, None
