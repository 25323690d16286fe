"""timm's Eva: EVA, EVA-02, and the many models built on it: DINOv3, Perception Encoder, ViTs with rotary positions."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from timm.layers import (
    AttentionPoolLatent,
    AttentionRope,
    GluMlp,
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    SwiGLU,
    apply_rot_embed_cat,
)
from timm.models.eva import Eva, EvaAttention, EvaBlock, EvaBlockPostNorm
from torch import Tensor, nn

from aphq.models.architecture import NormPair, Step, register, replace_all
from aphq.models.attention import LatentPool, OpenAttention, Projection, Projections, with_joint_bias
from aphq.models.timm_parts import (
    arguments_of,
    block_norms,
    construct,
    describe_frame,
    describe_norm,
    hidden_width,
    mlp_ratio,
    require_type,
)
from aphq.models.timm_vit import TimmVit

ROPES: dict[str, type[nn.Module]] = {
    "cat": RotaryEmbeddingCat,
    "mixed": RotaryEmbeddingMixed,
    "dinov3": RotaryEmbeddingDinoV3,
}
NEWER = ("num_kv_heads", "qk_norm", "attn_only_layer_scale")  # that older releases of timm do not have
SEPARATE = ("q_proj", "k_proj", "v_proj")


class RotaryAttention(OpenAttention):
    """timm's `EvaAttention` and `AttentionRope`: one layer or three, rotary positions, norms, a gate, shared keys."""

    def __init__(self, source: Any, rotary: bool) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.kind = "rope" if type(source) is AttentionRope else "eva"
        self.rotary, self.rotate_half = rotary, getattr(source, "rotate_half", False)
        self.num_prefix_tokens, self.groups = source.num_prefix_tokens, getattr(source, "num_kv_groups", 1)
        if source.qkv is not None:
            self.qkv = with_joint_bias(source) if self.kind == "eva" else source.qkv
        else:
            self.q_proj, self.k_proj, self.v_proj = source.q_proj, source.k_proj, source.v_proj
        self.q_norm, self.k_norm, self.norm = source.q_norm, source.k_norm, source.norm
        self.gate, self.proj = getattr(source, "gate", None), source.proj

    @property
    def direct(self) -> bool:
        return not self.rotary and self.groups == 1 and super().direct

    @property
    def direct_output(self) -> bool:
        return self.gate is None and super().direct_output

    def projections(self) -> Projections | None:
        if hasattr(self, "qkv"):
            return super().projections()
        if self.groups > 1:
            return None
        return Projections(*(Projection(getattr(self, name)) for name in SEPARATE), output=self.proj)  # type: ignore[misc]

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, heads, tokens, channels] each; keys and values may have fewer heads."""
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        heads = (self.num_heads, self.num_heads // self.groups, self.num_heads // self.groups)
        q, k, v = (
            getattr(self, name)(x).unflatten(-1, (count, -1)).transpose(1, 2)
            for name, count in zip(SEPARATE, heads, strict=True)
        )
        return q, k, v

    def turned(self, x: Tensor, rope: Tensor) -> Tensor:
        """Patches by their positions; prefix tokens have none."""
        prefix, patches = x[:, :, : self.num_prefix_tokens], x[:, :, self.num_prefix_tokens :]
        return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=self.rotate_half)], dim=2)

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        gate = None if self.gate is None else self.gate(x).sigmoid()
        q, k, v = self.operands(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = self.turned(q, rope), self.turned(k, rope)
        if self.groups > 1:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        bias = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.ndim)]
        x = self.norm(self.core(q, k, v, bias).transpose(1, 2).flatten(2))
        out: Tensor = self.proj(x if gate is None else x * gate)
        return out


@register
class TimmEva(TimmVit):
    family = "timm.Eva"
    classes = (Eva,)
    scales = ("gamma_1", "gamma_2")
    blocks = (EvaBlock, EvaBlockPostNorm)
    attentions = (EvaAttention, AttentionRope, RotaryAttention)
    may_have_gates = True

    def check(self, model: Any) -> None:
        super().check(model)
        if model.rope is not None:
            require_type(model.rope, "rope", *ROPES.values())

    def norms(self, model: Any, block: str) -> tuple[NormPair, ...]:
        """A block that normalises last has no layer that reads a norm alone."""
        return () if isinstance(model.get_submodule(block), EvaBlockPostNorm) else block_norms(model, block)

    def step(self, block: str) -> Step:
        number = int(block.rpartition(".")[2])

        def run(model: Any, x: Tensor) -> Tensor:
            out: Tensor = model.get_submodule(block)(x, rope=_rope(model, number))
            return out

        return run

    def embed(self, model: Any, x: Tensor) -> Tensor:
        tokens, _ = model._pos_embed(x)
        out: Tensor = model.norm_pre(tokens)
        return out

    def open_attention(self, model: Any) -> None:
        rotary = partial(RotaryAttention, rotary=model.rope is not None)
        replace_all(model, {EvaAttention: rotary, AttentionRope: rotary, AttentionPoolLatent: LatentPool})

    def describe(self, model: Any) -> dict[str, Any]:
        block, embed, rope = model.blocks[0], model.patch_embed, model.rope
        attention, mlp = block.attn, block.mlp
        joint = getattr(attention, "qkv", None) is not None
        bias = getattr(attention, "q_bias", None) if joint and hasattr(attention, "q_bias") else None
        layer = attention.qkv if joint else attention.q_proj
        kv_heads = [
            b.attn.num_heads // getattr(b.attn, "groups", getattr(b.attn, "num_kv_groups", 1)) for b in model.blocks
        ]
        gated = isinstance(mlp, (SwiGLU, GluMlp))
        hidden = hidden_width(mlp) // (2 if isinstance(mlp, GluMlp) else 1)
        kind = (
            attention.kind
            if isinstance(attention, RotaryAttention)
            else "rope"
            if type(attention) is AttentionRope
            else "eva"
        )
        pool = model.attn_pool
        return {
            **describe_frame(model),
            "depth": len(model.blocks),
            "num_heads": attention.num_heads,
            "num_kv_heads": None if all(n == attention.num_heads for n in kv_heads) else kv_heads,
            "qkv_bias": bias is not None or layer.bias is not None,
            "qkv_fused": joint,
            "qk_norm": not isinstance(attention.q_norm, nn.Identity),
            "mlp_ratio": mlp_ratio(hidden, model.embed_dim),
            "swiglu_mlp": gated,
            "swiglu_align_to": int(isinstance(mlp, SwiGLU) and isinstance(mlp.norm, nn.Identity)),  # 1 aligns nothing
            "scale_mlp": not isinstance(mlp.norm, nn.Identity),
            "scale_attn_inner": not isinstance(attention.norm, nn.Identity),
            "attn_type": kind,
            "init_values": None if getattr(block, "gamma_1", None) is None else 1e-5,
            "attn_only_layer_scale": getattr(block, "gamma_1", None) is not None and block.gamma_2 is None,
            "class_token": model.cls_token is not None,
            "num_reg_tokens": 0 if model.reg_token is None else model.reg_token.shape[1],
            "no_embed_class": model.no_embed_class,
            "use_abs_pos_emb": model.pos_embed is not None,
            "use_rot_pos_emb": rope is not None,
            **({} if rope is None else _describe_rope(rope)),
            "rope_rotate_half": bool(getattr(attention, "rotate_half", False)),
            "use_post_norm": isinstance(block, EvaBlockPostNorm),
            "use_pre_transformer_norm": not isinstance(model.norm_pre, nn.Identity),
            "use_post_transformer_norm": not isinstance(model.norm, nn.Identity),
            "use_fc_norm": not isinstance(model.fc_norm, nn.Identity),
            "attn_pool_num_heads": None if pool is None else pool.num_heads,
            "attn_pool_mlp_ratio": None if pool is None else mlp_ratio(hidden_width(pool.mlp), model.embed_dim),
            "dynamic_img_size": model.dynamic_img_size,
            "dynamic_img_pad": embed.dynamic_img_pad,
            "norm": describe_norm(block.norm1, "blocks.0.norm1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = arguments_of(description)
        for name in NEWER:
            if not arguments[name]:
                del arguments[name]
        return construct(Eva, arguments)


def _rope(model: Any, number: int) -> Tensor | None:
    """The rotary positions of a block, for images of the size that the model was built for."""
    if model.rope is None:
        return None
    found: Tensor = (
        model.rope.get_embed(shape=model.patch_embed.grid_size) if model.dynamic_img_size else model.rope.get_embed()
    )
    return found[number] if getattr(model, "rope_mixed", False) else found


def _describe_rope(rope: Any) -> dict[str, Any]:
    shape = getattr(rope, "ref_feat_shape", None)
    return {
        "rope_type": next(key for key, cls in ROPES.items() if type(rope) is cls),
        "rope_temperature": float(rope.temperature),
        "rope_grid_offset": float(getattr(rope, "grid_offset", 0.0)),
        "rope_grid_indexing": rope.grid_indexing,
        "ref_feat_shape": None if shape is None else list(shape),
    }
