"""A weight and the quantizer that fits it."""

import torch
from torch import Tensor

from aphq.quant.quantizer import Quantizer


def weight_and_quantizer(bits: int = 3) -> tuple[Tensor, Quantizer]:
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    quantizer = Quantizer(bits, False, (6, 1))
    quantizer.set_range(weight.amin(1), weight.amax(1))
    quantizer.enabled = True
    return weight, quantizer
