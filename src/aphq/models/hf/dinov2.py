"""transformers' DINOv2, with and without registers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
)

from aphq.models.architecture import register
from aphq.models.hf.plain import HfPlain, Layout


@register
class HfDinov2(HfPlain):
    """Its classifier reads the class token beside the mean of the patches, so its stream cannot be turned."""

    family = "transformers.Dinov2"
    classes = (Dinov2ForImageClassification, Dinov2Model)
    body = "dinov2"
    layout = Layout("encoder.layer", ("norm1", "norm2"), scales=("layer_scale1.lambda1", "layer_scale2.lambda1"))
    processor = "Bit"
    any_size = True

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        tokens: Tensor = root.layernorm(x)
        if not self.heads(model):
            return tokens[:, 0]
        patches = tokens[:, 1 + getattr(model.config, "num_register_tokens", 0) :]
        return torch.cat([tokens[:, 0], patches.mean(dim=1)], dim=1)


@register
class HfDinov2WithRegisters(HfDinov2):
    family = "transformers.Dinov2WithRegisters"
    classes = (Dinov2WithRegistersForImageClassification, Dinov2WithRegistersModel)  # type: ignore[assignment]
    body = "dinov2_with_registers"
