"""From a mask in its box to a mask in the image: bilinear sampling at pixel centres, no rounding of the box."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

THRESHOLD = 0.5
ELEMENTS_AT_ONCE = 2**24


def paste(probabilities: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, m, m] probabilities in boxes [n, 4] -> bool [n, height, width]."""
    height, width = size
    chunk = max(1, ELEMENTS_AT_ONCE // (height * width))
    pairs = zip(probabilities.split(chunk), boxes.split(chunk), strict=True)
    parts = [sample(p, b, size) >= THRESHOLD for p, b in pairs]
    return torch.cat(parts) if parts else torch.zeros(0, height, width, dtype=torch.bool, device=boxes.device)


def sample(probabilities: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[n, height, width] probabilities at the image's pixels, 0 outside the box."""

    def along(count: int, low: Tensor, high: Tensor) -> Tensor:
        """[n, count] positions in the box as -1 to 1; a box without extent is read in its middle"""
        centres = torch.arange(count, device=boxes.device, dtype=boxes.dtype) + 0.5
        at = (centres - low[:, None]) / (high - low)[:, None] * 2 - 1
        return torch.where(at.isinf(), 0, at)

    y, x = along(size[0], boxes[:, 1], boxes[:, 3]), along(size[1], boxes[:, 0], boxes[:, 2])
    grid = torch.stack([x[:, None, :].expand(-1, *size), y[:, :, None].expand(-1, *size)], dim=3)
    return F.grid_sample(probabilities[:, None], grid, align_corners=False)[:, 0]
