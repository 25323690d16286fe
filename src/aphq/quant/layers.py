"""The things a transformer or a detector multiplies with, able to run in float or through integers.

`QuantizedLinear`, `QuantizedConv2d` and `QuantizedConvTranspose2d` replace torch's layers under the same name and
parameter names; `QuantizedProduct` is an attention product (q k^T or softmax v). A quantizer that is None means float
by choice.

Where both sides are quantized and nothing learns, integers are multiplied (as whole floats, which add up exactly below
2^24) and then scaled. Products of rounded numbers would differ in their last bits from one machine to another, and a
network of three bits amplifies that into other predictions; integers are what every runtime multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

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

    out_dim = 0  # the dimension of the weight that counts output channels

    def __init__(
        self,
        source: nn.Linear | nn.Conv2d | nn.ConvTranspose2d,
        weights: Quantizer | None,
        inputs: Quantizer | None,
    ) -> None:
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
        add_to_bias(self, shift)

    def weight_rows(self) -> Tensor:
        """The weight as [out, in], or [out, taps, in] where a row of the input makes several outputs per channel."""
        return self.weight.flatten(1)

    def channels_last(self, x: Tensor) -> Tensor:
        """The layer's input as [..., channels]."""
        raise NotImplementedError

    def row_count(self, x: Tensor) -> int:
        """How many rows the layer's input has, each of which is multiplied with the whole of `weight_rows`."""
        return self.channels_last(x).flatten(0, -2).shape[0]

    def rows_at(self, x: Tensor, picked: Tensor) -> Tensor:
        """Some of those rows, [picked, in]: output = rows @ weight_rows^T + bias."""
        channels = self.channels_last(x)
        return channels.reshape(-1, channels.shape[-1]).index_select(0, picked)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError

    def per_channel(self, values: Tensor) -> Tensor:
        """One number per output channel, or one for all, in a shape that meets the output's."""
        return values.reshape(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        inputs, weights = self.input_quantizer, self.weight_quantizer
        if inputs is not None and weights is not None and self.rounding is None and settled(inputs, weights, x):
            out = self.multiply(inputs.integers(x), weights.integers(self.weight), None)
            out = out.mul_(self.per_channel(inputs.scale * weights.scale))
            return out if self.bias is None else out + self.per_channel(self.bias)
        if inputs is not None:
            x = inputs(x)
        return self.multiply(x, self.effective_weight(), self.bias)


class QuantizedLinear(QuantizedLayer):
    """[..., in] -> [..., out]"""

    def channels_last(self, x: Tensor) -> Tensor:
        return x

    def per_channel(self, values: Tensor) -> Tensor:
        return values.reshape(-1)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None and bias.requires_grad and kernels.usable(x):
            from aphq.kernels.linear import linear

            return linear(x, weight, bias)
        return F.linear(x, weight, bias)


class QuantizedConv2d(QuantizedLayer):
    """[batch, in, height, width] -> [batch, out, height', width']"""

    def __init__(self, source: nn.Conv2d, weights: Quantizer | None, inputs: Quantizer | None) -> None:
        super().__init__(source, weights, inputs)
        self.kernel_size, self.stride = source.kernel_size, source.stride
        self.padding = (0, 0) if source.padding == "valid" else source.padding
        self.dilation, self.groups = source.dilation, source.groups

    def channels_last(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    def row_count(self, x: Tensor) -> int:
        return x.shape[0] * math.prod(self._positions(x))

    def rows_at(self, x: Tensor, picked: Tensor) -> Tensor:
        """The patches under the kernel, [picked, in * kernel]; only those are gathered, for there are many."""
        if self.groups != 1 or isinstance(self.padding, str):
            raise NotImplementedError("grouped convolutions and named padding have no single matrix")
        rows, columns = self._positions(x)
        x = F.pad(x, (self.padding[1], self.padding[1], self.padding[0], self.padding[0]))
        taps = [
            start[:, None] * stride + torch.arange(size, device=x.device) * spread  # [picked, kernel size]
            for start, stride, size, spread in zip(
                (picked // columns % rows, picked % columns), self.stride, self.kernel_size, self.dilation, strict=True
            )
        ]
        image = picked // (rows * columns)
        patches = x.permute(0, 2, 3, 1)[image[:, None, None], taps[0][:, :, None], taps[1][:, None, :]]
        return patches.permute(0, 3, 1, 2).flatten(1)  # from [picked, height, width, in]

    def _positions(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the output."""
        padding = (0, 0) if isinstance(self.padding, str) else self.padding
        rows, columns = (
            (side + 2 * pad - spread * (size - 1) - 1) // stride + 1
            for side, pad, spread, size, stride in zip(
                x.shape[2:], padding, self.dilation, self.kernel_size, self.stride, strict=True
            )
        )
        return rows, columns

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.rounding is not None and self.tiles(x.shape[2:]):
            # the same as one matrix product, whose gradients cost a fraction of a convolution's with three channels
            return F.linear(patches(x, self.kernel_size), weight.flatten(1), bias).permute(0, 3, 1, 2)
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    @property
    def cuts_patches(self) -> bool:
        """Whether each output is a patch of the image that no other output sees; what makes no whole patch is lost."""
        return (self.stride, self.padding, self.dilation, self.groups) == (self.kernel_size, (0, 0), (1, 1), 1)

    def tiles(self, sides: Sequence[int]) -> bool:
        """Whether the kernel cuts an image of this height and width into patches and leaves nothing out."""
        return self.cuts_patches and all(side % size == 0 for side, size in zip(sides, self.kernel_size, strict=True))


class QuantizedConvTranspose2d(QuantizedLayer):
    """[batch, in, height, width] -> [batch, out, height', width'], each pixel to a patch of its own."""

    out_dim = 1

    def __init__(self, source: nn.ConvTranspose2d, weights: Quantizer | None, inputs: Quantizer | None) -> None:
        super().__init__(source, weights, inputs)
        self.stride, self.dilation, self.groups = source.stride, source.dilation, source.groups
        self.padding: tuple[int, ...] = tuple(int(side) for side in source.padding)  # never a word here
        self.output_padding = source.output_padding

    def weight_rows(self) -> Tensor:
        return self.weight.flatten(2).permute(1, 2, 0).contiguous()  # [out, taps, in] from [in, out, height, width]

    def channels_last(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv_transpose2d(
            x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
        )


class QuantizedProduct(nn.Module):
    """left [batch, heads, n, k] @ right [batch, heads, k, m], each with a quantizer (or None).

    With `divides` the left side are exponentials, 1 the largest of each row, and the product is divided by `total`
    [batch, heads, n, 1], their sum."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.divides = False
        self.left: Quantizer | None = None
        self.right: Quantizer | None = None

    @property
    def active(self) -> bool:
        """Whether the product must be computed as it stands, rather than by a fused float kernel."""
        return bool(self._forward_pre_hooks) or any(q is not None and q.enabled for q in (self.left, self.right))

    def forward(self, left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
        out = self.multiply(left, right)
        return out if total is None else out / total

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        if self.left is not None and self.right is not None and settled(self.left, self.right, left, right):
            return (self.left.integers(left) @ self.right.integers(right)).mul_(self.left.scale * self.right.scale)
        if self.left is not None:
            left = self.left(left)
        if self.right is not None:
            right = self.right(right)
        return left @ right


def patches(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """An image of whole patches, [batch, in, height, width], as [batch, rows, columns, in * kernel]."""
    down, right = kernel
    tiles = x.unflatten(3, (-1, right)).unflatten(2, (-1, down))  # [batch, in, rows, down, columns, right]
    return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3)


def settled(first: Quantizer, second: Quantizer, *operands: Tensor) -> bool:
    """Whether both are integers for good, and no operand wants a gradient."""
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    return first.settled and second.settled and not learns


def add_to_bias(layer: Any, shift: Tensor) -> None:
    """Add a constant per output of a plain or a quantized layer; one without a bias gets one."""
    if layer.bias is None:
        layer.bias = nn.Parameter(torch.zeros_like(shift), requires_grad=False)
    layer.bias.data = layer.bias.data + shift


def quantized_sites(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, QuantizedLayer | QuantizedProduct]]:
    """(full name, module) of every layer and product below `prefix`, in forward order."""
    root = model.get_submodule(prefix) if prefix else model
    for name, module in root.named_modules(prefix=prefix):
        if isinstance(module, (QuantizedLayer, QuantizedProduct)):
            yield name, module


def quantizers(model: nn.Module) -> Iterator[Quantizer]:
    return (module for module in model.modules() if isinstance(module, Quantizer))
