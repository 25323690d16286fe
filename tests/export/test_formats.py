"""The integers of a quantizer, as an exported graph has them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aphq.export.formats import activation_format, weight_format
from aphq.quant.layers import QuantizedLinear
from aphq.quant.quantizer import Quantizer


def quantizer(bits: int, lower: list[float], upper: list[float], symmetric: bool = False) -> Quantizer:
    shape = (len(lower), 1, 1) if len(lower) > 1 else (1,)
    found = Quantizer(bits, symmetric, shape)
    found.set_range(torch.tensor(lower), torch.tensor(upper))
    found.enabled = True
    return found


@given(st.integers(2, 8), st.floats(-3, 0), st.floats(0.01, 3), st.booleans(), st.booleans())
def test_the_values_are_the_quantizers(bits: int, lower: float, upper: float, symmetric: bool, signed: bool) -> None:
    made = quantizer(bits, [lower], [upper], symmetric)
    form = activation_format(made, signed)
    low, high = form.bounds()
    smallest, largest = made.limits()
    assert low == pytest.approx(float(smallest), abs=1e-6)
    assert high == pytest.approx(float(largest), abs=1e-6)
    info = np.iinfo(form.zero_point.dtype)
    assert info.min <= form.low.min()
    assert form.high.max() <= info.max
    assert form.clips == (bits < 8)


def test_products_get_signed_integers_where_they_fit() -> None:
    assert activation_format(quantizer(4, [-1.0], [3.0]), signed=True).zero_point.dtype == np.int8
    assert activation_format(quantizer(8, [-1.0], [1.0], symmetric=True), signed=True).zero_point.dtype == np.int8
    assert activation_format(quantizer(8, [-1.0], [3.0]), signed=True).zero_point.dtype == np.uint8
    softmax = activation_format(quantizer(4, [0.0], [1.0]), signed=True)
    assert softmax.zero_point.dtype == np.uint8, "what is never negative needs no sign"
    assert softmax.zero_point == 0
    assert activation_format(quantizer(4, [-1.0], [3.0])).zero_point.dtype == np.uint8


def test_one_scale_for_all_heads_gives_the_same_integers() -> None:
    made = quantizer(8, [-1.0, -0.1], [2.0, 3.0])
    x = torch.randn(4, 2, 5, 3)
    form, factor, offset = activation_format(made).with_one_scale()
    codes = np.clip(np.round((x.numpy() / factor + offset) / form.scale), form.low, form.high)
    np.testing.assert_array_equal(codes, made.codes(x).numpy())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8])
def test_weights_are_exact(bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    source = nn.Linear(40, 6)
    source.weight.data += torch.linspace(-0.2, 0.2, 6)[:, None]  # zero-points all over the range
    weights = Quantizer(bits, symmetric, (6, 1))
    weights.set_range(source.weight.data.amin(1), source.weight.data.amax(1))
    layer = QuantizedLinear(source, weights, None)
    layer.bake()
    form = weight_format(layer)
    assert form.integers.dtype == np.int8
    value = (form.integers + form.shift[:, None]) * form.scale[:, None]
    np.testing.assert_array_equal(value.astype(np.float32), layer.weight.detach().numpy())
    assert bool(form.shift.any()) == (bits == 8 and not symmetric)
    np.testing.assert_array_equal(form.column_sums(), (form.integers + form.shift[:, None]).sum(1))
