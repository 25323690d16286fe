"""What looks at a region: a class and a better box (BoxHead), and the object's mask (MaskHead)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from aphq.models.detection.config import DetectorConfig
from aphq.models.detection.pyramid import Convolution
from aphq.models.detection.regions import BOX_SIZE

CONVOLUTIONS = 4


class BoxHead(nn.Module):
    """[n, c, 7, 7] -> class logits [n, classes + 1], the background last, and deltas [n, 4 * classes].

    Mask R-CNN has two linear layers before the outputs; a cascade has four convolutions with batch norm, and one."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        width, wide = config.pyramid_channels, config.fc_channels
        cascade = config.kind == "cascade_mask_rcnn"
        convolutions = [Convolution(width, width, 3, norm=True) for _ in range(CONVOLUTIONS if cascade else 0)]
        self.shared_convs = nn.ModuleList(convolutions)
        inputs = [width * BOX_SIZE**2] if cascade else [width * BOX_SIZE**2, wide]
        self.shared_fcs = nn.ModuleList(nn.Linear(n, wide) for n in inputs)
        self.fc_cls = nn.Linear(wide, config.num_classes + 1)
        self.fc_reg = nn.Linear(wide, 4 * config.num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.shared_convs:
            x = F.relu(layer(x))
        x = x.flatten(1)
        for layer in self.shared_fcs:
            x = F.relu(layer(x))
        return self.fc_cls(x), self.fc_reg(x)


class MaskHead(nn.Module):
    """[n, c, 14, 14] -> mask logits [n, classes, 28, 28]."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        width = config.pyramid_channels
        self.convs = nn.ModuleList(Convolution(width, width, 3) for _ in range(CONVOLUTIONS))
        self.upsample = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.conv_logits = nn.Conv2d(width, config.num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.convs:
            x = F.relu(layer(x))
        out: Tensor = self.conv_logits(F.relu(self.upsample(x)))
        return out
