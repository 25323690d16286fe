"""What a detector's units get for an image: its pixels, and the regions that the float teacher looks at in it.

The regions are found once, by the teacher, and are the same for teacher and student from then on. So their heads answer
the same questions, and what remains of the network between pixels and answers is smooth: no sorting, no suppression.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aphq.models.architecture import State
from aphq.models.detection.boxes import decode
from aphq.models.detection.config import CASCADE_STDS
from aphq.models.detection.detector import Detector, Size
from aphq.models.detection.rpn import propose

REGIONS = 128  # per image: the best proposals, and as many of the rest, evenly
MASKS = 16  # at least so many regions for the mask heads, whatever is found


@torch.no_grad()
def regions_of(teacher: Detector, image: Tensor, size: Size) -> State:
    """`regions.s` [n, 4] for each box head s; `regions.mask` [k, 4] and `labels` [k] for the mask heads."""
    levels = teacher.levels(image)
    logits, deltas = teacher.rpn_head(levels)
    proposals, _ = propose(logits, deltas, teacher.config, size)
    regions, classes, moves = teacher.look(levels, proposals, size)
    boxes, _, labels = teacher.final_boxes(regions, classes, moves, size, None)
    more, likely = _further(regions[-1], classes, moves[-1], size, max(0, MASKS - len(boxes)))
    state = {f"regions.{s}": some[spread(len(some))] for s, some in enumerate(regions)}
    state["regions.mask"] = torch.cat([boxes, more])
    state["labels"] = torch.cat([labels, likely]).float()
    return state


def spread(count: int) -> Tensor:
    """Indices of the better half, and of as many that are spread over the rest."""
    best = torch.arange(min(count, REGIONS // 2))
    rest = torch.linspace(REGIONS // 2, count - 1, REGIONS // 2).long() if count > REGIONS // 2 else best[:0]
    return torch.cat([best, rest]).unique()


def _further(regions: Tensor, classes: list[Tensor], moves: Tensor, size: Size, count: int) -> tuple[Tensor, Tensor]:
    """Boxes of the most likely classes of the regions that are least likely background: for images where little or
    nothing is found."""
    scores = torch.stack(classes).mean(0).softmax(dim=1)[:, :-1]
    best, labels = scores.max(dim=1)
    order = best.argsort(descending=True)[:count]
    boxes = decode(regions, moves, CASCADE_STDS[len(classes) - 1], size).unflatten(1, (-1, 4))
    return boxes[order, labels[order]], labels[order]
