from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from aphq.data import Preprocessing, load_calibration
from aphq.data.views import draw_views, source_of
from aphq.recipe import Views

INPUT = Preprocessing(size=(32, 32))
STILL = Views(every=1, smallest_crop=1.0, jitter=0.0)


def gradient_picture(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    x = torch.linspace(0, 255, width).expand(height, width)
    y = torch.linspace(0, 255, height)[:, None].expand(height, width)
    pixels = torch.stack([x, y, torch.full_like(x, 128)], dim=2).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


def sources(count: int = 6, width: int = 80, height: int = 50) -> tuple[Tensor, Tensor]:
    whole, aspect = source_of(gradient_picture(width, height), INPUT)
    return whole.expand(count, -1, -1, -1), torch.full((count,), aspect)


def draw(config: Views, seed: int = 0, **changes: int) -> Tensor:
    return draw_views(*sources(**changes), INPUT, config, torch.Generator().manual_seed(seed))


def pixels(views: Tensor) -> Tensor:
    return views * torch.tensor(INPUT.std).view(3, 1, 1) + torch.tensor(INPUT.mean).view(3, 1, 1)


def test_a_source_is_a_square_and_remembers_its_shape() -> None:
    whole, aspect = source_of(gradient_picture(80, 50), INPUT)
    assert whole.shape == (3, 40, 40)
    assert whole.dtype == torch.uint8
    assert aspect == 1.6


def test_views_are_what_the_model_takes_and_follow_the_seed() -> None:
    config = Views(every=1, mixup=0.5)
    views = draw(config)
    assert views.shape == (6, 3, 32, 32)
    assert views.dtype == torch.float32
    assert torch.equal(views, draw(config))
    assert not torch.equal(views, draw(config, seed=1))
    assert pixels(views).min() >= -1e-5
    assert pixels(views).max() <= 1 + 1e-5


def test_crops_are_large_enough_and_inside_the_picture() -> None:
    seen = pixels(draw(replace(STILL, smallest_crop=0.3), count=200))
    width = (seen[:, 0, 16, :].amax(1) - seen[:, 0, 16, :].amin(1)) * 33 / 31  # of the red that is seen
    height = (seen[:, 1, :, 16].amax(1) - seen[:, 1, :, 16].amin(1)) * 33 / 31
    area = width * height
    assert area.min() > 0.25
    assert area.max() > 0.8, "and some show nearly everything"
    assert area.std() > 0.05
    ratio = 1.6 * width / height
    assert ratio.min() > 0.7
    assert ratio.max() < 1.6 * 1.05, "one dimension may be all there is"


def test_about_half_are_mirrored() -> None:
    seen = pixels(draw(STILL, count=200))
    mirrored = (seen[:, 0, 16, 0] > seen[:, 0, 16, -1]).float().mean()
    assert 0.35 < mirrored < 0.65


def test_colours_move_only_when_asked() -> None:
    blue = pixels(draw(STILL, count=50))[:, 2].mean((1, 2))
    assert torch.allclose(blue, torch.full_like(blue, 128 / 255), atol=1e-3)
    assert pixels(draw(replace(STILL, jitter=0.4), count=50))[:, 2].mean((1, 2)).std() > 0.02


def test_a_blend_is_a_mean_of_two_views() -> None:
    dark, light = torch.zeros(2, 3, 40, 40, dtype=torch.uint8), torch.full((2, 3, 40, 40), 255, dtype=torch.uint8)
    both, aspects = torch.cat([dark, light]).repeat(25, 1, 1, 1), torch.ones(100)
    for mixup, blended in ((0.0, 0), (1.0, 30)):
        views = draw_views(both, aspects, INPUT, replace(STILL, mixup=mixup), torch.Generator().manual_seed(0))
        level = pixels(views).mean((1, 2, 3))
        between = int(((level > 0.02) & (level < 0.98)).sum())
        assert between >= blended
        assert mixup or between == 0


def test_a_collage_shows_a_rectangle_of_another_view() -> None:
    dark, light = torch.zeros(2, 3, 40, 40, dtype=torch.uint8), torch.full((2, 3, 40, 40), 255, dtype=torch.uint8)
    both, aspects = torch.cat([dark, light]).repeat(25, 1, 1, 1), torch.ones(100)
    views = draw_views(both, aspects, INPUT, replace(STILL, cutmix=1.0), torch.Generator().manual_seed(0))
    white = pixels(views)[:, 0] > 0.5
    assert ((pixels(views) < 1e-4) | (pixels(views) > 1 - 1e-4)).all(), "nothing is blended"
    mixed = [mask for mask in white if 0 < mask.float().mean() < 1]
    assert len(mixed) > 30
    for mask in mixed:
        shares = (mask, ~mask)  # one of the two is a rectangle: what its rows and columns span
        assert any(torch.equal(part, part.any(1)[:, None] & part.any(0)[None]) for part in shares)


def test_grey_and_normalised_images_have_views_too() -> None:
    grey = Preprocessing(size=(16, 16), channels=1, mean=(0.5,), std=(0.25,))
    images = torch.randn(4, 1, 16, 16)
    views = draw_views(images, torch.ones(4), grey, replace(STILL, smallest_crop=0.99), torch.Generator())
    assert views.shape == images.shape
    assert views.abs().max() < 4


@pytest.mark.parametrize("whole", [False, True])
def test_whole_pictures_are_loaded_when_asked(whole: bool, tmp_path: Path) -> None:
    for i in range(3):
        gradient_picture(60 + i, 40).save(tmp_path / f"{i}.png")
    loaded = load_calibration(tmp_path, INPUT, count=3, whole=whole)
    pictures, aspects = loaded.sources()
    assert pictures.shape == ((3, 3, 40, 40) if whole else (3, 3, 32, 32))
    assert sorted(aspects.tolist()) == pytest.approx([1.5, 1.525, 1.55] if whole else [1.0] * 3)
    assert len(loaded.first(2).sources()[0]) == 2
