"""Mask R-CNN and Cascade Mask R-CNN on a Swin backbone, one image at a time.

Modules carry the names of the public MMDetection checkpoints, so that those load as they are. What happens between the
modules (proposals, refinement, suppression, masks) follows MMDetection 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aphq.models.detection.boxes import best_per_class, decode
from aphq.models.detection.config import CASCADE_STDS, DetectorConfig
from aphq.models.detection.heads import BoxHead, MaskHead
from aphq.models.detection.masks import paste
from aphq.models.detection.pyramid import Pyramid
from aphq.models.detection.regions import BOX_SIZE, MASK_SIZE, region_features
from aphq.models.detection.rpn import ProposalHead, propose
from aphq.models.detection.swin import Swin

Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Detections:
    """What was found in one image, best first, in the coordinates of the original image."""

    boxes: Tensor  # [k, 4]
    scores: Tensor  # [k]
    labels: Tensor  # [k] class indices
    masks: Tensor | None  # bool [k, height, width]; None from a detector without masks

    def __len__(self) -> int:
        return len(self.boxes)


class RegionHeads(nn.Module):
    """The heads that look at regions; a cascade has three of each, in a row."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        if config.kind == "cascade_mask_rcnn":
            self.bbox_head: nn.Module = nn.ModuleList(BoxHead(config) for _ in range(config.stages))
            self.mask_head: nn.Module = nn.ModuleList(MaskHead(config) for _ in range(config.stages))
        else:
            self.bbox_head, self.mask_head = BoxHead(config), MaskHead(config)

    @property
    def box_heads(self) -> list[nn.Module]:
        return list(self.bbox_head) if isinstance(self.bbox_head, nn.ModuleList) else [self.bbox_head]

    @property
    def mask_heads(self) -> list[nn.Module]:
        return list(self.mask_head) if isinstance(self.mask_head, nn.ModuleList) else [self.mask_head]


class Detector(nn.Module):
    """`detector(image)` is what it finds there."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Swin(config)
        self.neck = Pyramid(config)
        self.rpn_head = ProposalHead(config)
        self.roi_head = RegionHeads(config)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    @torch.no_grad()
    def forward(self, image: Tensor, size: Size | None = None, original: Size | None = None) -> Detections:
        """One normalised image [1, 3, h, w]. `size` is its height and width without padding, `original` those of the
        file it was resized from; without them the image is taken as it is."""
        size = size or (image.shape[2], image.shape[3])
        levels = self.levels(image)
        logits, deltas = self.rpn_head(levels)
        proposals, _ = propose(logits, deltas, self.config, size)
        boxes, scores, labels = self.final_boxes(*self.look(levels, proposals, size), size, original)
        factor = boxes.new_tensor(scale_factor(size, original or size))
        probabilities = self.mask_probabilities(levels, boxes * factor, labels)
        masks = paste(probabilities, boxes, original or size)
        return Detections(boxes, scores, labels, masks & (boxes[:, 3] != 0)[:, None, None])

    def levels(self, image: Tensor) -> list[Tensor]:
        """The five levels of the pyramid."""
        levels: list[Tensor] = self.neck(self.backbone(image))
        return levels

    def look(
        self, levels: Sequence[Tensor], proposals: Tensor, size: Size
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Every box head in its turn: (regions, class logits, deltas) of each, regions refined from head to head."""
        regions, logits, deltas = [proposals], [], []
        for stage, head in enumerate(self.roi_head.box_heads):
            cls, reg = head(region_features(levels, regions[stage], BOX_SIZE))
            logits.append(cls)
            deltas.append(reg)
            if stage + 1 < self.config.stages:
                regions.append(refine(regions[stage], logits[stage], deltas[stage], CASCADE_STDS[stage], size))
        return regions, logits, deltas

    def final_boxes(
        self,
        regions: Sequence[Tensor],
        logits: Sequence[Tensor],
        deltas: Sequence[Tensor],
        size: Size,
        original: Size | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(boxes, scores, labels): logits are averaged over the heads, boxes are those of the last."""
        scores = torch.stack(list(logits)).mean(0).softmax(dim=1)
        scores = scores * (regions[-1][:, 3:] != 0)  # a region that ends at y = 0 counts as filling, never as an object
        boxes = decode(regions[-1], deltas[-1], CASCADE_STDS[len(logits) - 1], size)
        factor = boxes.new_tensor(scale_factor(size, original or size))
        boxes = (boxes.unflatten(1, (-1, 4)) / factor).flatten(1)
        config = self.config
        return best_per_class(boxes, scores, config.score_threshold, config.detection_iou, config.detections)

    def mask_probabilities(self, levels: Sequence[Tensor], boxes: Tensor, labels: Tensor) -> Tensor:
        """[k, 28, 28] of the boxes in the resized image: the mean of the heads' probabilities, at each box's class."""
        features = region_features(levels, boxes, MASK_SIZE)
        every = [head(features).sigmoid() for head in self.roi_head.mask_heads]
        return torch.stack(every).mean(0)[torch.arange(len(labels), device=labels.device), labels]


def refine(regions: Tensor, logits: Tensor, deltas: Tensor, stds: tuple[float, ...], size: Size) -> Tensor:
    """The regions of the next head: moved by the deltas of their best class, the background left out."""
    best = logits[:, :-1].argmax(dim=1)
    moves = deltas.unflatten(1, (-1, 4))[torch.arange(len(best), device=best.device), best]
    return decode(regions, moves, stds, size)


def scale_factor(size: Size, original: Size) -> tuple[float, float, float, float]:
    """How much larger the resized image is, along x, y, x, y."""
    y, x = size[0] / original[0], size[1] / original[1]
    return x, y, x, y
