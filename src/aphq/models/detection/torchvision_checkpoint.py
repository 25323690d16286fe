"""Files of torchvision's detectors, the published ones included: those carry the names of older versions."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor, nn

from aphq.models.loading import load_strictly

RENAMED = (  # as torchvision's own modules rename them when a file has no version
    (re.compile(r"^(rpn\.head\.conv)\.(weight|bias)$"), r"\1.0.0.\2"),
    (re.compile(r"^(backbone\.fpn\.(?:inner|layer)_blocks\.\d+)\.(weight|bias)$"), r"\1.0.\2"),
)
MASK_LAYER = re.compile(r"^roi_heads\.mask_head\.mask_fcn(\d+)\.(weight|bias)$")
COUNTER = "num_batches_tracked"  # of a batch norm in training; a frozen one has none


def fill(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Put every tensor into the model; ModelError, naming them, if one is missing, left over or of another shape."""
    load_strictly(model, current_names(state, model.state_dict()), path)


def current_names(state: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint under the names of this version, with the counters of the model's norms whatever kind they are."""
    found = {}
    for key, tensor in state.items():
        for pattern, newer in RENAMED:
            key = pattern.sub(newer, key)
        key = MASK_LAYER.sub(lambda match: f"roi_heads.mask_head.{int(match[1]) - 1}.0.{match[2]}", key)
        if not key.endswith(COUNTER) or key in own:
            found[key] = tensor
    counters = {key: torch.zeros_like(tensor) for key, tensor in own.items() if key.endswith(COUNTER)}
    return {**counters, **found}
