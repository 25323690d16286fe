"""The artifact run as integers in PyTorch: linear layers and patch embeddings multiply int8 by int8 into int32.

The input's codes and the weight's are moved into signed bytes and `torch._int_mm` multiplies them, on CPUs and on CUDA.
What the moves and zero-points cost is a constant integer per output, so the sums are those of the fake-quantized layer:
the result is its to the last float rounding. Attention products and other convolutions stay simulated in float.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from aphq import kernels
from aphq.export.formats import weight_format
from aphq.models.architecture import replace_module
from aphq.models.attention import OpenAttention, open_attentions
from aphq.quant.affine import top_code
from aphq.quant.layers import (
    QuantizedConv2d,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedProduct,
    patches,
    quantized_sites,
)
from aphq.quant.quantizer import Quantizer

log = logging.getLogger(__name__)
SMALLEST_ROWS, MULTIPLE = 17, 8  # what CUDA's kernel takes


class Int8Linear(nn.Module):
    """[..., in] -> [..., out]"""

    integers: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor
    constant: Tensor
    column: Tensor

    def __init__(self, layer: QuantizedLayer) -> None:
        super().__init__()
        inputs, weights = layer.input_quantizer, weight_format(layer)
        assert inputs is not None
        integers = torch.from_numpy(weights.integers).flatten(1)  # [out, in]
        self.features = len(integers)
        self.step, self.high = float(inputs.scale), top_code(inputs.bits)
        self.point = int(inputs.zero_point)
        self.shift = self.point if self.point <= 128 and self.high - self.point <= 127 else 128
        scale = self.step * torch.from_numpy(weights.scale).double()
        # input code - point = (code - shift) + (shift - point); the second part times the weight is a constant. It is
        # added while sums are integers: those of a padded token must be zero, or Swin V2 normalises what is left
        constant = (self.shift - self.point) * torch.from_numpy(weights.column_sums())
        # weight = (integer + column) * scale; most weights fit in signed bytes as they are and have no column
        column = torch.from_numpy(weights.shift) if weights.shift.any() else torch.empty(0)
        bias = torch.zeros(self.features) if layer.bias is None else layer.bias.data
        padding = (0, -integers.shape[1] % MULTIPLE, 0, -len(integers) % MULTIPLE)
        self.register_buffer("integers", nn.functional.pad(integers, padding))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias.float().clone())
        self.register_buffer("constant", constant.int())
        self.register_buffer("column", column.int())
        # transformers casts images to the type of the weight; it is asked for that alone, so this one holds nothing
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.to(layer.weight.device)

    def quantize(self, x: Tensor) -> Tensor:
        """The input's codes as signed bytes."""
        codes = (x.float() / self.step).round_()
        return codes.clamp_(-self.point, self.high - self.point).add_(self.point - self.shift).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        if fused(x):
            from aphq.kernels.integers import codes, linear

            rows = codes(x, self.step, -self.point, self.high - self.point, self.shift - self.point).flatten(0, -2)
            tensors = (self.integers, self.scale, self.bias, self.constant, self.column)
            return linear(rows, *tensors, x.dtype).unflatten(0, x.shape[:-1])
        rows = self.quantize(x).flatten(0, -2)  # [rows, in]
        sums = self.multiply(rows)[: rows.shape[0], : self.features].add_(self.constant)
        if self.column.numel():
            sums = sums + rows.sum(1, dtype=torch.int32)[:, None] * self.column
        return torch.addcmul(self.bias, sums.float(), self.scale).unflatten(0, x.shape[:-1]).to(x.dtype)

    def multiply(self, rows: Tensor) -> Tensor:
        """int32 [rows, out], filled up as the kernel likes it."""
        missing = max(0, SMALLEST_ROWS - rows.shape[0]) if rows.is_cuda else 0
        extra = self.integers.shape[1] - rows.shape[1]
        if missing or extra:
            rows = nn.functional.pad(rows, (0, extra, 0, missing))
        product: Tensor = torch._int_mm(rows, self.integers.t())
        return product


class Int8Patches(nn.Module):
    """A convolution whose kernel cuts the image into patches: [batch, in, height, width] -> [batch, out, h, w]"""

    def __init__(self, layer: QuantizedConv2d) -> None:
        super().__init__()
        self.kernel_size = layer.kernel_size
        self.linear = Int8Linear(layer)

    @property
    def weight(self) -> Tensor:
        """Its type is the images', as a convolution's is."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        height, width = (side - side % size for side, size in zip(x.shape[2:], self.kernel_size, strict=True))
        out: Tensor = self.linear(patches(x[:, :, :height, :width], self.kernel_size))
        return out.permute(0, 3, 1, 2)


class AttentionInBytes(nn.Module):
    """Both products of an attention, and the softmax between them, by one kernel."""

    affines: Tensor

    def __init__(self, attention: OpenAttention) -> None:
        super().__init__()
        operands = (attention.qk.left, attention.qk.right, attention.pv.left, attention.pv.right)
        each = [_affine(quantizer, attention.num_heads) for quantizer in operands if quantizer is not None]
        self.register_buffer("affines", torch.stack(each), persistent=False)  # [operands, numbers, heads]

    def fits(self, x: Tensor) -> bool:
        return fused(x)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, factor: float, bias: Tensor | None) -> Tensor:
        from aphq.kernels.integers import attention

        return attention(q, k, v, factor, bias, self.affines)


def _affine(quantizer: Quantizer, heads: int) -> Tensor:
    """[4, heads]: scale, least and largest code less the zero-point, and what brings both into a signed byte."""
    scale = quantizer.scale.detach().float().reshape(-1).expand(heads)
    point = quantizer.zero_point.float().reshape(-1).expand(heads)
    low, high = -point, top_code(quantizer.bits) - point
    shift = torch.where((low >= -128) & (high <= 127), torch.zeros_like(low), low + 128)
    return torch.stack([scale, low, high, shift])


def fused(x: Tensor) -> bool:
    """Whether Triton's kernels take this one. What is compiled as a whole is fused by the compiler."""
    if torch.compiler.is_compiling() or not (x.is_cuda or kernels.interpreted):
        return False
    try:
        from aphq.kernels import integers
    except ImportError:
        return False
    return integers.usable(x)


def to_int8(model: nn.Module) -> nn.Module:
    """Replace, in place, every layer that has integers for both its weight and its input; the rest is noted."""
    float_by_choice: list[str] = []
    without_kernel: list[str] = []
    for name, site in list(quantized_sites(model)):
        if isinstance(site, QuantizedProduct):
            continue
        if site.weight_quantizer is None or site.input_quantizer is None:
            float_by_choice.append(name)
        elif isinstance(site, QuantizedLinear):
            replace_module(model, name, Int8Linear(site))
        elif isinstance(site, QuantizedConv2d) and site.cuts_patches:
            replace_module(model, name, Int8Patches(site))
        else:
            without_kernel.append(name)
    for _, attention in open_attentions(model):
        operands = (attention.qk.left, attention.qk.right, attention.pv.left, attention.pv.right)
        if all(quantizer is not None for quantizer in operands):
            attention.in_bytes = AttentionInBytes(attention)
    if float_by_choice:
        log.warning("not integers on both sides by the recipe, so still in float: %s", ", ".join(float_by_choice))
    if without_kernel:
        log.warning(
            "still simulated in float, for only linear layers and patch embeddings have an integer kernel here: %s",
            ", ".join(without_kernel),
        )
    return model.eval()
