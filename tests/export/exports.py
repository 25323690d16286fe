"""Quantized models small enough to export in a test."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import aphq
from aphq.presets import round_to_nearest

from ..conftest import VIT, builder
from ..models.variants import images_for, preprocessing_for
from ..runs import short


def calibrated(model: nn.Module, bits: str = "w8a8", **changes: Any) -> nn.Module:
    """Quantized by the ranges of a few random images; the quickest way to a model with every quantizer set."""
    recipe = round_to_nearest(bits)
    wanted = {"calibration__images": 4, "scale_search__images": 4, **changes}
    for name, value in wanted.items():
        recipe = recipe.with_value(name.replace("__", "."), value)
    given = {"preprocessing": preprocessing_for(model), "device": "cpu"}
    return aphq.quantize(model, recipe, images_for(model, 4), **given).model


def normalised(model: nn.Module, count: int = 3) -> Tensor:
    shape = preprocessing_for(model).shape
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(7))


@cache
def small_run(bits: str = "w8a8") -> aphq.Run:
    """A searched run on smooth pictures, in memory."""
    from timm.models.vision_transformer import VisionTransformer

    from ..runs import pixels

    return aphq.quantize(builder(VisionTransformer, VIT)(), short(bits, "fast"), pixels(), device="cpu")


def distances(got: Tensor, expected: Tensor) -> Tensor:
    """Of every image, relative to its length."""
    return (got - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)


def relative(got: Tensor, expected: Tensor) -> float:
    """The distance of the median image."""
    return float(distances(got, expected).median())
