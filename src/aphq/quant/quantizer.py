"""A quantizer: the number format of one tensor, with its scale and zero-point, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aphq.quant.affine import affine_from_range, fake_quantize_learned, integers, quantize, top_code
from aphq.quant.drop import Drop


class Quantizer(nn.Module):
    """Passes tensors through `bits`-bit integers when enabled; until `set_range` its scale is NaN, loudly unset.

    With a `drop` (QDrop) some elements stay in float; with `relu` it takes over the ReLU before it.
    """

    zero_point: Tensor

    def __init__(self, bits: int, symmetric: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.bits = bits
        self.symmetric = symmetric
        self.scale = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.register_buffer("zero_point", torch.zeros(shape))
        self.enabled = False
        self.drop: Drop | None = None
        self.relu = False

    def set_range(self, lower: Tensor, upper: Tensor) -> None:
        scale, zero_point = affine_from_range(lower, upper, self.bits, self.symmetric)
        self.scale.data = scale.reshape(self.scale.shape).to(self.scale)
        self.zero_point.data = zero_point.reshape(self.zero_point.shape).to(self.zero_point)

    @property
    def calibrated(self) -> bool:
        return not bool(self.scale.isnan().any())

    @property
    def learning(self) -> bool:
        return self.enabled and torch.is_grad_enabled() and (self.drop is not None or self.scale.requires_grad)

    @property
    def settled(self) -> bool:
        """Whether it gives whole multiples of its scale, which is not being learned."""
        return self.enabled and self.drop is None and not self.learning

    def limits(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest value that can be represented."""
        return -self.zero_point * self.scale.data, (top_code(self.bits) - self.zero_point) * self.scale.data

    def codes(self, x: Tensor) -> Tensor:
        return quantize(x, self.scale.data, self.zero_point, self.bits)

    def integers(self, x: Tensor) -> Tensor:
        """As whole floats; times the scale they are what `forward` gives."""
        return integers(x.relu() if self.relu else x, self.scale, self.zero_point, self.bits)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x.relu() if self.relu else x
        learns = torch.is_grad_enabled() and (x.requires_grad or self.scale.requires_grad)
        if self.drop is None and not learns:
            return self.integers(x).mul_(self.scale)
        return fake_quantize_learned(x, self.scale, self.zero_point, self.bits, self.drop, self.relu)

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {kind}, scales {tuple(self.scale.shape)}"
