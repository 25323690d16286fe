"""What a `TimmBackbone` is made of, as plain values, and its units: those of timm's classifier without the head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from timm.models import FeatureListNet
from timm.models._features import FeatureGetterNet
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from aphq.errors import ModelError
from aphq.models.architecture import (
    Architecture,
    Mlp,
    NormPair,
    State,
    Step,
    Unit,
    architecture_named,
    find_architecture,
    unchanged,
)
from aphq.models.detection.adapter import map_unit
from aphq.models.detection.timm_backbone import FLAT, TimmBackbone, maps_of, model_of, patch_of, place_in
from aphq.models.detection.torchvision_trunk import Trunk, keep
from aphq.models.timm_parts import require_type

GRID = "grid"  # rows and columns of the tokens of a ViT
Family = Literal["timm.SwinTransformer", "timm.SwinTransformerV2", "timm.VisionTransformer"]


@dataclass(frozen=True)
class TimmBody:
    """A body of timm's features."""

    family: Family
    arguments: dict[str, Any]
    read: tuple[int, ...]  # the stages or blocks that maps are taken from
    names: tuple[str, ...]  # of the maps
    flat: bool  # the stages side by side, or the model as it is
    normalised: bool  # maps have gone through the model's last norm
    thinned: bool  # the pyramid has a further level, every second row and column of the last one

    @classmethod
    def of(cls, backbone: Any) -> TimmBody:
        body, fpn = backbone.body, backbone.fpn
        model, flat = model_of(body), type(body) in FLAT
        family: Any = _family_of(model)
        described = {**family.describe(model), "num_classes": 0, "global_pool": ""}
        normalised = not flat and bool(body.norm)
        thinned = fpn.extra_blocks is not None
        return cls(family.family, described, maps_of(body), backbone.names, flat, normalised, thinned)

    def strides(self) -> list[int]:
        patch = int(self.arguments["patch_size"])
        return [patch if self.family == "timm.VisionTransformer" else patch * 2**i for i in self.read]

    def backbone(self, width: int, norm: Callable[..., nn.Module] | None) -> nn.Module:
        model = architecture_named(self.family).build(self.arguments)
        body: Any
        if self.flat:
            body = FeatureListNet(model, self.read, output_fmt="NHWC", flatten_sequential=True)
        else:
            body = FeatureGetterNet(model, self.read, norm=self.normalised)
        extra = LastLevelMaxPool() if self.thinned else None
        return TimmBackbone(body, FeaturePyramidNetwork(body.feature_info.channels(), width, extra, norm), self.names)


def _family_of(model: nn.Module) -> Architecture:
    family = find_architecture(model)
    assert family is not None
    return family


def check_timm(backbone: Any, divisor: int) -> None:
    """For images whose sides are multiples of `divisor`."""
    body, fpn = backbone.body, backbone.fpn
    if fpn.extra_blocks is not None:
        require_type(fpn.extra_blocks, "backbone.fpn.extra_blocks", LastLevelMaxPool)
    model, patch = model_of(body), patch_of(body)
    try:
        _family_of(model).check(model)
    except ModelError as problem:
        raise ModelError(f"in 'backbone.body': {problem}") from None
    if divisor % patch and not model.patch_embed.dynamic_img_pad:
        raise ModelError(
            f"patches of {patch} x {patch} do not fill images whose sides are multiples of {divisor}: give the "
            f"detector a size_divisible that {patch} divides, or the timm model dynamic_img_pad=True"
        )
    if len(maps_of(body)) != len(fpn.inner_blocks):
        raise ModelError(
            f"'backbone.body' gives {len(maps_of(body))} maps and 'backbone.fpn' takes {len(fpn.inner_blocks)}: "
            "say with out_indices which are wanted"
        )


def timm_trunk(backbone: TimmBackbone) -> Trunk:
    """The classifier's units up to its head, which pass on a state instead of a tensor."""
    body: Any = backbone.body
    model = model_of(body)
    maps = dict(zip(maps_of(body), backbone.names, strict=True))
    chain = _family_of(model).units(model)[:-1]
    ends = {_number(unit): unit.name for unit in chain}  # the last unit of each stage
    units = []
    for unit in chain:
        bridge = _lifted(unit.bridge) if unit.bridge is not unchanged else unchanged
        kept = maps.get(_number(unit))
        if kept is not None and ends[_number(unit)] == unit.name:
            bridge = keep(kept, ends=unit is chain[-1], bridge=bridge)
        units.append(_in_detector(unit, body, bridge))
    norms = _map_norms(body, maps)
    takes = tuple(f"c.{name}" for name in backbone.names)
    return Trunk(tuple(units), _reader(list(maps.items())), (*takes, GRID), norms)


def _number(unit: Unit) -> int:
    """Of the stage (layers.2.blocks.0) or block (blocks.2) that a unit is in; -1 for the embedding."""
    return -1 if unit.kind == "patch_embed" else int(unit.name.split(".")[1])


def _in_detector(unit: Unit, body: Any, bridge: Step) -> Unit:
    def place(name: str) -> str:
        return place_in(body, name)

    norms = tuple(
        replace(pair, norm=place(pair.norm), linear=place(pair.linear), others=tuple(map(place, pair.others)))
        for pair in unit.norms
    )
    mlp = unit.mlp and Mlp(
        place(unit.mlp.name),
        place(unit.mlp.fc1),
        place(unit.mlp.act),
        place(unit.mlp.fc2),
        unit.mlp.norm and place(unit.mlp.norm),
    )
    reads = "image" if unit.kind == "patch_embed" else "x"
    return map_unit(place(unit.name), unit.kind, reads, bridge, mlp=mlp, norms=norms)


def _lifted(bridge: Step) -> Step:
    """From the patches of a ViT to its tokens, which no longer say how they lay."""

    def lifted(model: Any, state: State) -> State:
        x = state["x"]  # [1, rows, columns, channels]
        return {**state, "x": bridge(model_of(model.backbone.body), x), GRID: x.new_tensor(x.shape[1:3])}

    return lifted


def _map_norms(body: Any, maps: dict[int, str]) -> tuple[NormPair, ...]:
    """The last norm feeds the pyramid's convolution of every map of a ViT, of a Swin that of the last stage."""
    convolutions = [f"backbone.fpn.inner_blocks.{i}.0" for i, number in enumerate(maps) if _normalised(body, number)]
    if not convolutions or isinstance(body.model.norm, nn.Identity):
        return ()
    return (NormPair("backbone.body.model.norm", convolutions[0], others=tuple(convolutions[1:])),)


def _normalised(body: Any, number: int) -> bool:
    if type(body) in FLAT or not body.norm:
        return False
    return type(body.model) is VisionTransformer or number + 1 == len(body.model.layers)


def _reader(maps: list[tuple[int, str]]) -> Callable[[Any, State], OrderedDict[str, Tensor]]:
    def read(model: Any, state: State) -> OrderedDict[str, Tensor]:
        return OrderedDict((name, _map(model.backbone.body, number, state, f"c.{name}")) for number, name in maps)

    return read


def _map(body: Any, number: int, state: State, name: str) -> Tensor:
    """Channels first, as timm's features would give it."""
    x = state[name]
    if _normalised(body, number):
        x = body.model.norm(x)
    if GRID in state:
        rows, columns = (int(side) for side in state[GRID])
        x = x[:, body.model.num_prefix_tokens :].unflatten(1, (rows, columns))
    x = x.permute(0, 3, 1, 2)
    return x if type(body) in FLAT else x.contiguous()
