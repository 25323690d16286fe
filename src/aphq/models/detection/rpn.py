"""The region proposal network: for every anchor of every level, whether an object is there and where exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq.models.detection.anchors import RATIOS, grid_anchors
from aphq.models.detection.boxes import decode, suppress
from aphq.models.detection.config import STRIDES, DetectorConfig

STDS = (1.0, 1.0, 1.0, 1.0)


class ProposalHead(nn.Module):
    """Shared by the levels: [batch, c, h, w] -> objectness logits [batch, 3, h, w] and deltas [batch, 12, h, w]."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        width, anchors = config.pyramid_channels, len(RATIOS)
        self.rpn_conv = nn.Conv2d(width, width, 3, padding=1)
        self.rpn_cls = nn.Conv2d(width, anchors, 1)
        self.rpn_reg = nn.Conv2d(width, anchors * 4, 1)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        hidden = [F.relu(self.rpn_conv(level)) for level in levels]
        return [self.rpn_cls(x) for x in hidden], [self.rpn_reg(x) for x in hidden]


def flatten_anchors(maps: Tensor, numbers: int) -> Tensor:
    """[1, anchors * numbers, h, w] -> [h * w * anchors, numbers], in the order of `grid_anchors`."""
    return maps[0].permute(1, 2, 0).reshape(-1, numbers)


def propose(
    logits: Sequence[Tensor], deltas: Sequence[Tensor], config: DetectorConfig, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The proposals of one image, best first: boxes [n, 4] inside `size` (height, width), and scores [n].

    Boxes without area are kept, as the public checkpoints had them in training and test."""
    boxes, scores, groups = [], [], []
    for number, (cls, reg, stride) in enumerate(zip(logits, deltas, STRIDES, strict=True)):
        score, delta = flatten_anchors(cls, 1)[:, 0].sigmoid(), flatten_anchors(reg, 4)
        anchors = grid_anchors((cls.shape[2], cls.shape[3]), stride, cls.device)
        if len(score) > config.proposals_per_level:
            score, best = score.sort(descending=True)
            score, best = score[: config.proposals_per_level], best[: config.proposals_per_level]
            delta, anchors = delta[best], anchors[best]
        boxes.append(decode(anchors, delta, STDS, size))
        scores.append(score)
        groups.append(torch.full_like(score, number, dtype=torch.long))
    every, score = torch.cat(boxes), torch.cat(scores)
    kept = suppress(every, score, torch.cat(groups), config.proposal_iou)[: config.proposals]
    return every[kept], score[kept]
