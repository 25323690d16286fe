"""Images made on the spot, and the folder of real ones where a checkout has it beside the repository."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aphq.data import Preprocessing


def picture(width: int = 48, height: int = 40, seed: int = 0) -> Image.Image:
    """A smooth colour image: survives JPEG, and has no symmetry that would hide a flip."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def small() -> Preprocessing:
    return Preprocessing(size=(16, 16))


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write `count` numbered pictures into a folder below tmp_path."""

    def write(folder: str = "images", count: int = 1, start: int = 0) -> Path:
        target = tmp_path / folder
        target.mkdir(parents=True, exist_ok=True)
        for i in range(start, start + count):
            picture(seed=i).save(target / f"{i:04d}.png")
        return target

    return write


@pytest.fixture(scope="session")
def imagenet() -> Path:
    folder = Path(__file__).parents[3] / "shared" / "imagenet"
    if not folder.is_dir():
        pytest.skip("needs the real images of ../shared/imagenet")
    return folder
