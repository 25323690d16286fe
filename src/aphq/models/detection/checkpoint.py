"""Public checkpoints into a Detector: both spellings of Swin, any number of classes, every key accounted for.

Files of Swin-Transformer-Object-Detection carry our names. MMDetection's own Swin has others, and gathers the cells of
a merging by an unfold, which leaves its weights in another order: those are put back.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from aphq.errors import ModelError
from aphq.models.detection.config import DETECTORS, DetectorConfig
from aphq.models.detection.detector import Detector
from aphq.models.loading import misfit_of, read_checkpoint
from aphq.typed import nearest

RENAMED = (  # MMDetection's Swin -> ours
    (r"^backbone\.stages\.", "backbone.layers."),
    (r"\.attn\.w_msa\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^backbone\.patch_embed\.projection\.", "backbone.patch_embed.proj."),
)
MERGING = re.compile(r"^backbone\.layers\.\d+\.downsample\.(norm|reduction)\.")
CELLS = [0, 2, 1, 3]  # rows first to columns first, and back
DERIVED = "relative_position_index"  # follows from the window size


def load_detector(name: str, weights: str | Path | None, num_classes: int | None = None, **arguments: Any) -> Detector:
    """The detector `name` with the weights of a .pth or .safetensors file; `arguments` change its DetectorConfig.

    The number of classes is the file's unless given."""
    if name not in DETECTORS:
        raise ModelError(f"there is no detector {name!r}: {nearest(name, DETECTORS)}")
    if weights is None:
        raise ModelError(f"{name} needs weights: pass the checkpoint file with --weights")
    state = own_names(read_checkpoint(Path(weights)))
    try:
        config = DetectorConfig.from_dict({**DETECTORS[name].to_dict(), **arguments})
        found = traits(state)
        _refuse_another(config, found, name)
        config = dataclasses.replace(config, num_classes=num_classes or found["num_classes"])
        model = Detector(config)
        fill(model, state)
    except ModelError as problem:
        raise ModelError(f"{weights}: {problem}") from None
    return model.eval()


def own_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint under our names, without what can be derived."""
    foreign = any(key.startswith("backbone.stages.") for key in state)
    renamed = {}
    for key, tensor in state.items():
        for pattern, ours in RENAMED if foreign else ():
            key = re.sub(pattern, ours, key)
        if foreign and MERGING.match(key):
            tensor = tensor.unflatten(-1, (-1, len(CELLS))).transpose(-1, -2)[..., CELLS, :].flatten(-2)
        if not key.endswith(DERIVED):
            renamed[key] = tensor
    return renamed


def traits(state: dict[str, Tensor]) -> dict[str, Any]:
    """What a checkpoint says about its architecture; ModelError if it holds no such detector at all."""
    kinds = {"roi_head.bbox_head.fc_cls.weight": "mask_rcnn", "roi_head.bbox_head.0.fc_cls.weight": "cascade_mask_rcnn"}
    kind, classes = next(((kind, len(state[key]) - 1) for key, kind in kinds.items() if key in state), (None, 0))
    embedding = state.get("backbone.patch_embed.proj.weight")
    if kind is None or embedding is None:
        some = ", ".join(list(state)[:3])
        raise ModelError(
            f"not a checkpoint of a Mask R-CNN or Cascade Mask R-CNN with Swin (its tensors are {some} ...); "
            "it needs backbone.patch_embed.proj and roi_head.bbox_head"
        )
    blocks = [re.match(r"backbone\.layers\.(\d+)\.blocks\.(\d+)\.", key) for key in state]
    depths: dict[int, int] = {}
    for match in blocks:
        if match:
            stage, block = int(match[1]), int(match[2])
            depths[stage] = max(depths.get(stage, 0), block + 1)
    return {
        "kind": kind,
        "embed_dim": len(embedding),
        "depths": tuple(depths[stage] for stage in sorted(depths)),
        "num_classes": classes,
    }


def _refuse_another(config: DetectorConfig, found: dict[str, Any], name: str) -> None:
    wanted = {key: getattr(config, key) for key in ("kind", "embed_dim", "depths")}
    differing = [f"{key} {found[key]} instead of {value}" for key, value in wanted.items() if found[key] != value]
    if differing:
        fitting = [n for n, c in DETECTORS.items() if all(getattr(c, key) == found[key] for key in wanted)]
        hint = f"use {fitting[0]}" if fitting else "pass these values as model arguments"
        raise ModelError(f"this is not a {name} ({', '.join(differing)}); {hint}")


def fill(model: Detector, state: dict[str, Tensor]) -> None:
    """Put every tensor into the model; ModelError, naming them, if one is missing, left over or of another shape."""
    if misfit := misfit_of(model, state):
        raise ModelError(misfit)
    model.load_state_dict(state)
