import random
from dataclasses import replace

import pytest
import torch
from PIL import Image

from aphq.data import Augmentation, Preprocessing, train_view
from aphq.data.augment import _crop_box
from aphq.data.images import to_tensor

from .conftest import picture

STILL = Augmentation(scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=0.0, jitter=0.0)


def test_a_view_depends_on_its_seed_alone(small: Preprocessing) -> None:
    views = [train_view(picture(), small, random.Random(i)) for i in range(8)]
    random.seed(5)
    torch.manual_seed(5)
    again = [train_view(picture(), small, random.Random(i)) for i in range(8)]
    assert all(a.equal(b) for a, b in zip(views, again, strict=True))
    assert len({view.numpy().tobytes() for view in views}) == 8


def test_leaves_the_global_generators_alone(small: Preprocessing) -> None:
    before, torch_before = random.getstate(), torch.get_rng_state()
    train_view(picture(), small, random.Random(0))
    assert random.getstate() == before
    assert torch.get_rng_state().equal(torch_before)


def test_without_randomness_it_is_a_plain_resize() -> None:
    p = Preprocessing((20, 20))
    image = picture(40, 40)
    sizes = [image.resize((20, 20), r) for r in (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)]
    seen = {train_view(image, p, random.Random(i), STILL).numpy().tobytes() for i in range(20)}
    assert seen == {to_tensor(size).numpy().tobytes() for size in sizes}  # both interpolations occur


def test_flips_half_of_the_time() -> None:
    p = Preprocessing((20, 20))
    image = picture(20, 20)
    mirrored = to_tensor(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    flips = [train_view(image, p, random.Random(i), replace(STILL, flip=0.5)).equal(mirrored) for i in range(200)]
    assert 70 < sum(flips) < 130


def test_jitter_moves_the_colours_within_its_range() -> None:
    p = Preprocessing((8, 8))
    grey = Image.new("RGB", (8, 8), (100, 100, 100))  # contrast and saturation leave a flat grey as it is
    levels = {int(train_view(grey, p, random.Random(i), replace(STILL, jitter=0.4)).max()) for i in range(300)}
    assert 60 <= min(levels) < 65
    assert 135 < max(levels) <= 140
    red = Image.new("RGB", (8, 8), (200, 50, 50))
    views = [train_view(red, p, random.Random(i), replace(STILL, jitter=0.4)).float() for i in range(50)]
    saturations = [float((view[0] - view[1]).mean() / view[0].mean()) for view in views]
    assert max(saturations) - min(saturations) > 0.1  # brightness alone would keep this ratio


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (64, 64)], ids=str)
def test_crops_cover_the_range_and_stay_inside(size: tuple[int, int]) -> None:
    width, height = size
    rng = random.Random(0)
    areas, ratios = [], []
    for _ in range(2000):
        left, top, right, bottom = _crop_box(width, height, Augmentation(), rng)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        areas.append((right - left) * (bottom - top) / (width * height))
        ratios.append((right - left) / (bottom - top))
    assert 0.07 < min(areas) < 0.1
    assert max(areas) > 0.95
    assert 0.7 < min(ratios) < 0.8
    assert 1.28 < max(ratios) < 1.4


@pytest.mark.parametrize(("size", "box"), [((1000, 10), (493, 0, 506, 10)), ((10, 1000), (0, 493, 10, 506))])
def test_strips_fall_back_to_the_middle(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    assert _crop_box(*size, Augmentation(scale=(0.9, 1.0)), random.Random(0)) == box


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (3, 2)], ids=str)
def test_tiny_images_and_grey_models(small: Preprocessing, size: tuple[int, int]) -> None:
    grey = Preprocessing((16, 16), channels=1, mean=(0.5,), std=(0.5,))
    for i in range(20):
        assert train_view(picture(*size), small, random.Random(i)).shape == (3, 16, 16)
        assert train_view(picture(*size), grey, random.Random(i)).shape == (1, 16, 16)
