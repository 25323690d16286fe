"""Adam for one large tensor, spread over the whole GPU. Twin: `torch.optim.Adam`.

torch's fused Adam gives a block 65 536 elements: the weights of a small transformer block keep a tenth of a GPU busy.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _adam(p_ptr, grad_ptr, m_ptr, v_ptr, step_ptr, rate_ptr, size, beta1, beta2, epsilon, block: tl.constexpr):
    i = tl.program_id(0) * block + tl.arange(0, block)
    inside = i < size
    step = tl.load(step_ptr).to(tl.float32) + 1
    rate = tl.load(rate_ptr)
    grad = tl.load(grad_ptr + i, mask=inside)
    m = beta1 * tl.load(m_ptr + i, mask=inside) + (1 - beta1) * grad
    v = beta2 * tl.load(v_ptr + i, mask=inside) + (1 - beta2) * grad * grad
    m_hat = m / (1 - tl.exp2(step * tl.log2(beta1)))
    v_hat = v / (1 - tl.exp2(step * tl.log2(beta2)))
    p = tl.load(p_ptr + i, mask=inside) - rate * m_hat / (tl.sqrt(v_hat) + epsilon)
    tl.store(p_ptr + i, p, mask=inside)
    tl.store(m_ptr + i, m, mask=inside)
    tl.store(v_ptr + i, v, mask=inside)


def adam_step(
    parameter: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    rate: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> None:
    """One step in place; `step` [1] counts from 0, `rate` is a number on the device."""
    grid = (triton.cdiv(parameter.numel(), BLOCK),)
    numbers = (parameter.numel(), *betas, epsilon)
    _adam[grid](parameter, grad.contiguous(), mean, square, step, rate, *numbers, block=BLOCK)
