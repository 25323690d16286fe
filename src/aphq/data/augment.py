"""The training augmentation that the published method applies to its calibration images.

Random resized crop, horizontal flip, colour jitter: timm's `create_transform(is_training=True)` of the time, but drawn
from a generator that is passed in, so that a view depends on its seed alone and not on threads or import order.
"""

import math
import random
from dataclasses import dataclass

from PIL import Image, ImageEnhance
from torch import Tensor

from aphq.data.images import to_mode, to_tensor
from aphq.data.preprocessing import Preprocessing

INTERPOLATIONS = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC)


@dataclass(frozen=True)
class Augmentation:
    """How much of an image a view shows, and how far its colours move."""

    scale: tuple[float, float] = (0.08, 1.0)  # area of the crop / area of the image
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of the crop
    flip: float = 0.5  # probability
    jitter: float = 0.4  # brightness, contrast and saturation each by a factor in 1 +- jitter


def train_view(
    image: Image.Image, preprocessing: Preprocessing, rng: random.Random, augmentation: Augmentation | None = None
) -> Tensor:
    """One random view of an image: uint8 [channels, height, width]."""
    augmentation = augmentation or Augmentation()
    height, width = preprocessing.size
    view = to_mode(image, preprocessing.channels).crop(_crop_box(image.width, image.height, augmentation, rng))
    view = view.resize((width, height), rng.choice(INTERPOLATIONS))
    if rng.random() < augmentation.flip:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_tensor(_jittered(view, augmentation.jitter, rng))


def _crop_box(width: int, height: int, augmentation: Augmentation, rng: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right, bottom of a crop of random area and ratio; the largest central one after ten misses."""
    low, high = augmentation.ratio
    for _ in range(10):
        area = rng.uniform(*augmentation.scale) * width * height
        ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * high)))
    h = min(height, max(1, round(width / low)))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def _jittered(image: Image.Image, amount: float, rng: random.Random) -> Image.Image:
    enhancers = [ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color]
    rng.shuffle(enhancers)
    for enhancer in enhancers:
        image = enhancer(image).enhance(rng.uniform(max(0.0, 1 - amount), 1 + amount))
    return image
