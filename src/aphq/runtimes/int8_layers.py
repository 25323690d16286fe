"""Linear layers and patch embeddings that multiply int8 by int8 into int32.

The input's codes and the weight's are moved into signed bytes and `torch._int_mm` multiplies them, on CPUs and on CUDA;
where `kernels.byte_linear` works, it does the same in one pass. What the moves and zero-points cost is a constant
integer per output, so the sums are those of the fake-quantized layer: the result is its to the last float rounding.

A layer takes floats, or bytes that already are its codes; it gives floats, or the bytes of what reads it alone
(`runtimes.fusing`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq import kernels
from aphq.export.formats import weight_format
from aphq.quant.affine import clamp_, top_code
from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, patches
from aphq.quant.quantizer import Quantizer

SMALLEST_ROWS, MULTIPLE = 17, 8  # what CUDA's kernel takes


class OnBytes(nn.Module):
    """What layers and attentions on bytes share: their own numbers stay float32 whatever the model is cast to, and
    they know after every move whether the kernels work where they are."""

    weight: Tensor

    def __init__(self, features: int = 0) -> None:
        super().__init__()
        self.by_kernels = False
        # transformers casts images to the type of the weight; it is asked for that and its length, and holds nothing
        self.register_buffer("weight", torch.empty(features, 0), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        own = {name: b for name, b in self._buffers.items() if b is not None and name != "weight"}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in own.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)
        self.by_kernels = kernels_work(self.weight.device)
        return self

    @property
    def uses_kernels(self) -> bool:
        """What is compiled or exported consists of torch's own operations."""
        return self.by_kernels and not torch.compiler.is_compiling()


def kernels_work(device: torch.device) -> bool:
    """Whether there are kernels for a device, which compute what they should."""
    if not kernels.wanted_on(device):
        return False
    try:
        from aphq.kernels import integers
    except ImportError:
        return False
    return integers.right(device)


def affine_of(quantizer: Quantizer, groups: int) -> Tensor:
    """[5, groups]: scale, least and largest code less the zero-point, what brings both into a signed byte, and the
    scale's inverse, with which kernels save a division."""
    scale = quantizer.scale.detach().float().reshape(-1).expand(groups)
    point = quantizer.zero_point.float().reshape(-1).expand(groups)
    low, high = -point, top_code(quantizer.bits) - point
    shift = torch.where((low >= -128) & (high <= 127), torch.zeros_like(low), low + 128)
    return torch.stack([scale, low, high, shift, 1 / scale])


def bytes_by(x: Tensor, affine: Tensor) -> Tensor:
    """The codes of floats as signed bytes; `affine` [5, ...] broadcasts against them."""
    scale, low, high, shift, _ = affine.unbind(0)
    return clamp_((x / scale).round_(), low, high).sub_(shift).to(torch.int8)


class Int8Linear(OnBytes):
    """[..., in] -> [..., out]"""

    integers: Tensor
    scale: Tensor
    bias: Tensor
    constant: Tensor
    column: Tensor
    affine: Tensor
    emits: Tensor

    def __init__(self, layer: QuantizedLayer) -> None:
        inputs, weights = layer.input_quantizer, weight_format(layer)
        assert inputs is not None
        integers = torch.from_numpy(weights.integers).flatten(1)  # [out, in]
        super().__init__(len(integers))
        self.features = len(integers)
        affine = affine_of(inputs, 1).cpu()[:, 0]
        self.step = float(affine[0])
        self.low, self.high, self.shift = (int(number) for number in affine[1:4])
        scale = self.step * torch.from_numpy(weights.scale).double()
        # code less point = byte + shift; the second part times the weight is a constant. It is added while sums are
        # integers: those of a padded token must be zero, or Swin V2 normalises what is left
        constant = self.shift * torch.from_numpy(weights.column_sums())
        # weight = (integer + column) * scale; most weights fit in signed bytes as they are and have no column
        column = torch.from_numpy(weights.shift) if weights.shift.any() else torch.empty(0)
        bias = torch.zeros(self.features) if layer.bias is None else layer.bias.data
        padding = (0, -integers.shape[1] % MULTIPLE, 0, -len(integers) % MULTIPLE)
        self.register_buffer("integers", F.pad(integers, padding))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias.float().clone())
        self.register_buffer("constant", constant.int())
        self.register_buffer("column", column.int())
        self.register_buffer("affine", affine, persistent=False)  # of the input
        self.activation = ""  # "relu" or "gelu" if the layer does that too
        self.register_buffer("emits", torch.empty(0), persistent=False)  # [5, out or 1]: of the bytes it gives
        self.emits_all = False  # whether those take every value that bytes have
        self.to(layer.weight.device)

    def emit(self, affine: Tensor, activation: str = "") -> None:
        """Give bytes from here on; `affine` [5, out] or [5, 1]."""
        self.emits = affine.clone().to(self.scale.device)
        self.emits_all = bool((affine[1] - affine[3] == -128).all() and (affine[2] - affine[3] == 127).all())
        self.activation = activation

    def quantize(self, x: Tensor) -> Tensor:
        """The input's codes as signed bytes."""
        if self.uses_kernels:
            from aphq.kernels.byte_codes import codes

            return codes(x, self.step, self.low, self.high, self.shift)
        rounded = (x.float() / self.step).round_()
        return rounded.clamp_(self.low, self.high).sub_(self.shift).to(torch.int8)

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype == torch.int8
        rows = (x if given else self.quantize(x)).flatten(0, -2)  # [rows, in]
        dtype = self.weight.dtype if given else x.dtype
        emits = self.emits if self.emits.shape[0] else None
        if self.uses_kernels:
            from aphq.kernels.byte_linear import linear

            tensors = (self.integers, self.scale, self.bias, self.constant, self.column)
            out = linear(rows.contiguous(), *tensors, dtype, self.activation, emits, self.emits_all)
            return out.unflatten(0, x.shape[:-1])
        sums = self.multiply(rows)[: rows.shape[0], : self.features].add_(self.constant)
        if self.column.numel():
            sums = sums + rows.sum(1, dtype=torch.int32)[:, None] * self.column
        out = torch.addcmul(self.bias, sums.float(), self.scale)
        if self.activation:
            out = out.relu() if self.activation == "relu" else F.gelu(out)
        return (out.to(dtype) if emits is None else bytes_by(out, emits)).unflatten(0, x.shape[:-1])

    def multiply(self, rows: Tensor) -> Tensor:
        """int32 [rows, out], filled up as the kernel likes it."""
        missing = max(0, SMALLEST_ROWS - rows.shape[0]) if rows.is_cuda else 0
        extra = self.integers.shape[1] - rows.shape[1]
        if missing or extra:
            rows = F.pad(rows, (0, extra, 0, missing))
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
