"""Features of regions: each box is read from the pyramid level that fits its size (RoIAlign)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import roi_align

from aphq.models.detection.config import ROI_LEVELS, STRIDES

FINEST_SIDE = 56.0  # boxes of twice this side are the first to go up a level
BOX_SIZE, MASK_SIZE = 7, 14


def level_of(boxes: Tensor) -> Tensor:
    """[n] the level, 0 to 3, from the square root of the area in pixels of the resized image."""
    side = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    return torch.floor(torch.log2(side / FINEST_SIDE + 1e-6)).clamp(0, ROI_LEVELS - 1).long()


def region_features(levels: Sequence[Tensor], boxes: Tensor, size: int, images: Tensor | None = None) -> Tensor:
    """[n, c, size, size] features of the boxes [n, 4]; of the `levels` the first four are read. `images` [n] says in
    which image of the batch each box lies, where there are several."""
    lies_in = boxes.new_zeros(len(boxes)) if images is None else images.to(boxes)
    numbered = torch.cat([lies_in[:, None], boxes], dim=1)
    out = levels[0].new_zeros(len(boxes), levels[0].shape[1], size, size)
    chosen = level_of(boxes)
    for number, (level, stride) in enumerate(zip(levels[:ROI_LEVELS], STRIDES, strict=False)):
        inside = (chosen == number).nonzero().flatten()
        if len(inside):
            read = roi_align(level, numbered[inside], size, 1 / stride, sampling_ratio=0, aligned=True)
            out = out.index_put((inside,), read.to(out.dtype))
    return out
