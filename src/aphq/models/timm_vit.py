"""timm's VisionTransformer: ViT, DeiT, distilled DeiT, DeiT-III, registers, any pooling, QK-norm, any size."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers import AttentionPoolLatent, LayerScale, PatchEmbed
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import Tensor, nn

from aphq.errors import ModelError
from aphq.models.architecture import (
    Architecture,
    NormPair,
    Reader,
    Step,
    Stream,
    TaskName,
    Unit,
    module_step,
    register,
    replace_all,
    unchanged,
)
from aphq.models.attention import LatentPool, VitAttention
from aphq.models.timm_parts import (
    activation_factory,
    arguments_of,
    block_norms,
    block_writers,
    construct,
    describe_activation,
    describe_frame,
    describe_mlp,
    describe_norm,
    has_parameter,
    hidden_width,
    mlp_factory,
    mlp_ratio,
    norm_factory,
    readers_of,
    require_type,
    timm_mlp,
)


@register
class TimmVit(Architecture):
    family = "timm.VisionTransformer"
    classes: ClassVar[tuple[type[nn.Module], ...]] = (VisionTransformer,)
    scales: ClassVar[tuple[str, str]] = ("ls1.gamma", "ls2.gamma")  # parameters of a block's LayerScale

    blocks: ClassVar[tuple[type[nn.Module], ...]] = (Block,)
    attentions: ClassVar[tuple[type[nn.Module], ...]] = (Attention, VitAttention)
    may_have_gates: ClassVar[bool] = False  # in attention

    def check(self, model: Any) -> None:
        require_type(model.patch_embed, "patch_embed", PatchEmbed)
        for i, block in enumerate(model.blocks):
            require_type(block, f"blocks.{i}", *self.blocks)
            require_type(block.attn, f"blocks.{i}.attn", *self.attentions)
            describe_mlp(block.mlp, f"blocks.{i}.mlp")
            if getattr(block.attn, "gate", None) is not None and not self.may_have_gates:
                raise ModelError(f"module 'blocks.{i}.attn' has a gate; supported there: Attention without a gate")
        if getattr(model, "attn_pool", None) is not None:
            require_type(model.attn_pool, "attn_pool", AttentionPoolLatent, LatentPool)

    def task_of(self, model: Any) -> TaskName:
        return "embedding" if isinstance(model.head, nn.Identity) else "classification"

    def units(self, model: Any) -> tuple[Unit, ...]:
        last = f"blocks.{len(model.blocks) - 1}"
        blocks = tuple(
            Unit(
                name=name,
                kind="block",
                run=self.step(name),
                bridge=self.before_head if name == last else unchanged,
                modules=(name,),
                mlp=timm_mlp(model.get_submodule(f"{name}.mlp"), f"{name}.mlp"),
                norms=self.norms(model, name),
            )
            for name in (f"blocks.{i}" for i in range(len(model.blocks)))
        )
        embed = Unit("patch_embed", "patch_embed", module_step("patch_embed"), self.embed, ("patch_embed",))
        return embed, *blocks, self.head_unit(model)

    def step(self, block: str) -> Step:
        """How a block runs."""
        return module_step(block)

    def norms(self, model: Any, block: str) -> tuple[NormPair, ...]:
        return block_norms(model, block)

    def embed(self, model: Any, x: Tensor) -> Tensor:
        """From the patches to the first block's input."""
        out: Tensor = model.norm_pre(model.patch_drop(model._pos_embed(x)))
        return out

    def head_unit(self, model: Any) -> Unit:
        modules = ("head",) if getattr(model, "attn_pool", None) is None else ("attn_pool", "head")
        return Unit("head", "head", _head, unchanged, modules)

    def before_head(self, model: Any, x: Tensor) -> Tensor:
        """The last block's output to the head unit's input; pooling by attention is part of the head."""
        x = model.norm(x)
        return x if getattr(model, "attn_pool", None) is not None else model.fc_norm(model.pool(x))

    def streams(self, model: Any) -> tuple[Stream, ...]:
        """One, from the patches to the head, unless something on the way depends on the basis."""
        last = self.last_reader(model)
        before = (model.patch_embed.norm, getattr(model, "norm_pre", nn.Identity()))
        if last is None or not all(isinstance(m, nn.Identity) for m in before):
            return ()
        if not self.norms(model, "blocks.0"):
            return ()
        blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
        writers = [writer for block in blocks for writer in block_writers(block)]
        scales = [f"{block}.{scale}" for block in blocks for scale in self.scales]
        constants = ("pos_embed", "cls_token", "reg_token", "dist_token")
        stream = Stream(
            writers=("patch_embed.proj", *writers),
            readers=(*(reader for block in blocks for reader in readers_of(self.norms(model, block))), last),
            constants=tuple(name for name in constants if getattr(model, name, None) is not None),
            scales=tuple(
                (scale, writer) for scale, writer in zip(scales, writers, strict=True) if has_parameter(model, scale)
            ),
        )
        return (stream,)

    def last_reader(self, model: Any) -> Reader | None:
        """The norm before the head: the final one or, of pooled features, their own."""
        norms = [name for name in ("norm", "fc_norm") if not isinstance(getattr(model, name), nn.Identity)]
        if (
            len(norms) != 1
            or self.task_of(model) == "embedding"
            or getattr(model, "attn_pool", None) is not None
            or model.global_pool not in ("token", "avg")
        ):
            return None
        return Reader(norms[0], tuple(name for name in ("head", "head_dist") if hasattr(model, name)))

    def open_attention(self, model: Any) -> None:
        replace_all(model, {Attention: VitAttention, AttentionPoolLatent: LatentPool})

    def describe(self, model: Any) -> dict[str, Any]:
        block, embed = model.blocks[0], model.patch_embed
        return {
            **describe_frame(model),
            "depth": len(model.blocks),
            "num_heads": block.attn.num_heads,
            "mlp_ratio": mlp_ratio(hidden_width(block.mlp), model.embed_dim),
            "qkv_bias": block.attn.qkv.bias is not None,
            "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
            "scale_attn_norm": not isinstance(getattr(block.attn, "norm", nn.Identity()), nn.Identity),
            "scale_mlp_norm": not isinstance(block.mlp.norm, nn.Identity),
            "proj_bias": block.attn.proj.bias is not None,
            "init_values": 1e-5 if isinstance(block.ls1, LayerScale) else None,
            "class_token": model.cls_token is not None,
            "pos_embed": "none" if model.pos_embed is None else "learn",
            "no_embed_class": model.no_embed_class,
            "reg_tokens": model.num_reg_tokens,
            "pre_norm": not isinstance(model.norm_pre, nn.Identity),
            "final_norm": not (isinstance(model.norm, nn.Identity) and isinstance(model.fc_norm, nn.Identity)),
            "fc_norm": not isinstance(model.fc_norm, nn.Identity),
            "pool_include_prefix": getattr(model, "pool_include_prefix", False),
            "dynamic_img_size": model.dynamic_img_size,
            "dynamic_img_pad": embed.dynamic_img_pad,
            "embed_norm": None
            if isinstance(embed.norm, nn.Identity)
            else describe_norm(embed.norm, "patch_embed.norm"),
            "norm": describe_norm(block.norm1, "blocks.0.norm1"),
            "mlp": describe_mlp(block.mlp, "blocks.0.mlp"),
            "activation": describe_activation(block.mlp.act, "blocks.0.mlp.act"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = arguments_of(description)
        arguments["act_layer"] = activation_factory(arguments.pop("activation"))
        arguments["mlp_layer"] = mlp_factory(arguments.pop("mlp", "mlp"))  # files of earlier versions do not say
        embed_norm = arguments.pop("embed_norm")
        arguments["embed_norm_layer"] = None if embed_norm is None else norm_factory(embed_norm)
        return construct(self.classes[0], arguments)


@register
class TimmDistilledVit(TimmVit):
    """Two tokens, two heads, whose predictions are averaged."""

    family = "timm.VisionTransformerDistilled"
    classes = (VisionTransformerDistilled,)

    def head_unit(self, model: Any) -> Unit:
        return Unit("head", "head", _distilled_head, unchanged, ("head", "head_dist"))

    def before_head(self, model: Any, x: Tensor) -> Tensor:
        tokens: Tensor = model.norm(x)[:, :2]
        return tokens


def _head(model: Any, x: Tensor) -> Tensor:
    if getattr(model, "attn_pool", None) is not None:
        x = model.fc_norm(model.pool(x))
    out: Tensor = model.head(model.head_drop(x))
    return out


def _distilled_head(model: Any, x: Tensor) -> Tensor:
    out: Tensor = (model.head(x[:, 0]) + model.head_dist(x[:, 1])) / 2
    return out
