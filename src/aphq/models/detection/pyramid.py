"""The feature pyramid (FPN): coarse levels are added to finer ones, and every level gets the same width."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from aphq.models.detection.config import DetectorConfig


class Convolution(nn.Module):
    """A convolution without or with batch norm; the names are those of the checkpoints."""

    def __init__(self, inputs: int, outputs: int, kernel: int, norm: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=not norm)
        self.bn = nn.BatchNorm2d(outputs) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x if self.bn is None else self.bn(x)


class Pyramid(nn.Module):
    """Four maps of a backbone -> four of equal width and the last one thinned to half its size."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        width = config.pyramid_channels
        self.lateral_convs = nn.ModuleList(Convolution(c, width, 1) for c in config.stage_channels)
        self.fpn_convs = nn.ModuleList(Convolution(width, width, 3) for _ in config.stage_channels)

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        levels = [conv(x) for conv, x in zip(self.lateral_convs, maps, strict=True)]
        for i in range(len(levels) - 1, 0, -1):
            levels[i - 1] = levels[i - 1] + F.interpolate(levels[i], size=levels[i - 1].shape[2:], mode="nearest")
        out = [conv(x) for conv, x in zip(self.fpn_convs, levels, strict=True)]
        return [*out, coarsest(out[-1])]


def coarsest(level: Tensor) -> Tensor:
    """The fifth level: every second row and column of the fourth."""
    return level[:, :, ::2, ::2]
