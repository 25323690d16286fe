"""Boxes as (x1, y1, x2, y2) in continuous coordinates: regression deltas, clipping and suppression.

A suppression by groups (levels, classes) is one suppression of boxes that are moved apart, as in the code the public
checkpoints were trained with: an exact suppression group by group differs from it in rare borderline pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchvision.ops import nms

LARGEST_GROWTH = abs(math.log(16 / 1000))  # of a side, as a logarithm, either way
MOVED_APART = 10_000  # from so many boxes on each group has its own suppression


def decode(boxes: Tensor, deltas: Tensor, stds: tuple[float, ...], size: tuple[int, int] | None = None) -> Tensor:
    """[n, 4] boxes and [n, 4 * k] deltas (dx, dy, dw, dh) to [n, 4 * k] boxes, clipped to `size` (height, width)."""
    d = deltas.unflatten(1, (-1, 4)) * deltas.new_tensor(stds)
    centre = (boxes[:, :2] + boxes[:, 2:])[:, None] * 0.5
    side = (boxes[:, 2:] - boxes[:, :2])[:, None]
    centre = centre + d[..., :2] * side
    side = side * d[..., 2:].clamp(-LARGEST_GROWTH, LARGEST_GROWTH).exp()
    out = torch.cat([centre - side * 0.5, centre + side * 0.5], dim=-1)
    return (out if size is None else clip(out, size)).flatten(1)


def encode(boxes: Tensor, targets: Tensor, stds: tuple[float, ...]) -> Tensor:
    """The deltas [n, 4] that take `boxes` to `targets`: the inverse of `decode`."""
    centre, side = (boxes[:, :2] + boxes[:, 2:]) * 0.5, boxes[:, 2:] - boxes[:, :2]
    wanted, size = (targets[:, :2] + targets[:, 2:]) * 0.5, targets[:, 2:] - targets[:, :2]
    return torch.cat([(wanted - centre) / side, (size / side).log()], dim=1) / boxes.new_tensor(stds)


def clip(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[..., 4] boxes inside an image of `size` (height, width)."""
    height, width = size
    x, y = boxes[..., 0::2].clamp(0, width), boxes[..., 1::2].clamp(0, height)
    return torch.stack([x[..., 0], y[..., 0], x[..., 1], y[..., 1]], dim=-1)


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, iou: float) -> Tensor:
    """Indices of the boxes that no better box of the same group overlaps by more than `iou`, best first."""
    if len(boxes) == 0:
        return torch.zeros(0, dtype=torch.long, device=boxes.device)
    moved = boxes + (groups.to(boxes) * (boxes.max() + 1))[:, None]
    if len(boxes) < MOVED_APART:
        return nms(moved, scores, iou)
    kept = []
    for group in groups.unique():
        members = (groups == group).nonzero().flatten()
        kept.append(members[nms(moved[members], scores[members], iou)])
    found = torch.cat(kept)
    return found[scores[found].argsort(descending=True)]


def best_per_class(
    boxes: Tensor, scores: Tensor, threshold: float, iou: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Final detections (boxes [k, 4], scores [k], labels [k]) from boxes [n, 4 * classes] or [n, 4] and the scores
    [n, classes + 1] whose last column is the background."""
    classes = scores.shape[1] - 1
    each = boxes.unflatten(1, (-1, 4)).expand(-1, classes, 4).reshape(-1, 4)
    labels = torch.arange(classes, device=scores.device).expand(len(scores), -1).reshape(-1)
    flat = scores[:, :-1].reshape(-1)
    kept = (flat > threshold).nonzero().flatten()
    each, flat, labels = each[kept], flat[kept], labels[kept]
    best = suppress(each, flat, labels, iou)[:most]
    return each[best], flat[best], labels[best]
