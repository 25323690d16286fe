from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from .families import FAMILIES
from .variants import SWINS, VITS, family

Build = Callable[..., nn.Module]


@pytest.fixture(
    params=[*(f"vit: {name}" for name in VITS), "distilled", *(f"swin: {name}" for name in SWINS), *FAMILIES]
)
def variant(request: pytest.FixtureRequest, vit: Build, distilled: Build, swin: Build) -> nn.Module:
    """Every supported variant in turn."""
    if request.param in FAMILIES:
        return family(request.param)
    kind, _, name = request.param.partition(": ")
    if kind == "distilled":
        return distilled()
    return vit(**VITS[name]) if kind == "vit" else swin(**SWINS[name])


@pytest.fixture(autouse=True)
def plain_multihead_attention() -> Iterator[None]:
    """`nn.MultiheadAttention` has a kernel for inference that rounds differently: compared without it."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)
