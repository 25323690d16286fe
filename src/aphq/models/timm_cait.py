"""timm's Cait: blocks whose heads talk to each other, then blocks in which the class token alone looks around."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.cait import Cait, ClassAttn, LayerScaleBlock, LayerScaleBlockClassAttn, TalkingHeadAttn
from torch import Tensor, nn

from aphq.models.architecture import (
    Architecture,
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
from aphq.models.attention import OpenAttention, Projection, Projections
from aphq.models.timm_parts import (
    activation_factory,
    arguments_of,
    block_norms,
    block_writers,
    construct,
    describe_activation,
    describe_frame,
    describe_norm,
    mlp_ratio,
    readers_of,
    require_type,
    timm_mlp,
)


class TalkingHeads(OpenAttention):
    """timm's `TalkingHeadAttn`: a layer mixes the heads' scores, another one their probabilities."""

    usual_core = False

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, fused=False)
        self.qkv, self.proj, self.proj_l, self.proj_w = source.qkv, source.proj, source.proj_l, source.proj_w

    @property
    def direct(self) -> bool:
        return False  # the queries are scaled first, so that the mixed scores are those of the original

    @property
    def averages(self) -> bool:
        return False  # mixed probabilities add up to anything

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = self.qk(q * self.scale, k.transpose(-2, -1))
        weights = self._mixed(self.proj_w, self._mixed(self.proj_l, scores).softmax(dim=-1))
        out: Tensor = self.proj(self.pv(weights, v).transpose(1, 2).flatten(2))
        return out

    def _mixed(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Over the heads of [batch, heads, tokens, tokens]."""
        out: Tensor = layer(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return out


class ClassAttention(OpenAttention):
    """timm's `ClassAttn`: the first token asks, all answer."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.q, self.k, self.v, self.proj = source.q, source.k, source.v, source.proj

    def projections(self) -> Projections:
        return Projections(Projection(self.q), Projection(self.k), Projection(self.v), self.proj)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x[:, 0]).unsqueeze(1))
        out = self.core(q, self.split(self.k(x)), self.split(self.v(x)), None)
        tokens: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return tokens


@register
class TimmCait(Architecture):
    """What flows through the last blocks is the class token before the patches, which they only read."""

    family = "timm.Cait"
    classes = (Cait,)

    def check(self, model: Any) -> None:
        require_type(model.patch_embed, "patch_embed", PatchEmbed)
        for name, block in _blocks(model):
            require_type(block, name, LayerScaleBlock, LayerScaleBlockClassAttn)
            require_type(block.attn, f"{name}.attn", TalkingHeadAttn, ClassAttn, TalkingHeads, ClassAttention)
            require_type(block.mlp, f"{name}.mlp", Mlp)

    def task_of(self, model: Any) -> TaskName:
        return "embedding" if isinstance(model.head, nn.Identity) else "classification"

    def units(self, model: Any) -> tuple[Unit, ...]:
        units = [Unit("patch_embed", "patch_embed", module_step("patch_embed"), _embed, ("patch_embed",))]
        blocks = _blocks(model)
        for i, (name, block) in enumerate(blocks):
            by_class = isinstance(block, LayerScaleBlockClassAttn)
            bridge: Step = unchanged
            if not by_class and (i + 1 == len(blocks) or isinstance(blocks[i + 1][1], LayerScaleBlockClassAttn)):
                bridge = _with_class_token
            if i + 1 == len(blocks):
                bridge = _pooled if by_class else _pooled_at_once
            run = _class_step(name) if by_class else module_step(name)
            parts = (timm_mlp(block.mlp, f"{name}.mlp"), block_norms(model, name))
            units.append(Unit(name, "block", run, bridge, (name,), *parts))
        units.append(Unit("head", "head", _head, unchanged, ("head",)))
        return tuple(units)

    def streams(self, model: Any) -> tuple[Stream, ...]:
        if self.task_of(model) == "embedding" or model.global_pool not in ("token", "avg"):
            return ()
        names = [name for name, _ in _blocks(model)]
        pairs = [(name, number, writer) for name in names for number, writer in enumerate(block_writers(name), 1)]
        stream = Stream(
            writers=("patch_embed.proj", *(writer for _, _, writer in pairs)),
            readers=(*(r for name in names for r in readers_of(block_norms(model, name))), Reader("norm", ("head",))),
            constants=("cls_token", "pos_embed"),
            scales=tuple((f"{name}.gamma_{number}", writer) for name, number, writer in pairs),
        )
        return (stream,)

    def open_attention(self, model: Any) -> None:
        replace_all(model, {TalkingHeadAttn: TalkingHeads, ClassAttn: ClassAttention})

    def describe(self, model: Any) -> dict[str, Any]:
        block, token_block = model.blocks[0], model.blocks_token_only[0]
        return {
            **describe_frame(model),
            "depth": len(model.blocks),
            "num_heads": block.attn.num_heads,
            "mlp_ratio": mlp_ratio(block.mlp.fc1.weight.shape[0], model.embed_dim),
            "qkv_bias": block.attn.qkv.bias is not None,
            "depth_token_only": len(model.blocks_token_only),
            "mlp_ratio_token_only": mlp_ratio(token_block.mlp.fc1.weight.shape[0], model.embed_dim),
            "norm": describe_norm(block.norm1, "blocks.0.norm1"),
            "activation": describe_activation(block.mlp.act, "blocks.0.mlp.act"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments = arguments_of(description)
        arguments["act_layer"] = activation_factory(arguments.pop("activation"))
        return construct(Cait, arguments)


def _blocks(model: Any) -> list[tuple[str, Any]]:
    first = [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]
    return first + [(f"blocks_token_only.{i}", block) for i, block in enumerate(model.blocks_token_only)]


def _embed(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.pos_drop(x + model.pos_embed)
    return out


def _with_class_token(model: Any, x: Tensor) -> Tensor:
    return torch.cat([model.cls_token.expand(x.shape[0], -1, -1), x], dim=1)


def _class_step(name: str) -> Any:
    def run(model: Any, x: Tensor) -> Tensor:
        token = model.get_submodule(name)(x[:, 1:], x[:, :1])
        return torch.cat([token, x[:, 1:]], dim=1)

    return run


def _pooled(model: Any, x: Tensor) -> Tensor:
    tokens: Tensor = model.norm(x)
    return tokens[:, 1:].mean(dim=1) if model.global_pool == "avg" else tokens[:, 0]


def _pooled_at_once(model: Any, x: Tensor) -> Tensor:
    """For a model without blocks of the second kind."""
    return _pooled(model, _with_class_token(model, x))


def _head(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.head(model.head_drop(x))
    return out
