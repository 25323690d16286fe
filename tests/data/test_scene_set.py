from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from aphq.data.scene_set import load_scenes
from aphq.data.scenes import ScenePreprocessing
from aphq.errors import DataError

RULES = ScenePreprocessing(shortest=32, longest=64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(6):
        pixels = np.random.default_rng(number).integers(0, 255, (40 + 5 * number, 60, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def test_a_seeded_draw_of_whole_images(folder: Path) -> None:
    first, again, other = (load_scenes(folder, RULES, count=4, seed=seed) for seed in (1, 1, 2))
    assert first.names == again.names
    assert first.names != other.names
    assert first.fingerprint == again.fingerprint != other.fingerprint
    for number, scene in enumerate(first.scenes):
        image = first.batch(slice(number, number + 1))["image"]
        assert image.shape[2] % 32 == 0
        assert scene.size == RULES.resized(scene.original)
        assert torch.equal(first.batch(torch.tensor([number]))["image"], image)


def test_corrupt_images_are_replaced_until_there_are_too_many(folder: Path) -> None:
    (folder / "3.png").write_bytes(b"nothing")
    assert "3.png" not in load_scenes(folder, RULES, count=6, seed=0).names
    for number in (0, 1, 2):
        (folder / f"{number}.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be decoded"):
        load_scenes(folder, RULES, count=6, seed=0)


def test_images_in_memory_come_in_their_order() -> None:
    pixels = torch.randint(0, 255, (3, 50, 40), dtype=torch.uint8)
    loaded = load_scenes([pixels, Image.new("RGB", (30, 90))], RULES, count=1, seed=0)
    assert len(loaded) == 1
    assert loaded.scenes[0].original == (50, 40)
    with pytest.raises(DataError, match="cannot take calibration images from int"):
        load_scenes(3, RULES, count=1, seed=0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no usable"):
        load_scenes([], RULES, count=1, seed=0)
