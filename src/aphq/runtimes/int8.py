"""The artifact run as integers in PyTorch: linear layers and patch embeddings multiply int8 by int8 into int32.

The input's codes and the weight's are moved into signed bytes and `torch._int_mm` multiplies them, on CPUs and on CUDA.
What the moves and zero-points cost is constant per output, so it goes into the bias: the result is the fake-quantized
layer's to the last float rounding. Attention products stay simulated in float.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from aphq.models.architecture import replace_module
from aphq.quant.affine import top_code
from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, QuantizedLinear, QuantizedProduct, quantized_sites

log = logging.getLogger(__name__)
SMALLEST_ROWS, MULTIPLE = 17, 8  # what CUDA's kernel takes


class Int8Linear(nn.Module):
    """[..., in] -> [..., out]"""

    weight: Tensor
    scale: Tensor
    bias: Tensor
    column: Tensor

    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        weights, inputs = layer.weight_quantizer, layer.input_quantizer
        assert weights is not None
        assert inputs is not None
        codes = weights.codes(layer.weight.data).flatten(1)  # [out, in]
        point = weights.zero_point.flatten().expand(len(codes))
        fits = (point <= 128) & (top_code(weights.bits) - point <= 127)
        minus = torch.where(fits, point, torch.full_like(point, 128.0))
        integers = codes - minus[:, None]
        column = minus - point  # weight = (integer + column) * scale
        self.features = len(integers)
        self.step, self.high = float(inputs.scale), top_code(inputs.bits)
        self.point = int(inputs.zero_point)
        self.shift = self.point if self.point <= 128 and self.high - self.point <= 127 else 128
        scale = float(inputs.scale) * weights.scale.data.flatten().double().expand(len(codes))
        # input code - point = (code - shift) + (shift - point); the second part times the weight is a constant
        constant = (self.shift - self.point) * (integers.double().sum(1) + column.double() * codes.shape[1])
        bias = scale * constant + (0 if layer.bias is None else layer.bias.data.double())
        padding = (0, -codes.shape[1] % MULTIPLE, 0, -len(codes) % MULTIPLE)
        packed = nn.functional.pad(integers, padding).to(torch.int8)
        self.register_buffer("weight", packed)  # [out, in]
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias.float())
        self.register_buffer("column", column.float() if column.any() else torch.empty(0))

    def quantize(self, x: Tensor) -> Tensor:
        """The input's codes as signed bytes."""
        codes = (x.float() / self.step).round_()
        return codes.clamp_(-self.point, self.high - self.point).add_(self.point - self.shift).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.quantize(x).flatten(0, -2)  # [rows, in]
        out = self.multiply(rows).float()[: rows.shape[0], : self.features]
        if self.column.numel():
            out = out + rows.sum(1, dtype=torch.int32).float()[:, None] * self.column
        return torch.addcmul(self.bias, out, self.scale).unflatten(0, x.shape[:-1]).to(x.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """int32 [rows, out], filled up as the kernel likes it."""
        missing = max(0, SMALLEST_ROWS - rows.shape[0]) if rows.is_cuda else 0
        extra = self.weight.shape[1] - rows.shape[1]
        if missing or extra:
            rows = nn.functional.pad(rows, (0, extra, 0, missing))
        product: Tensor = torch._int_mm(rows, self.weight.t())
        return product


class Int8Patches(nn.Module):
    """A convolution whose kernel cuts the image into patches: [batch, in, height, width] -> [batch, out, h, w]"""

    def __init__(self, layer: QuantizedConv2d) -> None:
        super().__init__()
        self.kernel_size = layer.kernel_size
        self.linear = Int8Linear(layer)

    def forward(self, x: Tensor) -> Tensor:
        down, right = self.kernel_size
        tiles = x.unflatten(3, (-1, right)).unflatten(2, (-1, down))  # [batch, in, rows, down, columns, right]
        out: Tensor = self.linear(tiles.permute(0, 2, 4, 1, 3, 5).flatten(3))
        return out.permute(0, 3, 1, 2)


def to_int8(model: nn.Module) -> nn.Module:
    """Replace, in place, every layer that has integers for both its weight and its input; the rest is noted."""
    left: list[str] = []
    for name, site in list(quantized_sites(model)):
        if isinstance(site, QuantizedProduct):
            continue
        if site.weight_quantizer is None or site.input_quantizer is None:
            left.append(name)
        elif isinstance(site, QuantizedLinear):
            replace_module(model, name, Int8Linear(site))
        elif isinstance(site, QuantizedConv2d) and _is_patches(site):
            replace_module(model, name, Int8Patches(site))
        else:
            left.append(name)
    if left:
        log.warning("without integers on both sides, so still in float: %s", ", ".join(left))
    return model.eval()


def _is_patches(layer: QuantizedConv2d) -> bool:
    plain = layer.groups == 1 and layer.dilation == (1, 1) and layer.padding in ("valid", (0, 0))
    return plain and layer.stride == layer.kernel_size
