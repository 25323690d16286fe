"""Outputs of MMDetection 2.11, kept outside the repository; tests that read them skip where they are not."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from aphq.models.detection import Detector, DetectorConfig

SHARED = Path(__file__).parents[4] / "shared" / "detection"
needs_golden = pytest.mark.skipif(not (SHARED / "golden").is_dir(), reason="needs ../shared/detection/golden")
NETS = ("mask_rcnn_narrow", "mask_rcnn_narrow_pad", "cascade_mask_rcnn_narrow")


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return load_file(SHARED / "golden" / f"{name}.safetensors")


@cache
def facts(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SHARED / "golden" / f"{name}.json").read_text())
    return found


@cache
def net(name: str) -> Detector:
    config = DetectorConfig(
        "cascade_mask_rcnn" if name.startswith("cascade") else "mask_rcnn",
        embed_dim=8,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
        pyramid_channels=12,
        fc_channels=32,
        num_classes=5,
        proposals_per_level=100,
        proposals=200,
        detections=40,
    )
    model = Detector(config).eval().requires_grad_(False)
    weights = {k[2:]: v for k, v in tensors(name.removesuffix("_pad")).items() if k.startswith("w.")}
    model.load_state_dict({k: v for k, v in weights.items() if not k.endswith("relative_position_index")})
    return model


def image(name: str, number: int) -> tuple[Tensor, tuple[int, int], tuple[int, int]]:
    """(pixels [1, 3, h, w], size without padding, size of the file)"""
    meta = facts(name)["images"][number]["meta"]
    size, original = (tuple(meta[key][:2]) for key in ("img_shape", "ori_shape"))
    return tensors(name)[f"in.{number}"].float()[None], size, original


def unpacked(packed: Tensor, shape: list[int]) -> Tensor:
    bits = np.unpackbits(packed.numpy(), axis=1)[:, : shape[1] * shape[2]]
    return torch.from_numpy(bits.reshape(shape)).bool()
