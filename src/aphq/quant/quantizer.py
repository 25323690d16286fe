"""A quantizer: the number format of one tensor, with its scale and zero-point, as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aphq.quant.affine import affine_from_range, fake_quantize, fake_quantize_learned, quantize, top_code


class Quantizer(nn.Module):
    """Passes tensors through `bits`-bit integers when enabled; until `set_range` its scale is NaN, loudly unset.

    `share` below 1 is QDrop: each element is quantized with that probability and stays in float otherwise.
    """

    zero_point: Tensor

    def __init__(self, bits: int, symmetric: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.bits = bits
        self.symmetric = symmetric
        self.scale = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.register_buffer("zero_point", torch.zeros(shape))
        self.enabled = False
        self.share = 1.0

    def set_range(self, lower: Tensor, upper: Tensor) -> None:
        scale, zero_point = affine_from_range(lower, upper, self.bits, self.symmetric)
        self.scale.data = scale.reshape(self.scale.shape).to(self.scale)
        self.zero_point.data = zero_point.reshape(self.zero_point.shape).to(self.zero_point)

    @property
    def calibrated(self) -> bool:
        return not bool(self.scale.isnan().any())

    def limits(self) -> tuple[Tensor, Tensor]:
        """The smallest and largest value that can be represented."""
        return -self.zero_point * self.scale.data, (top_code(self.bits) - self.zero_point) * self.scale.data

    def codes(self, x: Tensor) -> Tensor:
        return quantize(x, self.scale.data, self.zero_point, self.bits)

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        keep = random_mask(x, self.share) if self.share < 1 else None
        if keep is None and not torch.is_grad_enabled():
            return fake_quantize(x, self.scale, self.zero_point, self.bits)
        return fake_quantize_learned(x, self.scale, self.zero_point, self.bits, keep)

    def extra_repr(self) -> str:
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.bits} bits, {kind}, scales {tuple(self.scale.shape)}"


def random_mask(like: Tensor, share: float) -> Tensor:
    """True with probability `share` (to 1/256), in the shape of `like`: one random byte per element, eight per draw,
    because a draw per element would cost more than the quantizer itself."""
    words = torch.empty(-(-like.numel() // 8), dtype=torch.long, device=like.device).random_(-(2**63), None)
    return words.view(torch.uint8)[: like.numel()].view(like.shape) < min(255, round(256 * share))
