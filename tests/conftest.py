"""Models small enough for a test and random enough that a mistake anywhere in them shows in the output."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not Path("/dev/nvidia0").exists():  # Triton reads it when it is first imported, which timm or torch may do
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Build = Callable[..., nn.Module]
VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}
SWIN: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 2),
    "num_classes": 10,
}


@torch.no_grad()
def scramble(model: nn.Module) -> nn.Module:
    """Every parameter away from its start: class tokens and biases begin at zero, norms at one, and hide mistakes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        spread = 0.5 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)


def builder(cls: type[nn.Module], defaults: dict[str, Any]) -> Build:
    def build(**changes: Any) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return scramble(cls(**{**defaults, **changes}))

    return build


@pytest.fixture(scope="session")
def vit() -> Build:
    """Build a tiny VisionTransformer, the same each time; keyword arguments are timm's."""
    return builder(VisionTransformer, VIT)


@pytest.fixture(scope="session")
def distilled() -> Build:
    return builder(VisionTransformerDistilled, VIT)


@pytest.fixture(scope="session")
def swin() -> Build:
    """Build a tiny SwinTransformer, the same each time; keyword arguments are timm's."""
    return builder(SwinTransformer, SWIN)


@pytest.fixture
def tiny_vit(vit: Build) -> nn.Module:
    return vit()


@pytest.fixture
def tiny_swin(swin: Build) -> nn.Module:
    return swin()


@pytest.fixture
def images() -> Tensor:
    """[2, 3, 32, 32]"""
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def pytest_configure() -> None:
    torch.set_num_threads(1)  # tiny tensors only lose time to threads
