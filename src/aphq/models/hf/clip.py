"""The vision tower of transformers' CLIP, bare, with its projection, or with a classifier."""

from __future__ import annotations

from typing import Any

from timm.data import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from torch import Tensor
from transformers import CLIPForImageClassification, CLIPVisionModel, CLIPVisionModelWithProjection

from aphq.models.architecture import Unit, register, unchanged
from aphq.models.hf.plain import HfPlain, Layout


@register
class HfClip(HfPlain):
    """A norm before the blocks fixes the basis of its stream."""

    family = "transformers.CLIPVision"
    classes = (CLIPVisionModel, CLIPVisionModelWithProjection, CLIPForImageClassification)
    body = "vision_model"
    layout = Layout("encoder.layers", ("layer_norm1", "layer_norm2"), "self_attn")
    processor = "CLIP"
    mean, std = OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    def heads(self, model: Any) -> tuple[str, ...]:
        return ("visual_projection",) if hasattr(model, "visual_projection") else super().heads(model)

    def before_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        out: Tensor = root.pre_layrnorm(x)  # sic
        return out

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        if self.task_of(model) == "classification":
            return x[:, 1:].mean(dim=1)
        out: Tensor = root.post_layernorm(x[:, 0])
        return out

    def head(self, model: Any) -> Unit:
        if not self.heads(model):
            return Unit("post_layernorm", "head", unchanged, unchanged, ())
        return super().head(model)
