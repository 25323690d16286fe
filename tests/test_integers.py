"""The simulation and the integers are the same thing: codes multiplied and added as integers, in numpy's int64, give
the fake-quantized output to the last rounding."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, QuantizedLinear, QuantizedProduct
from aphq.quant.quantizer import Quantizer

LAST_ROUNDING = 2e-6  # of the largest output: float32 sums of a few hundred terms
FORMATS = st.tuples(st.integers(2, 8), st.integers(2, 8), st.booleans(), st.booleans(), st.integers(0, 10_000))


def ranged(bits: int, symmetric: bool, x: Tensor, shape: tuple[int, ...]) -> Quantizer:
    """A quantizer for `x`, with one scale for each of the leading groups that `shape` has."""
    quantizer = Quantizer(bits, symmetric, shape)
    if len(shape) == 3:  # [heads, 1, 1]
        groups = x.transpose(0, 1).flatten(1)
    else:
        groups = x.flatten(1) if shape[0] > 1 else x.reshape(1, -1)
    quantizer.set_range(groups.amin(1) * 0.9, groups.amax(1) * 0.9)  # something is clipped, too
    quantizer.enabled = True
    return quantizer


def integers(quantizer: Quantizer, x: Tensor) -> tuple[Any, Any]:
    """(code - zero point as int64, scale as float64)"""
    codes = quantizer.codes(x).numpy().astype(np.int64) - quantizer.zero_point.numpy().astype(np.int64)
    assert np.abs(codes).max() < 2**quantizer.bits
    return codes, quantizer.scale.detach().numpy().astype(np.float64)


def close(got: Any, expected: Tensor) -> None:
    wanted = expected.numpy()
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wanted, rtol=0, atol=LAST_ROUNDING * max(1e-3, np.abs(wanted).max()))


def layer_of(cls: type[QuantizedLayer], source: Any, x: Tensor, wbits: int, abits: int, sym: tuple[bool, bool]) -> Any:
    weights = ranged(wbits, sym[0], source.weight.data, (len(source.weight),) + (1,) * (source.weight.ndim - 1))
    layer = cls(source, weights, ranged(abits, sym[1], x, (1,)))
    layer.bake()
    return layer.requires_grad_(False)


@settings(max_examples=25, deadline=None)
@given(FORMATS)
def test_a_linear_layer(format_: tuple[int, int, bool, bool, int]) -> None:
    wbits, abits, wsym, asym, seed = format_
    torch.manual_seed(seed)
    x, source = torch.randn(7, 48) + 0.3, nn.Linear(48, 5)
    layer = layer_of(QuantizedLinear, source, x, wbits, abits, (wsym, asym))
    a, a_scale = integers(layer.input_quantizer, x)
    w, w_scale = integers(layer.weight_quantizer, layer.weight)
    total = a @ w.T
    assert total.dtype == np.int64
    close(total * (a_scale * w_scale[:, 0]) + layer.bias.numpy().astype(np.float64), layer(x))


@settings(max_examples=15, deadline=None)
@given(FORMATS)
def test_a_convolution(format_: tuple[int, int, bool, bool, int]) -> None:
    wbits, abits, wsym, asym, seed = format_
    torch.manual_seed(seed)
    x, source = torch.randn(2, 3, 8, 8) + 0.3, nn.Conv2d(3, 6, 4, stride=4)
    layer = layer_of(QuantizedConv2d, source, x, wbits, abits, (wsym, asym))
    a, a_scale = integers(layer.input_quantizer, x)
    w, w_scale = integers(layer.weight_quantizer, layer.weight)
    windows = np.lib.stride_tricks.sliding_window_view(a, (4, 4), axis=(2, 3))[:, :, ::4, ::4]
    total = np.einsum("bcijkl,ockl->boij", windows, w)
    assert total.dtype == np.int64
    bias = layer.bias.numpy().astype(np.float64)[:, None, None]
    close(total * (a_scale * w_scale[:, 0, 0, 0])[:, None, None] + bias, layer(x))


@settings(max_examples=25, deadline=None)
@given(FORMATS)
def test_an_attention_product(format_: tuple[int, int, bool, bool, int]) -> None:
    left_bits, right_bits, symmetric, per_head, seed = format_
    torch.manual_seed(seed)
    left, right = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 16, 7) * 2
    product = QuantizedProduct(3)
    shape = (3, 1, 1) if per_head else (1,)
    product.left = ranged(left_bits, symmetric, left, shape)
    product.right = ranged(right_bits, symmetric, right, shape)
    a, a_scale = integers(product.left, left)
    b, b_scale = integers(product.right, right)
    total = a @ b
    assert total.dtype == np.int64
    with torch.no_grad():
        close(total * (a_scale * b_scale), product(left, right))


def test_the_accumulator_fits_in_32_bits() -> None:
    """The widest layer there is, ViT-H's 5120 inputs, with every code at its limit."""
    assert 255 * 255 * 5120 < 2**31


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_onnx_has_the_same_integers(tiny_vit: nn.Module, bits: int) -> None:
    """The codes in the exported file are the artifact's, zero-point by zero-point."""
    from aphq.export.formats import weight_format

    from .export.exports import calibrated

    model = calibrated(tiny_vit, f"w{bits}a8", weights__symmetric=False)
    for layer in model.modules():
        if isinstance(layer, QuantizedLayer):
            found = weight_format(layer)
            value = (found.integers.reshape(len(found.scale), -1) + found.shift[:, None]) * found.scale[:, None]
            np.testing.assert_array_equal(value.astype(np.float32), layer.weight.flatten(1).numpy())
