"""Finished runs to report on, made once."""

from pathlib import Path

import pytest
import torch

import aphq

from ..conftest import Build
from ..runs import pixels, short


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, vit: Build, swin: Build) -> dict[str, Path]:
    """ "labelled" and "plain" of a ViT at other bits, "swin" without anything that learns."""
    root = tmp_path_factory.mktemp("reported")
    val = (pixels(20, seed=9), torch.arange(20) % 10)
    aphq.quantize(vit(), short("w4a4"), pixels(), out=root / "labelled", val=val, device="cpu")
    aphq.quantize(vit(), short("w3a3"), pixels(), out=root / "plain", device="cpu")
    aphq.quantize(swin(), short("w4a4", "fast"), pixels(), out=root / "swin", device="cpu")
    return {path.name: path for path in root.iterdir()}
