"""The three things a transformer multiplies with, able to run in float or through integers.

`QuantizedLinear` and `QuantizedConv2d` replace torch's layers under the same name and parameter names;
`QuantizedProduct` is an attention product (q k^T or softmax v). A quantizer that is None means float by choice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq import kernels
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding
from aphq.quant.straight_through import StraightThrough


class QuantizedLayer(nn.Module):
    """What linear layers and convolutions share: a weight, a bias, and the quantizers of weight and input."""

    rounding: LearnedRounding | StraightThrough | None  # while the weight is being learned

    def __init__(self, source: nn.Linear | nn.Conv2d, weights: Quantizer | None, inputs: Quantizer | None) -> None:
        super().__init__()
        self.weight = source.weight
        self.bias = source.bias
        self.weight_quantizer = weights
        self.input_quantizer = inputs
        self.rounding = None

    def effective_weight(self) -> Tensor:
        """The weight the forward pass multiplies with: float, nearest code, or learned rounding."""
        if self.weight_quantizer is None or not self.weight_quantizer.enabled:
            return self.weight
        return self.weight_quantizer(self.weight) if self.rounding is None else self.rounding()

    @torch.no_grad()
    def bake(self) -> None:
        """Replace the float weight by its quantized value; quantizing it again changes nothing."""
        if self.weight_quantizer is not None:
            nearest = self.weight_quantizer.codes(self.weight)
            on_grid = (nearest - self.weight_quantizer.zero_point) * self.weight_quantizer.scale
            self.weight.data = on_grid if self.rounding is None else self.rounding.hard()
        self.rounding = None

    def add_to_bias(self, shift: Tensor) -> None:
        """Add a constant per output; a layer without a bias gets one."""
        if self.bias is None:
            self.bias = nn.Parameter(torch.zeros_like(shift), requires_grad=False)
        self.bias.data = self.bias.data + shift

    def as_matrix(self, x: Tensor) -> Tensor:
        """The layer's input as rows [..., in], such that output = rows @ weight.flatten(1)^T + bias."""
        raise NotImplementedError

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        return self.multiply(x, self.effective_weight())


class QuantizedLinear(QuantizedLayer):
    """[..., in] -> [..., out]"""

    def as_matrix(self, x: Tensor) -> Tensor:
        return x

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.bias is not None and self.bias.requires_grad and kernels.usable(x):
            from aphq.kernels.linear import linear

            return linear(x, weight, self.bias)
        return F.linear(x, weight, self.bias)


class QuantizedConv2d(QuantizedLayer):
    """[batch, in, height, width] -> [batch, out, height', width']"""

    def __init__(self, source: nn.Conv2d, weights: Quantizer | None, inputs: Quantizer | None) -> None:
        super().__init__(source, weights, inputs)
        self.kernel_size, self.stride = source.kernel_size, source.stride
        self.padding, self.dilation, self.groups = source.padding, source.dilation, source.groups

    def as_matrix(self, x: Tensor) -> Tensor:
        if self.groups != 1 or isinstance(self.padding, str):
            raise NotImplementedError("grouped convolutions and named padding have no single matrix")
        columns = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
        return columns.transpose(1, 2)  # [batch, positions, in * kernel]

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.rounding is not None and self._tiles(x):
            return self._by_tiles(x, weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def _tiles(self, x: Tensor) -> bool:
        """Whether the kernel cuts the image into patches that neither overlap nor leave anything out."""
        height, width = self.kernel_size
        plain = self.groups == 1 and self.dilation == (1, 1) and self.padding in ("valid", (0, 0))
        return plain and self.stride == self.kernel_size and x.shape[2] % height == 0 and x.shape[3] % width == 0

    def _by_tiles(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same as one matrix product, whose gradients cost a fraction of a convolution's with three channels."""
        height, width = self.kernel_size
        tiles = x.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # [batch, in, rows, height, columns, width]
        patches = tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)  # [batch, rows, columns, in * height * width]
        return F.linear(patches, weight.flatten(1), self.bias).permute(0, 3, 1, 2)


class QuantizedProduct(nn.Module):
    """left [batch, heads, n, k] @ right [batch, heads, k, m], each with a quantizer (or None)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.left: Quantizer | None = None
        self.right: Quantizer | None = None

    @property
    def active(self) -> bool:
        """Whether the product must be computed as it stands, rather than by a fused float kernel."""
        return bool(self._forward_pre_hooks) or any(q is not None and q.enabled for q in (self.left, self.right))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        if self.left is not None:
            left = self.left(left)
        if self.right is not None:
            right = self.right(right)
        return left @ right


def quantized_sites(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, QuantizedLayer | QuantizedProduct]]:
    """(full name, module) of every layer and product below `prefix`, in forward order."""
    root = model.get_submodule(prefix) if prefix else model
    for name, module in root.named_modules(prefix=prefix):
        if isinstance(module, (QuantizedLayer, QuantizedProduct)):
            yield name, module


def quantizers(model: nn.Module) -> Iterator[Quantizer]:
    return (module for module in model.modules() if isinstance(module, Quantizer))
