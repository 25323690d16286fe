"""A torchvision detector on an image that aphq has prepared: what it finds, and the regions it looks at.

All of it by torchvision's own modules and functions; only the resizing and normalising of `model.transform` is left
out.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image

from aphq.models.architecture import State
from aphq.models.detection.detector import Detections, Size
from aphq.models.detection.masks import THRESHOLD
from aphq.models.detection.scenes import MASKS, spread


def region_features(pool: Any, levels: OrderedDict[str, Tensor], regions: Tensor) -> Tensor:
    """[n, c, size, size] by a pooling whose scales are settled: it does not look at the image's size any more."""
    features: Tensor = pool(levels, [regions], [(0, 0)])
    return features


@torch.no_grad()
def detect(model: Any, image: Tensor, size: Size, original: Size) -> Detections:
    """What the model itself would find in the image that `image` was prepared from."""
    features = model.backbone(image)
    proposals, _ = model.rpn(ImageList(image, [size]), features)
    results, _ = model.roi_heads(features, proposals, [size])
    (found,) = model.transform.postprocess(results, [size], [original])
    masks = found["masks"][:, 0] >= THRESHOLD if "masks" in found else None
    return Detections(found["boxes"], found["scores"], found["labels"] - 1, masks)


@torch.no_grad()
def regions_of(teacher: Any, image: Tensor, size: Size) -> State:
    """`regions.0` [n, 4]; with masks `regions.mask` [k, 4] and `labels` [k], in which 0 is the background."""
    heads = teacher.roi_heads
    features = teacher.backbone(image)
    proposals, _ = teacher.rpn(ImageList(image, [size]), features)
    height, width = size
    regions = proposals[0] if len(proposals[0]) else image.new_tensor([[0, 0, width, height]])
    state = {"regions.0": regions[spread(len(regions))]}
    if not heads.has_mask():
        return state
    cls, reg = heads.box_predictor(heads.box_head(region_features(heads.box_roi_pool, features, regions)))
    (boxes,), _, (labels,) = heads.postprocess_detections(cls, reg, [regions], [size])
    # the most likely classes of further regions, for images where little or nothing is found
    best, likely = cls.softmax(dim=1)[:, 1:].max(dim=1)
    order = best.argsort(descending=True)[: max(0, MASKS - len(boxes))]
    every = clip_boxes_to_image(heads.box_coder.decode(reg, [regions]), size)  # [n, classes, 4]
    more = every[order, likely[order] + 1]
    state["regions.mask"] = torch.cat([boxes, more])
    state["labels"] = torch.cat([labels, likely[order] + 1]).float()
    return state
