"""Weights that learn through their own rounding: the forward pass sees the nearest code, the gradient does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aphq.quant.affine import fake_quantize, fake_quantize_learned
from aphq.quant.quantizer import Quantizer


class StraightThrough(nn.Module):
    """A float copy of one weight tensor that is learned; its scale may be learned with it."""

    def __init__(self, weight: Tensor, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.master = nn.Parameter(weight.detach().clone())

    def forward(self) -> Tensor:
        q = self.quantizer
        return fake_quantize_learned(self.master, q.scale, q.zero_point, q.bits)

    @torch.no_grad()
    def hard(self) -> Tensor:
        """The weight on the integer grid."""
        return fake_quantize(self.master, self.quantizer.scale, self.quantizer.zero_point, self.quantizer.bits)
