"""Whole images of any size, as detectors take them: resized by the short side, normalised, padded to multiples of 32.

The resizing is OpenCV's bilinear one on 8-bit pixels, to the last bit, in numpy: the public detectors were trained and
are measured with it, and Pillow's, which smooths when it shrinks, costs them accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from aphq.data.images import to_mode
from aphq.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from aphq.errors import DataError
from aphq.typed import TypedError, from_plain, to_plain

Pixels = npt.NDArray[np.uint8]
COEFFICIENT_BITS = 11  # OpenCV's fixed point


@dataclass(frozen=True)
class Scene:
    """One image as a detector sees it."""

    pixels: Tensor  # uint8 [3, height, width], resized, not padded
    original: tuple[int, int]  # height and width of the file

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[1], self.pixels.shape[2]


@dataclass(frozen=True)
class ScenePreprocessing:
    """The input of a detector."""

    shortest: int = 800  # the short side is brought to this length ...
    longest: int = 1333  # ... unless the long side would exceed that
    divisor: int = 32
    mean: tuple[float, ...] = IMAGENET_MEAN  # for pixels in 0-1
    std: tuple[float, ...] = IMAGENET_STD
    rounding: Literal["nearest", "down"] = "nearest"  # of the sides after resizing; torchvision rounds down

    def __post_init__(self) -> None:
        if min(self.shortest, self.longest, self.divisor) < 1 or self.longest < self.shortest:
            raise DataError(
                f"preprocessing: shortest {self.shortest}, longest {self.longest} and divisor {self.divisor} "
                "must be positive, and the longest no less than the shortest"
            )
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise DataError("preprocessing: mean and std must be three numbers each, std positive")

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> ScenePreprocessing:
        try:
            return from_plain(cls, d)
        except TypedError as problem:
            raise DataError(f"preprocessing: {problem}") from None

    def resized(self, size: tuple[int, int]) -> tuple[int, int]:
        """The size, (height, width), that an image of `size` is brought to."""
        factor = min(self.longest / max(size), self.shortest / min(size))
        height, width = (max(1, int(side * factor + (0.5 if self.rounding == "nearest" else 0))) for side in size)
        return height, width

    def scene(self, image: Image.Image) -> Scene:
        pixels = np.array(to_mode(image, 3))
        original = (pixels.shape[0], pixels.shape[1])
        resized = resize(pixels, self.resized(original))
        return Scene(torch.from_numpy(resized).permute(2, 0, 1).contiguous(), original)

    def normalise(self, pixels: Tensor) -> Tensor:
        """uint8 [3, height, width] -> float32 [1, 3, height', width'], normalised, then zeros right and below."""
        mean = torch.tensor(self.mean, dtype=torch.float64).view(-1, 1, 1) * 255  # on the CPU: mps has no float64
        factor = 1 / (torch.tensor(self.std, dtype=torch.float64).view(-1, 1, 1) * 255)
        image = (pixels.float() - mean.float().to(pixels.device)) * factor.float().to(pixels.device)
        height, width = pixels.shape[1:]
        return F.pad(image, (0, -width % self.divisor, 0, -height % self.divisor))[None]


def resize(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """uint8 [height, width, channels] brought to `size`, as cv2.resize with INTER_LINEAR does it."""
    if pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels)
    top, bottom, down = _taps(pixels.shape[0], size[0])
    left, right, across = _taps(pixels.shape[1], size[1])
    rows = pixels.astype(np.int32)
    # along a row at full precision; between rows 4 and 16 bits are dropped, then 2 rounded away
    wide = rows[:, left] * across[0][None, :, None] + rows[:, right] * across[1][None, :, None]
    wide >>= 4
    above, below = (wide[i] * w[:, None, None] >> 16 for i, w in ((top, down[0]), (bottom, down[1])))
    return ((above + below + 2) >> 2).clip(0, 255).astype(np.uint8)


def _taps(old: int, new: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """For each of the `new` positions: the two neighbours among the `old` ones, and their weights [2, new]."""
    at = ((np.arange(new) + 0.5) * (old / new) - 0.5).astype(np.float32)
    low = np.floor(at).astype(np.int64)
    share = at - low
    one = 1 << COEFFICIENT_BITS
    weights = np.stack([np.rint((1 - share) * one), np.rint(share * one)]).astype(np.int32)
    return low.clip(0, old - 1), (low + 1).clip(0, old - 1), weights
