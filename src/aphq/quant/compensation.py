"""Rounding with error compensation: the columns of a weight one by one, the rest making up for each one's error.

With H the Gram matrix of a layer's inputs, the output error of a rounded weight W + D is tr(D H D^T). When column j is
rounded, the best change of the columns that are still free is read off a row of the Cholesky factor of the inverse of
H (Optimal Brain Surgeon; GPTQ's order of work). Nothing is learned and nothing is iterated.

What the columns make up for is learned by heart all the same where inputs are few, as those of a head are, of which an
image has one. Damping H is the remedy, up to where every weight goes to its nearest code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aphq.quant.affine import fake_quantize
from aphq.quant.quantizer import Quantizer

DAMPINGS = (0.01, 0.1, 1.0)  # of the mean diagonal: directions the inputs hardly have must not blow up
COLUMNS_AT_ONCE = 64  # rounded before the columns further right are updated, in one product


@torch.no_grad()
def compensated_for(weight: Tensor, rows: Tensor, quantizer: Quantizer) -> Tensor:
    """`weight` [out, in] on the quantizer's grid, for inputs like `rows` [tokens, in]: with the damping, or without
    compensation, that is best on one half of them when the other is compensated for."""
    nearest = nearest_codes(weight, quantizer)
    known, unknown = rows.tensor_split(2)
    if not len(unknown):  # nothing to judge by
        return nearest
    gram, change = known.T @ known, unknown.mean(0) - known.mean(0)
    centred = unknown - unknown.mean(0)
    # of the rows that were not known, with a bias that takes up the mean of those that were
    judging = centred.T @ centred + len(unknown) * torch.outer(change, change)

    def error(rounded: Tensor) -> float:
        off = rounded - weight
        return float(((off @ judging) * off).sum())

    errors = {damping: error(compensated(weight, gram, quantizer, damping)) for damping in DAMPINGS}
    best = min(errors, key=lambda damping: errors[damping])
    return nearest if error(nearest) <= errors[best] else compensated(weight, rows.T @ rows, quantizer, best)


def nearest_codes(weight: Tensor, quantizer: Quantizer) -> Tensor:
    """`weight` [out, in] on the quantizer's grid, every number by itself."""
    scale, zero_point = (x.reshape(-1, 1) for x in (quantizer.scale.data, quantizer.zero_point))
    return fake_quantize(weight, scale, zero_point, quantizer.bits)


@torch.no_grad()
def compensated(weight: Tensor, gram: Tensor, quantizer: Quantizer, damping: float = DAMPINGS[0]) -> Tensor:
    """`weight` [out, in] on the quantizer's grid, for inputs with the Gram matrix `gram` [in, in]."""
    size = len(gram)
    scale, zero_point = quantizer.scale.data.reshape(-1), quantizer.zero_point.reshape(-1)
    order = torch.argsort(gram.diagonal(), descending=True)  # what matters most first, while all can still help
    left = weight.double()[:, order]
    factor = _inverse_factor(gram.double()[order][:, order], damping)
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


def _inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """Upper triangular U with U^T U = (gram + damping)^-1."""
    mean = gram.diagonal().mean().clamp_min(1e-12)
    damped = gram + damping * mean * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)
