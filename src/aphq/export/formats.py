"""Which integers an ONNX graph uses for a quantizer: the same numbers, in the types that kernels are fast with.

A code q in [0, 2^bits - 1] with zero-point z stands for (q - z) * scale. Inputs of layers keep their codes as unsigned
bytes. Operands of attention products and weights are centred, q - z, wherever that fits in eight signed bits: always
below 8 bits, and at 8 bits for symmetric formats. Nothing is rounded anew in either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aphq.quant.affine import top_code
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer

Array = NDArray[Any]


@dataclass(frozen=True)
class Format:
    """Integers of the zero-point's type between `low` and `high`; value = (integer - zero_point) * scale.

    Each is one number, or an array that broadcasts against the tensor."""

    scale: Array  # float32
    zero_point: Array  # uint8 or int8, like `scale`
    low: Array  # int64
    high: Array

    @property
    def per_tensor(self) -> bool:
        """Whether one scale and zero-point serve the whole tensor; the bounds may still differ."""
        return self.scale.size == 1

    @property
    def clips(self) -> bool:
        """Whether the type itself holds integers beyond the bounds."""
        info = np.iinfo(self.zero_point.dtype)
        return bool((self.low > info.min).any() or (self.high < info.max).any())

    def bounds(self) -> tuple[Array, Array]:
        """The smallest and largest value, as float32."""
        zero_point = self.zero_point.astype(np.int64)
        low, high = (self.low - zero_point) * self.scale, (self.high - zero_point) * self.scale
        return low.astype(np.float32), high.astype(np.float32)

    def scaled(self, factor: float) -> Format:
        """For a tensor that is `factor` times larger."""
        return replace(self, scale=(self.scale * np.float32(factor)).astype(np.float32))

    def with_one_scale(self) -> tuple[Format, Array, Array]:
        """The format with the mean scale and no zero-point for all groups; the factor by which each group's own scale
        is larger; and the offset, zero_point * scale.

        Dividing the tensor by the factor, adding the offset and quantizing that gives the same integers."""
        shared = self.scale.mean(dtype=np.float32).reshape(1)
        form = replace(self, scale=shared, zero_point=np.zeros(1, self.zero_point.dtype))
        return form, self.scale / shared, (self.zero_point * shared).astype(np.float32)


def activation_format(quantizer: Quantizer, signed: bool = False) -> Format:
    """Of an input; `signed` asks for centred integers where they fit, as in attention products. What is never negative
    stays unsigned: OpenVINO adds 128 to signed integers before it rounds, which costs a float its last bits."""
    scale = quantizer.scale.detach().cpu().numpy().astype(np.float32)
    zero_point = quantizer.zero_point.detach().cpu().numpy().astype(np.int64)
    top = top_code(quantizer.bits)
    if signed and zero_point.any() and (zero_point <= 128).all() and (top - zero_point <= 127).all():
        return Format(scale, np.zeros_like(zero_point, np.int8), -zero_point, top - zero_point)
    zeros, tops = np.zeros_like(zero_point), np.full_like(zero_point, top)
    return Format(scale, zero_point.astype(np.uint8), zeros, tops)


@dataclass(frozen=True)
class WeightFormat:
    """The integers of a weight; value = (integer + shift) * scale, per output channel."""

    integers: Array  # int8, like the weight
    scale: Array  # float32 [channels]
    shift: Array  # int64 [channels], zero wherever the centred codes fit in eight bits
    codes: Array  # uint8: the quantizer's own
    zero_point: Array  # int64 [channels]
    bits: int

    def column_sums(self) -> Array:
        """The sum of (integer + shift) over a channel's inputs, int64 [channels]."""
        flat = self.integers.reshape(len(self.integers), -1).astype(np.int64)
        return flat.sum(1) + self.shift * flat.shape[1]


def weight_format(layer: QuantizedLayer) -> WeightFormat:
    quantizer = layer.weight_quantizer
    assert quantizer is not None
    channels = layer.weight.shape[0]
    codes = quantizer.codes(layer.weight.data).cpu().numpy().astype(np.int64)
    scale = np.broadcast_to(quantizer.scale.detach().cpu().numpy().reshape(-1), (channels,)).astype(np.float32)
    point = np.broadcast_to(quantizer.zero_point.cpu().numpy().reshape(-1), (channels,)).astype(np.int64)
    fits = (point <= 128) & (top_code(quantizer.bits) - point <= 127)
    minus = np.where(fits, point, 128)  # what is taken off the codes
    integers = codes - minus.reshape(-1, *(1,) * (codes.ndim - 1))
    return WeightFormat(integers.astype(np.int8), scale, minus - point, codes.astype(np.uint8), point, quantizer.bits)
