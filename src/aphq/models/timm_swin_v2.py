"""timm's SwinTransformerV2: cosine attention, norms last."""

from __future__ import annotations

from typing import Any

from timm.layers import get_act_layer
from timm.models.swin_transformer_v2 import (
    PatchMerging,
    SwinTransformerV2,
    SwinTransformerV2Block,
    SwinTransformerV2Stage,
    WindowAttention,
)
from torch import Tensor, nn

from aphq.models.architecture import NormPair, Stream, register, replace_all
from aphq.models.attention import with_joint_bias
from aphq.models.attention_cosine import CosineAttention, table_of
from aphq.models.timm_parts import arguments_of, construct, describe_frame, describe_norm, mlp_ratio
from aphq.models.timm_swin import TimmSwin


class CosineWindowAttention(CosineAttention):
    """timm's `WindowAttention` of the second version."""

    def __init__(self, source: Any) -> None:
        area = source.window_size[0] * source.window_size[1]
        table = table_of(source.cpb_mlp, source.relative_coords_table, source.num_heads)
        super().__init__(source.num_heads, area, source.logit_scale, table, source.relative_position_index)
        self.pretrained_window_size = source.pretrained_window_size
        self.qkv, self.proj = with_joint_bias(source), source.proj

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = self.core(q, k, v, None if mask is None else mask.unsqueeze(1))
        out: Tensor = self.proj(x.transpose(1, 2).flatten(2))
        return out


@register
class TimmSwinV2(TimmSwin):
    family = "timm.SwinTransformerV2"
    classes = (SwinTransformerV2,)
    merging = PatchMerging
    stage = SwinTransformerV2Stage
    block = SwinTransformerV2Block
    attentions = (WindowAttention, CosineWindowAttention)
    activations = (nn.GELU, get_act_layer("gelu"), nn.ReLU)

    def norms(self, model: Any, name: str, may_shift: bool) -> tuple[NormPair, ...]:
        return ()

    def merge_norms(self, name: str) -> tuple[NormPair, ...]:
        return ()

    def streams(self, model: Any) -> tuple[Stream, ...]:
        return ()

    def open_attention(self, model: Any) -> None:
        replace_all(model, {WindowAttention: CosineWindowAttention})

    def describe(self, model: Any) -> dict[str, Any]:
        blocks = [stage.blocks[0] for stage in model.layers]
        embed, attention = model.patch_embed, blocks[0].attn
        # a window no larger than the map shrinks with it: the first stage's map is the largest
        return {
            **describe_frame(model),
            "depths": [len(stage.blocks) for stage in model.layers],
            "num_heads": [block.attn.num_heads for block in blocks],
            "window_size": list(blocks[0].window_size),
            "always_partition": blocks[0].always_partition,
            "strict_img_size": embed.strict_img_size,
            "mlp_ratio": mlp_ratio(blocks[0].mlp.fc1.weight.shape[0], blocks[0].dim),
            "qkv_bias": getattr(attention, "q_bias", None) is not None or attention.qkv.bias is not None,
            "pretrained_window_sizes": [block.attn.pretrained_window_size[0] for block in blocks],
            "norm": describe_norm(blocks[0].norm1, "layers.0.blocks.0.norm1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = arguments_of(description)
        return construct(SwinTransformerV2, arguments)
