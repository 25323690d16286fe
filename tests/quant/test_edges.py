"""Pixels between codes: every arithmetic must see the same picture."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aphq
from aphq.data import Preprocessing
from aphq.quant.edges import NEAR, keep_off_edges
from aphq.quant.quantizer import Quantizer

from ..runs import short

PIXELS = torch.arange(256, dtype=torch.float32) / 255


def fitted(values: Tensor, bits: int) -> Quantizer:
    quantizer = Quantizer(bits, False, (1,))
    quantizer.set_range(values.min(), values.max())
    return quantizer


def codes_in(dtype: torch.dtype, quantizer: Quantizer, values: Tensor) -> Tensor:
    scale, zero_point = quantizer.scale.data.to(dtype), quantizer.zero_point.to(dtype)
    return (values.to(dtype) / scale).round().add(zero_point).clamp(0, 2**quantizer.bits - 1).float()


@pytest.mark.parametrize("bits", [2, 4, 8])  # 255 is a multiple of 3, 15 and 255
def test_pixels_from_minus_one_to_one_get_the_same_codes_in_every_arithmetic(bits: int) -> None:
    pictures = [2 * (PIXELS + ulp * 2e-8) - 1 for ulp in (-1, 0, 1)]  # as three machines may compute them
    before, after = fitted(pictures[1], bits), fitted(pictures[1], bits)
    keep_off_edges(after, pictures[1].repeat(20))

    def scatter(quantizer: Quantizer) -> int:
        found = [codes_in(dtype, quantizer, x) for dtype in (torch.float32, torch.float64) for x in pictures]
        return int((torch.stack(found).amax(0) != torch.stack(found).amin(0)).sum())

    assert scatter(before) > 0
    assert scatter(after) == 0
    assert 0.99 - 1e-6 <= float(after.scale / before.scale) <= 1.01 + 1e-6


def test_scales_that_are_well_or_have_many_inputs_stay_as_they_are() -> None:
    well = fitted(PIXELS * 1.0, 5)
    well.scale.data.fill_(0.0123)
    assert float((((PIXELS / 0.0123) % 1) - 0.5).abs().min()) > NEAR
    many, once = (fitted(torch.tensor([-1.0, 1.0]), 8) for _ in range(2))
    heads = Quantizer(8, False, (2, 1, 1))
    heads.set_range(torch.full((2, 1, 1), -1.0), torch.full((2, 1, 1), 1.0))
    for quantizer, values in (
        (well, PIXELS.repeat(20)),
        (many, torch.linspace(-1, 1, 5000)),
        (heads, (2 * PIXELS - 1).repeat(20)),
        (once, 2 * PIXELS - 1),
    ):
        scale = quantizer.scale.data.clone()
        keep_off_edges(quantizer, values)
        assert torch.equal(quantizer.scale.data, scale)


def test_a_run_keeps_the_picture_off_the_edges(tiny_vit: nn.Module) -> None:
    pictures = torch.randint(0, 256, (16, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rules = Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    recipe = short("w8a8", "fast", scale_search__method="minmax")
    model: Any = aphq.quantize(tiny_vit, recipe, pictures, preprocessing=rules, device="cpu").model
    quantizer = model.patch_embed.proj.input_quantizer
    codes = (2 * PIXELS.double() - 1) / quantizer.scale.double() + quantizer.zero_point.double()
    assert float(((codes % 1) - 0.5).abs().min()) > NEAR
