from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from aphq.quant.affine import affine_from_range, quantize
from aphq.quant.layers import (
    QuantizedConv2d,
    QuantizedConvTranspose2d,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedProduct,
    patches,
    quantized_sites,
    quantizers,
)
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding

bits = st.integers(2, 8)
seeds = st.integers(0, 10**6)


@pytest.mark.parametrize(
    ("arguments", "cuts", "tiles"),
    [
        ({"stride": 4}, True, True),
        ({"stride": 4, "padding": "valid"}, True, True),
        ({"stride": (4, 4), "kernel_size": (4, 4), "groups": 3}, False, False),
        ({"stride": 5, "kernel_size": 5}, True, False),  # drops two columns
        ({"stride": 2}, False, False),
        ({"stride": 4, "padding": 1}, False, False),
        ({"stride": 1, "padding": "same"}, False, False),
        ({"stride": 4, "dilation": 2}, False, False),
    ],
)
def test_which_kernels_cut_an_image_into_patches(arguments: dict[str, Any], cuts: bool, tiles: bool) -> None:
    layer = QuantizedConv2d(nn.Conv2d(3, 6, **{"kernel_size": 4, **arguments}), None, None)
    assert (layer.cuts_patches, layer.tiles((12, 12))) == (cuts, tiles)
    assert not layer.tiles((12, 13))
    if tiles:
        x = torch.randn(2, 3, 12, 12)
        rows = F.linear(patches(x, layer.kernel_size), layer.weight.flatten(1), layer.bias)
        torch.testing.assert_close(rows.permute(0, 3, 1, 2), layer(x))


def fitted(x: Tensor, bits: int, symmetric: bool, shape: tuple[int, ...], exact: bool) -> Quantizer:
    """A quantizer whose range covers most of `x`; `exact` makes its scale a power of two."""
    quantizer = Quantizer(bits, symmetric, shape)
    end = torch.full(shape, 0.8 * x.detach().abs().max().item())
    quantizer.set_range(-0.6 * end * (1 + torch.rand(shape)), end)
    if exact:
        quantizer.scale.data = 2 ** quantizer.scale.data.log2().round()
    quantizer.enabled = True
    return quantizer.to(x.dtype)


def integers(x: Tensor, quantizer: Quantizer) -> Tensor:
    """int64 codes less the zero-point."""
    scale, zero_point = quantizer.scale.data, quantizer.zero_point
    return quantize(x, scale, zero_point, quantizer.bits).long() - zero_point.long()


def agree(fake: Tensor, accumulator: Tensor, scale: Tensor, exact: bool, bias: Tensor | float = 0.0) -> None:
    """`accumulator * scale`, the one multiplication after integer arithmetic, is what the fake-quantized gave."""
    wanted = accumulator.to(fake.dtype) * scale + bias
    if exact:  # every product and sum is representable: not a single rounding
        assert torch.equal(fake, wanted)
    else:
        torch.testing.assert_close(fake, wanted, rtol=1e-10, atol=1e-10)


def precision(exact: bool) -> torch.dtype:
    return torch.float32 if exact else torch.float64


@settings(deadline=None, max_examples=40)
@given(bits, bits, st.booleans(), st.booleans(), st.booleans(), seeds)
def test_a_linear_layer_is_integer_arithmetic(
    weight_bits: int, input_bits: int, symmetric: bool, per_channel: bool, exact: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 5, 12, dtype=precision(exact))
    source = nn.Linear(12, 7, bias=not exact).to(x.dtype)
    weights = fitted(source.weight, weight_bits, symmetric, (7, 1) if per_channel else (1, 1), exact)
    layer = QuantizedLinear(source, weights, fitted(x, input_bits, symmetric, (1,), exact))
    with torch.no_grad():
        fake = layer(x)
    accumulator = integers(x, layer.input_quantizer) @ integers(source.weight, weights).T
    scale = layer.input_quantizer.scale.data * weights.scale.data.reshape(-1)
    agree(fake, accumulator, scale, exact, 0.0 if exact else source.bias.data)


