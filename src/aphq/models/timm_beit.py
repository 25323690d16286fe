"""timm's Beit: BEiT and BEiT v2."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.beit import Attention, Beit, Block
from torch import Tensor, nn

from aphq.models.architecture import Step, register, replace_all
from aphq.models.attention import OpenAttention, with_joint_bias
from aphq.models.timm_parts import (
    arguments_of,
    construct,
    describe_frame,
    describe_mlp,
    describe_norm,
    hidden_width,
    mlp_ratio,
)
from aphq.models.timm_vit import TimmVit


class BeitAttention(OpenAttention):
    """timm's `Attention` of BEiT, with a table of position biases of its own, a shared one, both or none."""

    relative_position_index: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.qkv, self.proj = with_joint_bias(source), source.proj
        self.relative_position_bias_table = source.relative_position_bias_table
        self.register_buffer("relative_position_index", source.relative_position_index, persistent=False)

    def position_bias(self) -> Tensor | None:
        """[1, heads, tokens, tokens]"""
        if self.relative_position_bias_table is None:
            return None
        tokens = len(self.relative_position_index)
        table = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias: Tensor = table.view(tokens, tokens, -1).permute(2, 0, 1).contiguous()
        return bias.unsqueeze(0)

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias, shared = self.position_bias(), shared_rel_pos_bias
        if shared is not None:
            shared = shared[(None,) * (4 - shared.ndim)]
            bias = shared if bias is None else bias + shared
        out: Tensor = self.proj(self.core(q, k, v, bias).transpose(1, 2).flatten(2))
        return out


@register
class TimmBeit(TimmVit):
    family = "timm.Beit"
    classes = (Beit,)
    scales = ("gamma_1", "gamma_2")
    blocks = (Block,)
    attentions = (Attention, BeitAttention)

    def before_head(self, model: Any, x: Tensor) -> Tensor:
        tokens: Tensor = model.norm(x)
        pooled = tokens[:, model.num_prefix_tokens :].mean(dim=1) if model.global_pool == "avg" else tokens[:, 0]
        out: Tensor = model.fc_norm(pooled)
        return out

    def step(self, block: str) -> Step:
        def run(model: Any, x: Tensor) -> Tensor:
            shared = None if model.rel_pos_bias is None else model.rel_pos_bias()
            out: Tensor = model.get_submodule(block)(x, shared_rel_pos_bias=shared)
            return out

        return run

    def embed(self, model: Any, x: Tensor) -> Tensor:
        tokens = torch.cat([model.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        out: Tensor = model.pos_drop(tokens if model.pos_embed is None else tokens + model.pos_embed)
        return out

    def open_attention(self, model: Any) -> None:
        replace_all(model, {Attention: BeitAttention})

    def describe(self, model: Any) -> dict[str, Any]:
        block = model.blocks[0]
        return {
            **describe_frame(model),
            "depth": len(model.blocks),
            "num_heads": block.attn.num_heads,
            "qkv_bias": getattr(block.attn, "q_bias", None) is not None or block.attn.qkv.bias is not None,
            "mlp_ratio": mlp_ratio(hidden_width(block.mlp), model.embed_dim),
            "swiglu_mlp": describe_mlp(block.mlp, "blocks.0.mlp") == "swiglu",
            "scale_mlp": not isinstance(block.mlp.norm, nn.Identity),
            "init_values": None if block.gamma_1 is None else 0.1,
            "use_abs_pos_emb": model.pos_embed is not None,
            "use_rel_pos_bias": block.attn.relative_position_bias_table is not None,
            "use_shared_rel_pos_bias": model.rel_pos_bias is not None,
            "norm": describe_norm(block.norm1, "blocks.0.norm1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = arguments_of(description)
        return construct(Beit, arguments)
