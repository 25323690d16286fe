"""torchvision's VisionTransformer: vit_b_16 and its like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import EncoderBlock, MLPBlock, VisionTransformer

from aphq.data.preprocessing import Preprocessing
from aphq.models.architecture import (
    Architecture,
    Mlp,
    NormPair,
    Reader,
    Stream,
    TaskName,
    Unit,
    module_step,
    register,
    replace_module,
    unchanged,
)
from aphq.models.attention_packed import PackedAttention, require_plain
from aphq.models.timm_parts import describe_norm, readers_of, require_type
from aphq.models.torchvision_parts import build_with_head, mlp_of, torchvision_input
from aphq.quant.layers import QuantizedConv2d


@register
class TorchvisionVit(Architecture):
    family = "torchvision.VisionTransformer"
    classes = (VisionTransformer,)

    def check(self, model: Any) -> None:
        require_type(model.conv_proj, "conv_proj", nn.Conv2d, QuantizedConv2d)  # no convolutional stem
        for name, block in _blocks(model):
            require_type(block, name, EncoderBlock)
            require_type(block.self_attention, f"{name}.self_attention", nn.MultiheadAttention, PackedAttention)
            if isinstance(block.self_attention, nn.MultiheadAttention):
                require_plain(block.self_attention, f"{name}.self_attention")
            require_type(block.mlp, f"{name}.mlp", MLPBlock)

    def task_of(self, model: Any) -> TaskName:
        return "embedding" if _is_empty(model.heads) else "classification"

    def num_classes(self, model: Any) -> int:
        return int(model.hidden_dim if _is_empty(model.heads) else model.num_classes)

    def preprocessing(self, model: Any) -> Preprocessing:
        return torchvision_input(model.image_size)

    def units(self, model: Any) -> tuple[Unit, ...]:
        names = [name for name, _ in _blocks(model)]
        blocks = (
            Unit(
                name=name,
                kind="block",
                run=module_step(name),
                bridge=_class_token if name == names[-1] else unchanged,
                modules=(name,),
                mlp=_mlp(name),
                norms=_norms(name),
            )
            for name in names
        )
        embed = Unit("conv_proj", "patch_embed", module_step("conv_proj"), _tokens, ("conv_proj",))
        return embed, *blocks, Unit("heads", "head", module_step("heads"), unchanged, ("heads",))

    def streams(self, model: Any) -> tuple[Stream, ...]:
        if self.task_of(model) == "embedding":
            return ()
        names = [name for name, _ in _blocks(model)]
        first = "heads.pre_logits" if hasattr(model.heads, "pre_logits") else "heads.head"
        writers = [writer for name in names for writer in (f"{name}.self_attention.proj", _mlp(name).fc2)]
        readers = [reader for name in names for reader in readers_of(_norms(name))]
        stream = Stream(
            writers=("conv_proj", *writers),
            readers=(*readers, Reader("encoder.ln", (first,))),
            constants=("class_token", "encoder.pos_embedding"),
        )
        return (stream,)

    def open_attention(self, model: Any) -> None:
        for name, block in _blocks(model):
            if isinstance(block.self_attention, nn.MultiheadAttention):
                replace_module(model, f"{name}.self_attention", PackedAttention(block.self_attention))

    def describe(self, model: Any) -> dict[str, Any]:
        name, block = _blocks(model)[0]
        return {
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "num_layers": len(_blocks(model)),
            "num_heads": block.self_attention.num_heads,
            "hidden_dim": model.hidden_dim,
            "mlp_dim": model.mlp_dim,
            "num_classes": None if _is_empty(model.heads) else model.heads.head.weight.shape[0],
            "representation_size": model.representation_size,
            "norm": describe_norm(block.ln_1, f"{name}.ln_1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        return build_with_head(VisionTransformer, dict(description), "heads")


def _blocks(model: Any) -> list[tuple[str, Any]]:
    return [(f"encoder.layers.{name}", block) for name, block in model.encoder.layers.named_children()]


def _is_empty(heads: nn.Module) -> bool:
    """Whether somebody took the classifier off, as is usual for embeddings."""
    return isinstance(heads, nn.Identity) or (
        isinstance(getattr(heads, "head", None), nn.Identity) and len(list(heads.children())) == 1
    )


def _mlp(block: str) -> Mlp:
    return mlp_of(f"{block}.mlp")


def _norms(block: str) -> tuple[NormPair, NormPair]:
    return NormPair(f"{block}.ln_1", f"{block}.self_attention.qkv"), NormPair(f"{block}.ln_2", _mlp(block).fc1)


def _tokens(model: Any, x: Tensor) -> Tensor:
    """From the convolution's map to the first block's input."""
    tokens = x.flatten(2).permute(0, 2, 1)
    tokens = torch.cat([model.class_token.expand(x.shape[0], -1, -1), tokens], dim=1)
    out: Tensor = model.encoder.dropout(tokens + model.encoder.pos_embedding)
    return out


def _class_token(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.encoder.ln(x)[:, 0]
    return out