@settings(deadline=None, max_examples=40)
@given(bits, bits, st.booleans(), st.booleans(), st.sampled_from([(4, 4, 0), (3, 2, 1)]), seeds)
def test_a_convolution_is_integer_arithmetic(
    weight_bits: int, input_bits: int, symmetric: bool, exact: bool, geometry: tuple[int, int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 8, 8, dtype=precision(exact))
    size, stride, padding = geometry
    source = nn.Conv2d(3, 5, size, stride, padding, bias=not exact).to(x.dtype)
    weights = fitted(source.weight, weight_bits, symmetric, (5, 1, 1, 1), exact)
    layer = QuantizedConv2d(source, weights, fitted(x, input_bits, symmetric, (1,), exact))
    with torch.no_grad():
        fake = layer(x)
    # padding adds zeros, which are exact: codes equal to the zero-point
    columns = F.unfold(integers(x, layer.input_quantizer).double(), size, padding=padding, stride=stride).long()
    accumulator = integers(source.weight, weights).flatten(1) @ columns  # [batch, out, positions]
    scale = (layer.input_quantizer.scale.data * weights.scale.data.reshape(-1))[:, None, None]
    bias = 0.0 if exact else source.bias.data[:, None, None]
    agree(fake, accumulator.reshape(fake.shape), scale, exact, bias)


@settings(deadline=None, max_examples=40)
@given(bits, st.booleans(), st.booleans(), st.booleans(), seeds)
def test_an_attention_product_is_integer_arithmetic(
    bits: int, symmetric: bool, per_head: bool, exact: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    left, right = torch.randn(2, 3, 4, 6, dtype=precision(exact)), torch.randn(2, 3, 6, 5, dtype=precision(exact))
    shape = (3, 1, 1) if per_head else (1,)
    product = QuantizedProduct(3)
    product.left = fitted(left, bits, symmetric, shape, exact)
    product.right = fitted(right, bits, symmetric, shape, exact)
    with torch.no_grad():
        fake = product(left, right)
    accumulator = integers(left, product.left) @ integers(right, product.right)
    agree(fake, accumulator, product.left.scale.data * product.right.scale.data, exact)


# -- layers ------------------------------------------------------------------------------------------------------------


def linear(bits: int | None = 4) -> QuantizedLinear:
    torch.manual_seed(0)
    source = nn.Linear(12, 7)
    weights = None if bits is None else fitted(source.weight, bits, False, (7, 1), False)
    return QuantizedLinear(source, weights, None).requires_grad_(False)


def test_a_layer_keeps_the_parameter_names_of_the_one_it_replaces() -> None:
    assert set(linear(None).state_dict()) == {"weight", "bias"}
    layer = QuantizedLinear(nn.Linear(3, 2), Quantizer(4, False, (2, 1)), Quantizer(4, False, (1,)))
    assert {"weight", "bias", "weight_quantizer.scale", "input_quantizer.zero_point"} <= set(layer.state_dict())


def test_disabled_or_absent_quantizers_change_no_bit() -> None:
    x, source = torch.randn(4, 12), nn.Linear(12, 7)
    for weights in (None, Quantizer(4, False, (7, 1))):
        assert torch.equal(QuantizedLinear(source, weights, None)(x), source(x))
    image, convolution = torch.randn(1, 3, 9, 9), nn.Conv2d(3, 4, 3, 2, 1, dilation=2)
    assert torch.equal(QuantizedConv2d(convolution, None, None)(image), convolution(image))


def test_baking_puts_the_weight_on_the_grid_and_changes_no_output() -> None:
    layer, x = linear(), torch.randn(4, 12)
    with torch.no_grad():
        before = layer(x)
        layer.bake()
        assert torch.equal(layer(x), before)
        once = layer.weight.clone()
        layer.bake()
    assert torch.equal(layer.weight, once)


def test_baking_keeps_the_learned_rounding() -> None:
    layer, x = linear(), torch.randn(4, 12)
    assert layer.weight_quantizer is not None
    layer.rounding = LearnedRounding(layer.weight, layer.weight_quantizer)
    layer.rounding.alpha.data = -10 * layer.rounding.alpha.data.sign()  # the other way than the nearest
    with torch.no_grad():
        layer.rounding.soften(torch.tensor(2.0))
        before = layer(x)
        layer.bake()
        assert layer.rounding is None
        assert torch.equal(layer(x), before)
        assert not torch.equal(layer(x), linear()(x))


def test_a_layer_without_a_bias_gets_one() -> None:
    source = nn.Linear(3, 2, bias=False)
    layer, x = QuantizedLinear(source, None, None), torch.randn(4, 3)
    layer.add_to_bias(torch.tensor([1.0, -2.0]))
    layer.add_to_bias(torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(layer(x), source(x) + torch.tensor([1.5, -1.5]))
    assert "bias" in layer.state_dict()


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (QuantizedLinear(nn.Linear(6, 4), None, None), torch.randn(2, 5, 6)),
        (QuantizedConv2d(nn.Conv2d(3, 4, 4, 4), None, None), torch.randn(2, 3, 8, 12)),
        (QuantizedConv2d(nn.Conv2d(3, 4, 3, 2, 1, bias=False), None, None), torch.randn(2, 3, 8, 8)),
        (QuantizedConv2d(nn.Conv2d(3, 4, (3, 5), (1, 2), (2, 1), 2), None, None), torch.randn(2, 3, 9, 12)),
    ],
)
def test_a_layer_is_a_matrix_product_of_its_rows(layer: QuantizedLayer, x: Tensor) -> None:
    out = layer(x)
    wanted = (out if out.ndim == 3 else out.flatten(2).transpose(1, 2)).flatten(0, 1)
    count = layer.row_count(x)
    assert count == len(wanted)
    picked = torch.randperm(count)[: count // 2]
    rows = F.linear(layer.rows_at(x, picked), layer.weight_rows(), layer.bias)
    torch.testing.assert_close(rows, wanted[picked])


def test_a_transposed_convolution_makes_a_patch_of_every_pixel() -> None:
    layer, x = QuantizedConvTranspose2d(nn.ConvTranspose2d(6, 4, 2, 2), None, None), torch.randn(2, 6, 3, 5)
    out = layer(x)
    patches = out.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(2)
    picked = torch.randperm(layer.row_count(x))[:7]
    rows = layer.rows_at(x, picked) @ layer.weight_rows().flatten(0, 1).T  # [picked, out * taps]
    assert layer.bias is not None
    torch.testing.assert_close(rows.unflatten(1, (4, 4)) + layer.bias[:, None], patches[picked])


def test_a_transposed_convolution_is_quantized_per_output_channel() -> None:
    source = nn.ConvTranspose2d(6, 4, 2, 2)
    source.weight.data[:, 2] *= 100
    weights = Quantizer(8, False, (1, 4, 1, 1))
    weights.set_range(source.weight.amin((0, 2, 3)), source.weight.amax((0, 2, 3)))
    weights.enabled = True
    layer, x = QuantizedConvTranspose2d(source, weights, None), torch.randn(2, 6, 3, 5)
    error = (layer(x) - source(x)).abs().amax((0, 2, 3))
    assert (error[[0, 1, 3]] < error[2] / 20).all()
    rounding = LearnedRounding(source.weight, weights)
    rounding.soften(torch.tensor(20.0))
    off = (rounding() - source.weight).abs() / weights.scale
    assert (off <= 0.51).all(), "soft weights start at the float ones, but for a clipped end"


def test_a_grouped_convolution_has_no_matrix() -> None:
    with pytest.raises(NotImplementedError, match="grouped"):
        QuantizedConv2d(nn.Conv2d(4, 4, 3, groups=4), None, None).rows_at(torch.randn(1, 4, 8, 8), torch.arange(2))


def learning(source: nn.Conv2d) -> tuple[QuantizedConv2d, LearnedRounding]:
    """A convolution with soft weights, none of them on the grid."""
    layer = QuantizedConv2d(source, fitted(source.weight, 4, False, (len(source.weight), 1, 1, 1), False), None)
    assert layer.weight_quantizer is not None
    rounding = LearnedRounding(layer.weight, layer.weight_quantizer)
    rounding.soften(torch.tensor(2.0))
    layer.rounding = rounding
    return layer, rounding


def convolved(layer: QuantizedConv2d, x: Tensor) -> tuple[Tensor, int]:
    """What the layer says, and how often it asked torch's convolution."""
    asked, original = 0, F.conv2d

    def counted(*arguments: Any) -> Tensor:
        nonlocal asked
        asked += 1
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", counted)
        return layer(x), asked


def reference(layer: QuantizedConv2d, weight: Tensor, x: Tensor) -> Tensor:
    return F.conv2d(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(st.tuples(*[st.integers(1, 4)] * 6), st.booleans(), st.sampled_from([0, "valid"]), seeds)
def test_while_it_learns_a_patch_convolution_is_a_matrix_product(
    sizes: tuple[int, ...], bias: bool, padding: int | str, seed: int
) -> None:
    torch.manual_seed(seed)
    inputs, outputs, height, width, rows, columns = sizes
    patch = (height, width)
    layer, rounding = learning(nn.Conv2d(inputs, outputs, patch, patch, padding, bias=bias))
    x = torch.randn(2, inputs, rows * height, columns * width)
    out, asked = convolved(layer, x)
    assert asked == 0
    expected = reference(layer, rounding(), x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn_like(out)
    grads = [torch.autograd.grad(y, rounding.alpha, direction, retain_graph=True)[0] for y in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("source", "size"),
    [
        (nn.Conv2d(3, 4, 4, 2), (8, 8)),  # overlapping
        (nn.Conv2d(3, 4, 2, 4), (8, 8)),  # with gaps
        (nn.Conv2d(3, 4, (2, 4), (4, 2)), (8, 8)),
        (nn.Conv2d(3, 4, 4, 4, padding=2), (8, 8)),
        (nn.Conv2d(3, 4, 1, 1, padding=(0, 1)), (8, 8)),
        (nn.Conv2d(3, 4, 3, padding="same"), (9, 9)),
        (nn.Conv2d(4, 4, 2, 2, groups=2), (8, 8)),
        (nn.Conv2d(3, 4, 2, 2, dilation=2), (8, 8)),
        (nn.Conv2d(3, 4, 4, 4), (10, 8)),  # some of the image is left over
        (nn.Conv2d(3, 4, 4, 4), (8, 11)),
    ],
)
def test_any_other_convolution_stays_one(source: nn.Conv2d, size: tuple[int, int]) -> None:
    layer, rounding = learning(source)
    x = torch.randn(2, source.in_channels, *size)
    out, asked = convolved(layer, x)
    assert asked == 1
    assert torch.equal(out, reference(layer, rounding(), x))


def test_a_patch_convolution_that_does_not_learn_stays_one() -> None:
    layer, _ = learning(nn.Conv2d(3, 4, 4, 4))
    layer.rounding = None
    assert convolved(layer, torch.randn(2, 3, 8, 8))[1] == 1


def test_a_product_is_active_when_quantized_or_watched() -> None:
    product = QuantizedProduct(2)
    assert not product.active
    product.left = Quantizer(4, False, (1,))
    assert not product.active
    product.left.enabled = True
    assert product.active
    product.left = None
    handle = product.register_forward_pre_hook(lambda *_: None)
    assert product.active
    handle.remove()
    assert not product.active


def test_sites_carry_their_full_names_in_order() -> None:
    inner = nn.Sequential(linear(), nn.GELU(), QuantizedProduct(2))
    model = nn.ModuleDict({"a": linear(None), "b": inner})
    assert [name for name, _ in quantized_sites(model)] == ["a", "b.0", "b.2"]
    assert [name for name, _ in quantized_sites(model, "b")] == ["b.0", "b.2"]
    assert [name for name, _ in quantized_sites(model, "a")] == ["a"]
    assert len(list(quantizers(model))) == 1


def test_ranges_of_nothing_still_divide() -> None:
    scale, _ = affine_from_range(torch.zeros(3), torch.zeros(3), 4)
    assert (scale > 0).all()


def shuffled(channels: int) -> Tensor:
    return torch.randperm(channels, generator=torch.Generator().manual_seed(5))


def test_the_order_of_a_sum_does_not_change_a_bit() -> None:
    """Of whole numbers; products of rounded ones would differ with the machine that adds them up."""
    torch.manual_seed(0)
    order, x = shuffled(700), torch.randn(64, 700)
    source = nn.Linear(700, 30)
    weights = fitted(source.weight, 3, False, (30, 1), exact=False)
    layer = QuantizedLinear(source, weights, fitted(x, 3, False, (1,), exact=False))
    other = QuantizedLinear(nn.Linear(700, 30), weights, layer.input_quantizer)
    other.weight.data, other.bias.data = layer.weight.data[:, order], layer.bias.data
    with torch.no_grad():
        assert torch.equal(layer(x), other(x[:, order]))
    float_order = F.linear(x[:, order], other.weight, other.bias)
    assert not torch.equal(F.linear(x, layer.weight, layer.bias), float_order), "or the sum was too short to tell"


def test_the_order_of_the_tokens_does_not_change_a_product() -> None:
    torch.manual_seed(0)
    order, left, right = shuffled(500), torch.rand(2, 3, 5, 500), torch.randn(2, 3, 500, 8)
    product = QuantizedProduct(3)
    product.left, product.right = (fitted(x, 4, False, (3, 1, 1), exact=False) for x in (left, right))
    with torch.no_grad():
        assert torch.equal(product(left, right), product(left[..., order], right[:, :, order]))


def test_what_learns_gets_the_same_values_and_a_gradient() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 6)
    source = nn.Conv2d(3, 4, 3)
    layer = QuantizedConv2d(
        source, fitted(source.weight, 4, False, (4, 1, 1, 1), exact=False), fitted(x, 4, False, (1,), exact=False)
    )
    with torch.no_grad():
        plain = layer(x)
    wants = x.clone().requires_grad_()
    out = layer(wants)
    assert torch.allclose(out, plain, atol=1e-5)
    out.sum().backward()
    assert wants.grad is not None
    assert wants.grad.abs().sum() > 0
