"""Quantized layers and attention products as the ONNX patterns that runtimes turn into integer kernels.

A linear layer is Quantize, Dequantize, Gemm with dequantized int8 weights and int32 bias, on a matrix [rows, channels]:
ONNX Runtime makes a QGemm of it, OpenVINO an int8 FullyConnected. A convolution whose kernel tiles the image is the
same Gemm on its tiles. A product is a MatMul of two dequantized tensors with one scale each; scales that differ by
head are divided out of the operands and multiplied back after the product, which changes nothing but float rounding.

Fewer than eight bits are clipped to their range in float right before Quantize, so that Quantize and Dequantize stay
neighbours, which is what the fusions look for. Four bits and less are stored as UINT4 and widened to int8 by nodes
that a runtime folds away when it loads the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from aphq.export.formats import Array, Format, WeightFormat, activation_format, weight_format
from aphq.export.graph import Value
from aphq.export.operators import Context
from aphq.extras import require
from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, QuantizedProduct
from aphq.quant.quantizer import Quantizer

FOUR_BITS = 4
BIAS_ERROR = 1e-4  # of a typical output: a bias that int32 would round by more stays in float


@dataclass(frozen=True)
class Style:
    """What differs between the runtimes that a file may be tuned for."""

    integer_bias: bool  # QGemm takes no other; OpenVINO makes it a float anyway
    repeat: bool  # Quantize and Dequantize again right before a product, although its operands are quantized already


STYLES = {
    "any": Style(integer_bias=True, repeat=True),
    "onnxruntime": Style(integer_bias=True, repeat=True),
    "openvino": Style(integer_bias=False, repeat=False),
}


def quantize(context: Context, x: str, form: Format, site: str) -> str:
    """`x` through integers: Clip where needed, Quantize, Dequantize."""
    graph = context.graph
    scale = graph.constant(form.scale.reshape(()), f"{site}.scale")
    zero_point = graph.constant(form.zero_point.reshape(()), f"{site}.zero_point")
    if form.clips:
        x = _clip(context, x, *form.bounds(), site)
    integers = graph.node("QuantizeLinear", [x, scale, zero_point], site)
    return graph.node("DequantizeLinear", [integers, scale, zero_point], site)


def _clip(context: Context, x: str, low: Array, high: Array, site: str) -> str:
    if low.size == 1:
        bounds = [context.graph.constant(bound.reshape(()), f"{site}.bound") for bound in (low, high)]
        return context.graph.node("Clip", [x, *bounds], site)
    above = context.graph.node("Max", [x, context.graph.constant(low, f"{site}.low")], site)
    return context.graph.node("Min", [above, context.graph.constant(high, f"{site}.high")], site)


# -- layers ----------------------------------------------------------------------------------------------------------


def layer(context: Context, shape: tuple[int, ...], x: Value, module: QuantizedLayer, site: str, style: Style) -> Value:
    if not isinstance(module, QuantizedConv2d):
        return context.from_rows(_matrix(context, context.as_rows(x), module, site, style), shape, site)
    if not module.tiles(x.shape[2:]):
        return _convolution(context, shape, x, module, site)
    rows = _matrix(context, _tile(context, x, module), module, site, style)
    batch, channels, height, width = shape
    channels_last = (batch, height, width, channels)
    return context.transpose(Value(context.graph.reshape(rows, channels_last, site), channels_last), (0, 3, 1, 2))


def _tile(context: Context, x: Value, module: QuantizedConv2d) -> str:
    """[batch, in, height, width] -> [patches, in * kernel]"""
    batch, channels, height, width = x.shape
    down, right = module.kernel_size
    split = (batch, channels, height // down, down, width // right, right)
    tiles = context.graph.node("Transpose", [context.graph.reshape(x.name, split)], perm=[0, 2, 4, 1, 3, 5])
    return context.graph.reshape(tiles, (-1, channels * down * right))


def _matrix(context: Context, rows: str, module: QuantizedLayer, site: str, style: Style) -> str:
    """[rows, in] -> [rows, out]"""
    bias = None if module.bias is None else module.bias.detach().cpu().numpy().astype(np.float64)
    inputs = None
    if module.input_quantizer is not None:
        inputs = activation_format(module.input_quantizer).scaled(1 / context.plan.inputs.get(site, 1.0))
        if site in context.plan.shifted_layers:
            bias = _without_shift(module, inputs, bias)
            inputs = replace(inputs, zero_point=np.zeros_like(inputs.zero_point))
        rows = quantize(context, rows, inputs, f"{site}.input")
    if module.weight_quantizer is None:
        weight = module.weight.detach().flatten(1).cpu().numpy().astype(np.float32)
        operands = [rows, context.graph.constant(weight, f"{site}.weight")]
        if bias is not None:
            operands.append(context.graph.constant(bias.astype(np.float32), f"{site}.bias"))
        return context.graph.node("Gemm", operands, site, transB=1)
    return _integer_matrix(context, rows, inputs, module, bias, site, style)


def _integer_matrix(
    context: Context,
    rows: str,
    inputs: Format | None,
    module: QuantizedLayer,
    bias: Array | None,
    site: str,
    style: Style,
) -> str:
    weights, shared = weight_format(module), context.plan.outputs.get(site)
    scale: Array = weights.scale * np.float32(context.plan.inputs.get(site, 1.0))
    if shared is not None:
        scale = scale / shared.divide
        bias = None if bias is None else bias / shared.divide
    operands = [rows, _dequantized(context, _stored(context, weights, site), scale, f"{site}.weight")]
    if bias is not None and inputs is not None and style.integer_bias and _bias_error(weights, inputs) < BIAS_ERROR:
        step = scale * inputs.scale.reshape(())
        integers = np.round(bias / step)
        if np.abs(integers).max(initial=0) < 2**31:
            stored = context.graph.constant(integers.astype(np.int32), f"{site}.bias_integers")
            operands.append(_dequantized(context, stored, step, f"{site}.bias", np.int32))
            bias = None
    out = context.graph.node("Gemm", operands, site, transB=1)
    if weights.shift.any():  # (integer + shift) * scale: the second part is a multiple of the sum of the inputs
        # summed by a product with ones: OpenVINO gets ReduceSum of a dequantized tensor wrong
        ones = context.graph.constant(np.ones((int(np.prod(module.weight.shape[1:])), 1), np.float32), "ones")
        total = context.graph.node("MatMul", [rows, ones], site)
        column = context.graph.constant((weights.shift * scale).astype(np.float32)[None], f"{site}.shift")
        out = context.graph.node("Add", [out, context.graph.node("Mul", [total, column], site)], site)
    out = _add(context, out, bias, site)
    return out if shared is None else quantize(context, out, shared.form, f"{site}.output")


def _add(context: Context, x: str, bias: Array | None, site: str) -> str:
    if bias is None:
        return x
    return context.graph.node("Add", [x, context.graph.constant(bias.astype(np.float32), f"{site}.bias")], site)


def _without_shift(module: QuantizedLayer, inputs: Format, bias: Array | None) -> Array:
    """The bias for an input to which zero_point * scale was added."""
    weights = weight_format(module)
    extra = int(inputs.zero_point.reshape(())) * float(inputs.scale.reshape(())) * weights.column_sums() * weights.scale
    return -extra if bias is None else bias - extra


def _bias_error(weights: WeightFormat, inputs: Format) -> float:
    """Half a step of the int32 bias, relative to a typical sum of products: inputs of a quarter of their range."""
    flat = weights.integers.reshape(len(weights.integers), -1).astype(np.float64)
    levels = float((inputs.high - inputs.low).max()) / 4
    return 0.5 / max(1e-9, levels * float(np.sqrt((flat**2).sum(1).mean())))


def _dequantized(context: Context, integers: str, scale: Array, site: str, kind: Any = np.int8) -> str:
    """Per output channel."""
    scales = context.graph.constant(scale.astype(np.float32), f"{site}_scale")
    zeros = context.graph.constant(np.zeros(len(scale), kind), f"{site}_zero_point")
    return context.graph.node("DequantizeLinear", [integers, scales, zeros], site, axis=0)


def _stored(context: Context, weights: WeightFormat, site: str) -> str:
    """The integers of a weight as a matrix: bytes, or half bytes that are widened when the model is loaded."""
    graph, rows = context.graph, len(weights.integers)
    if weights.bits > FOUR_BITS:
        return graph.constant(weights.integers.reshape(rows, -1), f"{site}.weight_integers")
    codes = graph.four_bit_constant(weights.codes.reshape(rows, -1), f"{site}.weight_integers")
    wide = graph.node("Cast", [codes], site, to=require("onnx").TensorProto.INT8)
    point = graph.constant(weights.zero_point.astype(np.int8)[:, None], f"{site}.weight_code_zero")
    return graph.node("Sub", [wide, point], site)


def _convolution(context: Context, shape: tuple[int, ...], x: Value, module: QuantizedConv2d, site: str) -> Value:
    """Any other kernel: Conv on dequantized tensors, its bias in float."""
    graph, name = context.graph, x.name
    if module.input_quantizer is not None:
        name = quantize(context, name, activation_format(module.input_quantizer), f"{site}.input")
    if module.weight_quantizer is None:
        weight = graph.constant(module.weight.detach().cpu().numpy().astype(np.float32), f"{site}.weight")
    else:
        weights = weight_format(module)
        zeros = graph.constant(weights.zero_point.astype(np.uint8), f"{site}.weight_zero_point")
        scales = graph.constant(weights.scale, f"{site}.weight_scale")
        weight = graph.node("DequantizeLinear", [graph.constant(weights.codes), scales, zeros], site, axis=0)
    bias = [] if module.bias is None else [context.name(module.bias)]
    out = graph.node(
        "Conv",
        [name, weight, *bias],
        site,
        kernel_shape=list(module.kernel_size),
        strides=list(module.stride),
        pads=[*module.padding, *module.padding],
        dilations=list(module.dilation),
        group=module.groups,
    )
    return Value(out, shape)


# -- products --------------------------------------------------------------------------------------------------------


def product(
    context: Context,
    shape: tuple[int, ...],
    left: Value,
    right: Value,
    module: QuantizedProduct,
    site: str,
    style: Style,
) -> Value:
    names, factor = [], torch.ones(())
    for x, quantizer, side in ((left, module.left, "left"), (right, module.right, "right")):
        name, one = _operand(context, x, quantizer, f"{site}.{side}", style)
        names.append(name)
        factor = factor * one
    return context.multiply(Value(context.graph.node("MatMul", names, site), shape), factor, site)


def _operand(
    context: Context, x: Value, quantizer: Quantizer | None, site: str, style: Style
) -> tuple[str, torch.Tensor]:
    """The operand through integers with one scale, and the factor, [heads, 1, 1] or (), for the product."""
    if quantizer is None:
        return x.name, torch.ones(())
    if site in context.plan.ready:
        if not style.repeat:
            return x.name, context.plan.ready[site]
        scale = np.array(context.plan.scales[site], np.float32)
        form = Format(scale, np.zeros((), np.int8), np.array(-128), np.array(127))
        return quantize(context, x.name, form, site), context.plan.ready[site]
    form = activation_format(quantizer, signed=True)
    if form.per_tensor:
        return quantize(context, x.name, form, site), torch.ones(())
    form, factor, offset = form.with_one_scale()
    x = context.multiply(x, torch.from_numpy(1 / factor), site)
    if not offset.any():
        return quantize(context, x.name, form, site), torch.from_numpy(factor)
    # eight asymmetric bits that differ by head: no integer kernel takes them, so the product is exact but in float
    shift = context.graph.constant(offset, f"{site}.offset")
    codes = quantize(context, context.graph.node("Add", [x.name, shift], site), form, site)
    return context.graph.node("Sub", [codes, shift], site), torch.from_numpy(factor)
