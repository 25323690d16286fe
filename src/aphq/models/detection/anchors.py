"""Anchors: three boxes of 8 strides around every cell's corner (not its centre), of height to width 1/2, 1 and 2."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE = 8.0
RATIOS = (0.5, 1.0, 2.0)  # height / width


def base_anchors(stride: int) -> Tensor:
    """[3, 4], centred on the origin."""
    root = torch.tensor(RATIOS).sqrt()
    half = 0.5 * SCALE * stride * torch.stack([1 / root, root], dim=1)  # [3, (x, y)]
    return torch.cat([-half, half], dim=1)


def grid_anchors(size: tuple[int, int], stride: int, device: torch.device | None = None) -> Tensor:
    """[rows * columns * 3, 4] for a map of `size` (rows, columns), in the order row, column, anchor."""
    rows, columns = (torch.arange(n, device=device) * stride for n in size)
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    corners = torch.stack([x, y, x, y], dim=-1).reshape(-1, 1, 4)
    return (corners + base_anchors(stride).to(corners.device)).reshape(-1, 4)
