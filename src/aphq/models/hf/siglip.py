"""The vision tower of transformers' SigLIP, bare or with a classifier."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import SiglipForImageClassification, SiglipVisionModel

from aphq.errors import ModelError
from aphq.models.architecture import Reader, Unit, module_step, register, replace_module, unchanged
from aphq.models.attention_packed import PackedPool, require_plain
from aphq.models.hf.base import HALF
from aphq.models.hf.plain import HfPlain, Layout


@register
class HfSiglip(HfPlain):
    """Bare, it pools by attention; a classifier reads the mean of the tokens, and its pooling head is dead weight that
    an opened model lacks."""

    family = "transformers.SiglipVision"
    classes = (SiglipVisionModel, SiglipForImageClassification)
    body = "vision_model"
    layout = Layout("encoder.layers", ("layer_norm1", "layer_norm2"), "self_attn")
    processor = "Siglip"
    mean = std = HALF

    def check(self, model: Any) -> None:
        super().check(model)
        prefix, root = self.root(model)
        if not root.use_head and root is model:
            raise ModelError("this SiglipVisionModel was built without its pooling head and gives no embedding")
        if root.use_head and isinstance(getattr(root.head, "attention", None), nn.MultiheadAttention):
            require_plain(root.head.attention, f"{prefix}head.attention")

    def open_attention(self, model: Any) -> None:
        super().open_attention(model)
        prefix, root = self.root(model)
        if not root.use_head:
            return
        if root is not model:
            replace_module(model, f"{prefix}head", nn.Identity())
        elif isinstance(root.head.attention, nn.MultiheadAttention):
            replace_module(model, f"{prefix}head.attention", PackedPool(root.head.attention))

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        tokens: Tensor = root.post_layernorm(x)
        return tokens if root is model else tokens.mean(dim=1)

    def head(self, model: Any) -> Unit:
        _, root = self.root(model)
        if root is model:
            return Unit("head", "head", module_step("head"), unchanged, ("head",))
        return super().head(model)

    def last_reader(self, model: Any) -> Reader | None:
        return None  # the positions are the weight of an embedding, which no other family turns
