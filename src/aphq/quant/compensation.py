"""Rounding with error compensation: the columns of a weight one by one, the rest making up for each one's error.

With H the Gram matrix of a layer's inputs, the output error of a rounded weight W + D is tr(D H D^T). When column j is
rounded, the best change of the columns that are still free is read off a row of the Cholesky factor of the inverse of
H (Optimal Brain Surgeon; GPTQ's order of work). Nothing is learned and nothing is iterated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aphq.quant.affine import fake_quantize
from aphq.quant.quantizer import Quantizer

DAMPING = 0.01  # of the mean diagonal: directions the inputs hardly have must not blow up
COLUMNS_AT_ONCE = 64  # rounded before the columns further right are updated, in one product


@torch.no_grad()
def compensated(weight: Tensor, gram: Tensor, quantizer: Quantizer) -> Tensor:
    """`weight` [out, in] on the quantizer's grid, for inputs with the Gram matrix `gram` [in, in]."""
    size = len(gram)
    scale, zero_point = quantizer.scale.data.reshape(-1), quantizer.zero_point.reshape(-1)
    order = torch.argsort(gram.diagonal(), descending=True)  # what matters most first, while all can still help
    left = weight.double()[:, order]
    factor = _inverse_factor(gram.double()[order][:, order])
    rounded = torch.empty_like(left)
    for start in range(0, size, COLUMNS_AT_ONCE):
        end = min(start + COLUMNS_AT_ONCE, size)
        errors = torch.empty(len(left), end - start, dtype=left.dtype, device=left.device)
        for j in range(start, end):
            column = left[:, j].float()
            rounded[:, j] = fake_quantize(column, scale, zero_point, quantizer.bits).double()
            errors[:, j - start] = (left[:, j] - rounded[:, j]) / factor[j, j]
            left[:, j + 1 : end] -= torch.outer(errors[:, j - start], factor[j, j + 1 : end])
        left[:, end:] -= errors @ factor[start:end, end:]
    back = torch.empty_like(order)
    back[order] = torch.arange(size, device=order.device)
    return rounded[:, back].to(weight)


def _inverse_factor(gram: Tensor) -> Tensor:
    """Upper triangular U with U^T U = (gram + damping)^-1."""
    mean = gram.diagonal().mean().clamp_min(1e-12)
    damped = gram + DAMPING * mean * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
