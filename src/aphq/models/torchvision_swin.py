"""torchvision's SwinTransformer, first and second version: swin_t, swin_v2_t and their like, at any image size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.swin_transformer import (
    PatchMerging,
    PatchMergingV2,
    ShiftedWindowAttention,
    ShiftedWindowAttentionV2,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerBlockV2,
)

from aphq.data.preprocessing import Preprocessing
from aphq.models.architecture import (
    Architecture,
    NormPair,
    TaskName,
    Unit,
    module_step,
    register,
    replace_all,
    unchanged,
)
from aphq.models.attention import OpenAttention, linear_of
from aphq.models.attention_cosine import CosineAttention, table_of
from aphq.models.timm_parts import describe_norm, mlp_ratio, require_type
from aphq.models.torchvision_parts import build_with_head, mlp_of, torchvision_input
from aphq.models.windows import merge, padded, partition, shift_mask


class ShiftedWindows(nn.Module):
    """What both versions share: the attention itself cuts its windows."""

    window_size: list[int]
    shift_size: list[int]

    def forward(self, x: Tensor) -> Tensor:
        """[batch, height, width, channels] -> the same"""
        height, width = x.shape[1:3]
        window = (self.window_size[0], self.window_size[1])
        x = padded(x, window)
        size = (x.shape[1], x.shape[2])
        # a window as large as the map has no neighbours to be shifted to
        down, right = (0 if w >= s else moved for w, s, moved in zip(window, size, self.shift_size, strict=True))
        mask = None
        if down or right:
            x = x.roll((-down, -right), (1, 2))
            mask = shift_mask(size, window, (down, right), x.device)
        x = merge(self.attend(partition(x, window), mask), window, size)
        if down or right:
            x = x.roll((down, right), (1, 2))
        return x[:, :height, :width].contiguous()

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[batch * windows, tokens, channels] -> the same"""
        attention: Any = self
        qkv = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mask = None if mask is None else mask.unsqueeze(1)
        out: Tensor = attention.proj(attention.core(q, k, v, mask).transpose(1, 2).flatten(2))
        return out


