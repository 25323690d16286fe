from collections.abc import Callable

import pytest
from torch import nn

from .variants import SWINS, VITS

Build = Callable[..., nn.Module]


@pytest.fixture(params=[*(f"vit: {name}" for name in VITS), "distilled", *(f"swin: {name}" for name in SWINS)])
def variant(request: pytest.FixtureRequest, vit: Build, distilled: Build, swin: Build) -> nn.Module:
    """Every supported variant in turn."""
    family, _, name = request.param.partition(": ")
    if family == "distilled":
        return distilled()
    return vit(**VITS[name]) if family == "vit" else swin(**SWINS[name])
