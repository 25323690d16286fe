"""The embedded model and images: a ViT trained on Fashion-MNIST, and a part of that data set (MIT licence)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aphq.data import LabelledTensors, Preprocessing


@dataclass(frozen=True)
class Assets:
    """A float model in eval mode, unlabelled calibration images, labelled test images."""

    model: nn.Module
    calibration: Tensor  # uint8 [1024, 1, 28, 28]
    test: LabelledTensors
    preprocessing: Preprocessing
    class_names: tuple[str, ...]


def load_assets() -> Assets:
    from safetensors import safe_open
    from timm.models.vision_transformer import VisionTransformer

    folder = files("aphq.demo") / "data"
    with as_file(folder / "images.npz") as path, np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    with as_file(folder / "model.safetensors") as path, safe_open(path, "pt") as stored:
        meta: dict[str, Any] = {key: json.loads(value) for key, value in stored.metadata().items()}
        state = {name: stored.get_tensor(name).float() for name in stored.keys()}  # noqa: SIM118
    model = VisionTransformer(**meta["architecture"])
    model.load_state_dict(state)
    size = int(arrays["test"].shape[-1])
    preprocessing = Preprocessing(
        size=(size, size), channels=1, mean=(float(meta["mean"]),), std=(float(meta["std"]),), crop_pct=1.0
    )
    test = torch.from_numpy(arrays["test"])[:, None]
    labels = torch.from_numpy(arrays["test_labels"]).long()
    return Assets(
        model=model.eval(),
        calibration=torch.from_numpy(arrays["calibration"])[:, None],
        test=LabelledTensors(test, labels, preprocessing),
        preprocessing=preprocessing,
        class_names=tuple(str(name) for name in arrays["class_names"]),
    )
