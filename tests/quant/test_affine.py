from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aphq.quant.affine import (
    affine_from_range,
    dequantize,
    fake_quantize,
    fake_quantize_learned,
    quantize,
    top_code,
)

bits = st.integers(2, 8)
ends = st.floats(-1e4, 1e4, width=32)
values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=32).map(torch.tensor)
shares = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=32).map(torch.tensor)


def form(a: float, b: float, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    return affine_from_range(torch.tensor([min(a, b)]), torch.tensor([max(a, b)]), bits, symmetric)


@given(values, ends, ends, bits, st.booleans())
def test_quantizing_twice_is_quantizing_once(x: Tensor, a: float, b: float, bits: int, symmetric: bool) -> None:
    scale, zero_point = form(a, b, bits, symmetric)
    once = fake_quantize(x, scale, zero_point, bits)
    assert torch.equal(fake_quantize(once, scale, zero_point, bits), once)


@given(values, ends, ends, bits, st.booleans())
def test_fake_quantizing_is_dequantizing_the_codes(x: Tensor, a: float, b: float, bits: int, symmetric: bool) -> None:
    scale, zero_point = form(a, b, bits, symmetric)
    codes = quantize(x, scale, zero_point, bits)
    assert torch.equal(codes, codes.round())
    assert codes.min() >= 0
    assert codes.max() <= top_code(bits)
    assert torch.equal(dequantize(codes, scale, zero_point), fake_quantize(x, scale, zero_point, bits))


@given(shares, ends, ends, bits, st.booleans())
def test_the_error_inside_the_range_is_at_most_half_a_step(
    share: Tensor, a: float, b: float, bits: int, symmetric: bool
) -> None:
    lower, upper = min(a, b, 0.0), max(a, b, 0.0)  # a range is widened to hold 0
    scale, zero_point = form(a, b, bits, symmetric)
    x = lower + share * (upper - lower)
    error = (fake_quantize(x, scale, zero_point, bits) - x).abs()
    assert (error <= 0.5 * scale * (1 + 1e-4)).all()


@given(values, ends, ends, bits, st.booleans())
def test_what_lies_outside_goes_to_the_nearest_end(x: Tensor, a: float, b: float, bits: int, symmetric: bool) -> None:
    scale, zero_point = form(a, b, bits, symmetric)
    lowest, highest = -zero_point * scale, (top_code(bits) - zero_point) * scale
    y = fake_quantize(x, scale, zero_point, bits)
    assert torch.equal(y[x >= highest], highest.expand_as(y[x >= highest]))
    assert torch.equal(y[x <= lowest], lowest.expand_as(y[x <= lowest]))


@given(values, ends, ends, bits, st.booleans())
def test_order_is_kept(x: Tensor, a: float, b: float, bits: int, symmetric: bool) -> None:
    y = fake_quantize(x.sort().values, *form(a, b, bits, symmetric), bits)
    assert (y.diff() >= 0).all()


@given(ends, ends, bits, st.booleans())
def test_zero_is_exact(a: float, b: float, bits: int, symmetric: bool) -> None:
    scale, zero_point = form(a, b, bits, symmetric)
    assert fake_quantize(torch.zeros(1), scale, zero_point, bits).item() == 0


any_ends = st.floats(-(2.0**100), 2.0**100, width=32)


@given(any_ends, any_ends, bits, st.booleans())
def test_scale_is_positive_and_zero_point_a_code(a: float, b: float, bits: int, symmetric: bool) -> None:
    scale, zero_point = form(a, b, bits, symmetric)
    assert torch.isfinite(scale).all()
    assert scale > 0
    assert zero_point == zero_point.round()
    assert 0 <= zero_point <= top_code(bits)


@given(any_ends, any_ends, bits)
def test_a_symmetric_zero_point_is_the_middle_code(a: float, b: float, bits: int) -> None:
    scale, zero_point = form(a, b, bits, symmetric=True)
    assert zero_point.item() == 2 ** (bits - 1)
    assert (2 ** (bits - 1) - 1) * scale * (1 + 1e-6) >= max(abs(a), abs(b)), "neither end is clipped"


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_range_uses_every_code(bits: int) -> None:
    scale, zero_point = form(-1.0, 3.0, bits, False)
    x = torch.linspace(-1, 3, 4000)
    assert quantize(x, scale, zero_point, bits).unique().numel() == 2**bits


def test_infinity_saturates() -> None:
    y = fake_quantize(torch.tensor([-torch.inf, torch.inf]), torch.tensor([0.5]), torch.tensor([2.0]), 2)
    assert y.tolist() == [-1.0, 0.5]


# -- gradients ---------------------------------------------------------------------------------------------------------


@dataclass
class Chosen:
    """Drops that are known."""

    mask: Tensor

    def kept(self, like: Tensor) -> Tensor:
        return self.mask


def straight_through(x: Tensor, scale: Tensor, zero_point: Tensor, bits: int, keep: Tensor | None) -> Tensor:
    """What `fake_quantize_learned` means, left to autograd: rounding has slope one, clamping cuts."""
    v = x / scale
    rounded = v.round().detach() + (v - v.detach())  # adds an exact zero with slope one
    low, high = -zero_point, top_code(bits) - zero_point
    y = torch.where(rounded < low, low, torch.where(rounded > high, high, rounded)) * scale
    return y if keep is None else torch.where(keep, y, x)


@settings(deadline=None, max_examples=40)
@given(bits, st.booleans(), st.sampled_from([(1,), (3, 1, 1), (4, 5)]), st.booleans(), st.integers(0, 10**6))
def test_gradients_are_those_of_a_straight_through_estimator(
    bits: int, symmetric: bool, groups: tuple[int, ...], masked: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    upper = 0.2 + torch.rand(groups, generator=generator, dtype=torch.float64)  # far inside the values: many clip
    scale, zero_point = affine_from_range(-0.7 * upper, upper, bits, symmetric)
    keep = torch.rand(x.shape, generator=generator) < 0.5 if masked else None
    weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    found, wanted = [], []
    for function, results in ((fake_quantize_learned, found), (straight_through, wanted)):
        xs, scales = x.clone().requires_grad_(), scale.clone().requires_grad_()
        y = function(
            xs, scales, zero_point, bits, keep if function is straight_through or keep is None else Chosen(keep)
        )
        results += [y.detach(), *torch.autograd.grad((y * weight).sum(), (xs, scales))]
    for mine, reference in zip(found, wanted, strict=True):
        assert mine.shape == reference.shape
        torch.testing.assert_close(mine, reference, rtol=1e-10, atol=1e-10)


def test_gradients_come_for_the_scale_alone_or_the_values_alone() -> None:
    x, scale, zero_point = torch.linspace(-2, 2, 9), torch.tensor([0.25]), torch.tensor([4.0])
    y = fake_quantize_learned(x, scale.clone().requires_grad_(), zero_point, 3, None)
    y.sum().backward()
    y = fake_quantize_learned(x.clone().requires_grad_(), scale, zero_point, 3, None)
    y.sum().backward()


@given(values, ends, ends, bits)
def test_learned_and_plain_agree_bit_by_bit(x: Tensor, a: float, b: float, bits: int) -> None:
    scale, zero_point = form(a, b, bits, False)
    learned = fake_quantize_learned(x, scale, zero_point, bits, None)
    assert torch.equal(learned, fake_quantize(x, scale, zero_point, bits))
