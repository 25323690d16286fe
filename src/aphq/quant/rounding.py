"""Learned rounding of weights (AdaRound): each weight learns whether to go up or down.

A weight w = scale * (floor(w / scale) + h) has h between 0 and 1, a stretched and clipped sigmoid of a free variable;
a regulariser pulls every h to 0 or 1, and `hard` rounds what is left.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aphq import kernels
from aphq.quant.affine import by_rows, clamp_inclusive, top_code
from aphq.quant.quantizer import Quantizer

INSIDE = 1e-6  # of a step of the grid: ten times what one bit of a sigmoid near its upper end makes there


class LearnedRounding(nn.Module):
    """The rounding variables of one weight tensor; scale and zero-point stay as they are."""

    floor_code: Tensor

    def __init__(self, weight: Tensor, quantizer: Quantizer, zeta: float = 1.1, gamma: float = -0.1) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.zeta, self.gamma = zeta, gamma
        ratio = weight.detach().contiguous() / quantizer.scale.data  # kernels count elements in this order
        floor = ratio.floor()
        self.register_buffer("floor_code", floor + quantizer.zero_point)
        # start where the soft weight equals the float weight: h(alpha) = fractional part. On the grid itself the last
        # bit of a sigmoid would decide whether h lies beyond its bound, where nothing learns: start just inside.
        start = (ratio - floor).clamp(INSIDE, 1 - INSIDE)
        fraction = ((start - gamma) / (zeta - gamma)).clamp(1e-4, 1 - 1e-4)
        self.alpha = nn.Parameter(torch.logit(fraction))
        self.current: Tensor | None = None

    def soft(self) -> Tensor:
        """h in [0, 1], differentiable."""
        return clamp_inclusive(torch.sigmoid(self.alpha) * (self.zeta - self.gamma) + self.gamma, 0, 1)

    def weight(self, h: Tensor) -> Tensor:
        code = clamp_inclusive(self.floor_code + h, 0, top_code(self.quantizer.bits))
        return (code - self.quantizer.zero_point) * self.quantizer.scale.data

    def soften(self, beta: Tensor) -> Tensor:
        """Set the soft weight of this step, and return its penalty sum(1 - |2h - 1|^beta), zero when every weight has
        decided, as a vector of partial sums."""
        scale = self.quantizer.scale.data
        if kernels.usable(self.alpha) and (scale.numel() == 1 or by_rows(scale, self.alpha)):
            from aphq.kernels.rounding import soft_weight

            affine = (scale, self.quantizer.zero_point, top_code(self.quantizer.bits))
            self.current, penalty = soft_weight(self.alpha, self.floor_code, *affine, self.zeta, self.gamma, beta)
            return penalty
        h = self.soft()
        self.current = self.weight(h)
        return (1 - (2 * h - 1).abs().pow(beta)).sum().reshape(1)

    def forward(self) -> Tensor:
        """The soft weight of this step."""
        assert self.current is not None, "soften() comes first"
        return self.current

    def hard(self) -> Tensor:
        """The weight on the integer grid."""
        with torch.no_grad():
            return self.weight((self.soft() >= 0.5).to(self.alpha.dtype))