class WindowAttention(ShiftedWindows, OpenAttention):
    """torchvision's `ShiftedWindowAttention`."""

    relative_position_index: Tensor

    def __init__(self, source: Any) -> None:
        scale = (source.qkv.in_features // source.num_heads) ** -0.5
        OpenAttention.__init__(self, source.num_heads, scale, fused=False)
        self.window_size, self.shift_size = list(source.window_size), list(source.shift_size)
        self.qkv, self.proj = source.qkv, source.proj
        self.relative_position_bias_table = source.relative_position_bias_table
        self.register_buffer("relative_position_index", source.relative_position_index)

    def core(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        positions = self.position_bias()
        return super().core(q, k, v, positions if bias is None else positions + bias)

    def position_bias(self) -> Tensor:
        area = self.window_size[0] * self.window_size[1]
        table = self.relative_position_bias_table[self.relative_position_index]
        bias: Tensor = table.view(area, area, -1).permute(2, 0, 1).contiguous()
        return bias.unsqueeze(0)


class CosineWindowAttention(ShiftedWindows, CosineAttention):
    """torchvision's `ShiftedWindowAttentionV2`."""

    def __init__(self, source: Any) -> None:
        area = source.window_size[0] * source.window_size[1]
        table = table_of(source.cpb_mlp, source.relative_coords_table, source.num_heads)
        index = source.relative_position_index
        CosineAttention.__init__(self, source.num_heads, area, source.logit_scale, table, index)
        self.window_size, self.shift_size = list(source.window_size), list(source.shift_size)
        self.qkv, self.proj = _without_key_bias(source.qkv), source.proj


def _without_key_bias(qkv: Any) -> nn.Linear:
    """The second version ignores whatever bias the keys have."""
    if qkv.bias is None:
        return linear_of(qkv.weight, None)
    third = len(qkv.bias) // 3
    keep = torch.ones_like(qkv.bias)
    keep[third : 2 * third] = 0
    return linear_of(qkv.weight, qkv.bias.detach() * keep)


@register
class TorchvisionSwin(Architecture):
    family = "torchvision.SwinTransformer"
    classes = (SwinTransformer,)

    def check(self, model: Any) -> None:
        attentions = (ShiftedWindowAttention, ShiftedWindowAttentionV2, WindowAttention, CosineWindowAttention)
        for name, stage in _stages(model):
            if isinstance(stage, nn.Sequential):
                for b, block in enumerate(_inner(stage)):
                    require_type(block, f"{name}.{b}", SwinTransformerBlock, SwinTransformerBlockV2)
                    require_type(block.attn, f"{name}.{b}.attn", *attentions)
            else:
                require_type(stage, name, PatchMerging, PatchMergingV2)

    def task_of(self, model: Any) -> TaskName:
        return "embedding" if isinstance(model.head, nn.Identity) else "classification"

    def num_classes(self, model: Any) -> int:
        return len(model.norm.weight) if isinstance(model.head, nn.Identity) else int(model.num_classes)

    def preprocessing(self, model: Any) -> Preprocessing:
        """Any size will do; the published weights want these."""
        return torchvision_input(256, 260) if _is_second(model) else torchvision_input(224, 232)

    def units(self, model: Any) -> tuple[Unit, ...]:
        units = [Unit("features.0", "patch_embed", module_step("features.0"), unchanged, ("features.0",))]
        for name, stage in _stages(model):
            if isinstance(stage, nn.Sequential):
                for block in (f"{name}.{b}" for b in range(len(stage))):
                    parts = (mlp_of(f"{block}.mlp"), _norms(model, block))
                    units.append(Unit(block, "block", module_step(block), unchanged, (block,), *parts))
            else:
                norms = () if _is_second(model) else (NormPair(f"{name}.norm", f"{name}.reduction"),)
                units.append(Unit(name, "merge", module_step(name), unchanged, (name,), norms=norms))
        units[-1] = replace(units[-1], bridge=_pool)
        units.append(Unit("head", "head", module_step("head"), unchanged, ("head",)))
        return tuple(units)

    def open_attention(self, model: Any) -> None:
        twins = {ShiftedWindowAttention: WindowAttention, ShiftedWindowAttentionV2: CosineWindowAttention}
        replace_all(model, twins)

    def describe(self, model: Any) -> dict[str, Any]:
        stages = [_inner(stage) for _, stage in _stages(model) if isinstance(stage, nn.Sequential)]
        block, conv = stages[0][0], model.features[0][0]
        return {
            "version": 2 if _is_second(model) else 1,
            "patch_size": list(conv.kernel_size),
            "embed_dim": conv.weight.shape[0],
            "depths": [len(stage) for stage in stages],
            "num_heads": [stage[0].attn.num_heads for stage in stages],
            "window_size": list(block.attn.window_size),
            "mlp_ratio": mlp_ratio(block.mlp[0].weight.shape[0], conv.weight.shape[0]),
            "num_classes": None if isinstance(model.head, nn.Identity) else model.head.weight.shape[0],
            "norm": describe_norm(block.norm1, "features.1.0.norm1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = dict(description)
        if arguments.pop("version") == 2:
            arguments |= {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2}
        return build_with_head(SwinTransformer, arguments, "head")


def _stages(model: Any) -> list[tuple[str, Any]]:
    """What follows the patch embedding: sequences of blocks, and merges between them."""
    return [(f"features.{i}", part) for i, part in enumerate(model.features) if i > 0]


def _inner(stage: nn.Sequential) -> list[Any]:
    return list(stage)


def _is_second(model: Any) -> bool:
    return isinstance(model.features[1][0], SwinTransformerBlockV2)


def _norms(model: Any, block: str) -> tuple[NormPair, ...]:
    """The second version normalises last, so no layer reads a norm alone. In the first, zeros may fill windows up after
    norm1, depending on the image: they must go on meaning zero."""
    if _is_second(model):
        return ()
    first = NormPair(f"{block}.norm1", f"{block}.attn.qkv", may_shift=False)
    return first, NormPair(f"{block}.norm2", f"{block}.mlp.0")


def _pool(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.flatten(model.avgpool(model.permute(model.norm(x))))
    return out
