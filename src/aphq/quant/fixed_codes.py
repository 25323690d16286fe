"""Weights whose integers stay while their scales learn: one gain per output channel, with its true gradient.

Through `StraightThrough` the scale of a weight that lies on its grid has next to no gradient: the rounded weight stays
where the weight is, whatever the grid. Here the integers are what is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aphq.quant.quantizer import Quantizer


class FixedCodes(nn.Module):
    """The integers of one weight tensor, counted from the zero-point; its scale may be learned."""

    grid: Tensor

    def __init__(self, weight: Tensor, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.register_buffer("grid", quantizer.codes(weight.detach()) - quantizer.zero_point)

    def forward(self) -> Tensor:
        return self.grid * self.quantizer.scale

    @torch.no_grad()
    def hard(self) -> Tensor:
        """The weight on the integer grid."""
        return self.forward()
