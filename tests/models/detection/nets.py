"""Detectors small enough for a test, with weights from a formula: the same on every machine and in every version."""

import math
from typing import Any

import torch
from torch import Tensor

from aphq.models.detection import Detector, DetectorConfig

TINY: dict[str, Any] = {
    "embed_dim": 8,
    "depths": (1, 2, 1, 1),
    "num_heads": (1, 2, 2, 4),
    "pyramid_channels": 8,
    "fc_channels": 16,
    "num_classes": 3,
    "proposals_per_level": 60,
    "proposals": 40,
    "detections": 12,
}


def waves(shape: torch.Size, start: int) -> Tensor:
    """Numbers in -1 to 1 without a pattern that a mistake could preserve."""
    at = torch.arange(start, start + max(1, shape.numel()), dtype=torch.float64)
    return torch.sin(at * math.sqrt(2) + 0.37 * (at % 7)).reshape(shape).float()


@torch.no_grad()
def detector(kind: str = "mask_rcnn", **changes: Any) -> Detector:
    """Untrained, but it finds things: its classes are certain enough."""
    model = Detector(DetectorConfig.from_dict({**TINY, "kind": kind, **changes}))
    start = 0
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        fan = tensor[0].numel() if tensor.ndim > 1 else 1
        gain = 6.0 if name.endswith("fc_cls.weight") else 1.5
        value = waves(tensor.shape, start) * (gain / math.sqrt(fan) if tensor.ndim > 1 else 0.2)
        positive = name.endswith("running_var") or (("norm" in name or ".bn." in name) and name.endswith("weight"))
        tensor.copy_(1 + value if positive else value)
        start += tensor.numel()
    return model.eval().requires_grad_(False)


def picture(height: int = 64, width: int = 96) -> Tensor:
    """[1, 3, height, width] with edges and gradients."""
    y, x = torch.meshgrid(torch.arange(height) / height, torch.arange(width) / width, indexing="ij")
    channels = [torch.sin(9 * x + 5 * y), torch.cos(7 * y - 3 * x), ((x - 0.4).abs() + (y - 0.5).abs() < 0.3) * 2.0 - 1]
    return torch.stack(channels)[None].float()
