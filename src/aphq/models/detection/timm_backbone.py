"""A Swin or ViT of timm under torchvision's feature pyramid, as the backbone of a torchvision detector.

People write such a backbone as a small module of their own, which takes timm's maps, puts channels first and hands them
to the pyramid. Whatever it is called and however it names its parts, it is one if it holds a timm model, a pyramid and
no other parameters, and gives what `TimmBackbone` gives of the same parts.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import timm
import torch
from timm.layers import ClassifierHead
from timm.models import FeatureDictNet, FeatureListNet, is_model_in_modules
from timm.models._features import FeatureGetterNet, feature_take_indices
from timm.models.swin_transformer import SwinTransformer, SwinTransformerStage
from timm.models.swin_transformer_v2 import SwinTransformerV2, SwinTransformerV2Stage
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from aphq.errors import ModelError
from aphq.models.timm_parts import require_type

FLAT = (FeatureListNet, FeatureDictNet)  # timm's features of Swin: its stages side by side, tokens laid out as images
STAGES: dict[type, Any] = {SwinTransformerStage: SwinTransformer, SwinTransformerV2Stage: SwinTransformerV2}
MODELS = (SwinTransformer, SwinTransformerV2, VisionTransformer)
SUPPORTED = (
    "BackboneWithFPN on a ResNet, or a module that holds a timm SwinTransformer, SwinTransformerV2 or "
    "VisionTransformer (best with features_only=True), torchvision's FeaturePyramidNetwork and no other parameters"
)
PROBE = (64, 96)  # about the height and width of the image on which two backbones are compared


class TimmBackbone(nn.Module):
    """[batch, 3, height, width] -> the levels of the pyramid by name, each [batch, out_channels, height', width'].

    Args:
        body: what `timm.create_model(..., features_only=True)` gives for a Swin or a ViT.
        fpn: torchvision's pyramid on the widths of the body's maps.
        names: of the levels, without that of the pyramid's own last one; by default "0", "1" and so on.
    """

    def __init__(self, body: nn.Module, fpn: Any, names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.body, self.fpn = body, fpn
        self.names = tuple(names or map(str, range(len(fpn.inner_blocks))))
        self.out_channels = len(fpn.layer_blocks[0][0].weight)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.body(images)
        maps = list(maps.values()) if isinstance(maps, dict) else maps
        if type(self.body) in FLAT:
            maps = [x.permute(0, 3, 1, 2) for x in maps]
        levels: OrderedDict[str, Tensor] = self.fpn(OrderedDict(zip(self.names, maps, strict=True)))
        return levels


def timm_backbone(name: str, width: int = 256, *, pretrained: bool = True, **arguments: Any) -> TimmBackbone:
    """A backbone for torchvision's `MaskRCNN` or `FasterRCNN`: timm's Swin or ViT `name`, for images of any size, and a
    pyramid of `width` channels with one level more than there are maps.

    The maps are those of a Swin's stages or of a ViT's last block, unless `out_indices` says otherwise; other
    `arguments` go to timm too."""
    plain = is_model_in_modules(name.split(".")[0], {"vision_transformer", "deit"})
    usual: dict[str, Any] = {"dynamic_img_size": True, "out_indices": 1} if plain else {"strict_img_size": False}
    body: Any = timm.create_model(name, pretrained=pretrained, features_only=True, **{**usual, **arguments})
    return TimmBackbone(body, FeaturePyramidNetwork(body.feature_info.channels(), width, LastLevelMaxPool()))


def adopted(backbone: Any) -> TimmBackbone:
    """The `TimmBackbone` of the same parts that computes what a backbone does; ModelError where there is none."""
    if type(backbone) is TimmBackbone:
        return backbone
    bodies = list(_outermost(backbone, (*FLAT, FeatureGetterNet, *MODELS)))
    pyramids: list[Any] = list(_outermost(backbone, (FeaturePyramidNetwork,)))
    if len(bodies) != 1 or len(pyramids) != 1:
        raise ModelError(f"module 'backbone' is a {type(backbone).__name__}; supported there: {SUPPORTED}")
    body, fpn = bodies[0], pyramids[0]
    known = {id(p) for part in (body, fpn) for p in part.parameters()}
    for name, parameter in backbone.named_parameters():
        if id(parameter) not in known:
            strange = f"'backbone.{name}' belongs to neither the timm model nor the pyramid"
            raise ModelError(f"{strange}; supported there: {SUPPORTED}")
    return _same(backbone, body, fpn)


@torch.no_grad()
def _same(backbone: nn.Module, body: nn.Module, fpn: Any) -> TimmBackbone:
    """Of the ways to read the body, the one in which it gives what the backbone gives."""
    known = next(fpn.parameters())
    patch = patch_of(body)
    sides = [patch * -(-side // patch) for side in PROBE]
    image = torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(0)).to(known)
    with _evaluating(backbone):
        try:
            levels = backbone(image)
        except Exception as problem:
            reason = " ".join(str(problem).split())[:200]
            raise ModelError(f"module 'backbone' cannot take an image of {sides[0]} x {sides[1]}: {reason}") from None
        names = list(levels)[: len(fpn.inner_blocks)] if isinstance(levels, dict) else []
        for reading in _readings(body, fpn) if len(names) == len(fpn.inner_blocks) else ():
            ours = TimmBackbone(reading, fpn, names)
            if _agree(levels, ours(image)):
                return ours
    raise ModelError(
        f"module 'backbone' ({type(backbone).__name__}) is not its timm model's maps, channels first, given to its "
        "pyramid one by one; see aphq.detection.TimmBackbone for what is supported"
    )


def _readings(body: Any, fpn: Any) -> Iterator[nn.Module]:
    """A body of features can be read in one way; a whole model may be asked for some of its maps, with or without its
    last norm."""
    if type(body) not in MODELS:
        if len(maps_of(body)) == len(fpn.inner_blocks):
            yield body
        return
    wanted = [block[0].weight.shape[1] for block in fpn.inner_blocks]
    if type(body) is VisionTransformer:
        count = len(body.blocks)
        read = tuple(range(max(0, count - len(wanted)), count))
    else:
        count = len(body.layers)
        read = tuple(i for i, stage in enumerate(body.layers) if stage.blocks[0].dim in wanted)
    if len(read) == len(wanted):
        for norm in (False, True) if read[-1] == count - 1 else (False,):
            yield FeatureGetterNet(_shared(body), read, norm=norm)


def _shared(model: Any) -> Any:
    """A model of the same parts, of which some can be taken away."""
    own = copy.copy(model)
    own._modules, own._parameters = dict(model._modules), dict(model._parameters)
    own.head = copy.deepcopy(model.head)  # it is emptied in place
    return own


def _agree(levels: Any, ours: Any) -> bool:
    return levels.keys() == ours.keys() and all(
        x.shape == ours[name].shape
        and torch.allclose(x, ours[name], rtol=1e-3, atol=1e-3 * float(x.abs().max()), equal_nan=True)
        for name, x in levels.items()
    )


def _outermost(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    if type(module) in classes:
        yield module
        return
    for child in module.children():
        yield from _outermost(child, classes)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without random drops inside the block; every part goes back to what it was."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


# -- what is in a body of features ----------------------------------------------------------------------------------


def model_of(body: Any) -> Any:
    """timm's model in it, as far as it is there; of stages side by side one that shares them."""
    if type(body) is FeatureGetterNet:
        require_type(body.model, "backbone.body.model", *MODELS)
        return body.model
    stages = [part for name, part in body.items() if name.startswith("layers_")]
    names = ["patch_embed", *(f"layers_{i}" for i in range(len(stages)))]
    cls = STAGES.get(type(stages[0])) if stages else None
    if cls is None or list(body) != names:
        kinds = ", ".join(f"{name} ({type(part).__name__})" for name, part in body.items())
        raise ModelError(f"module 'backbone.body' has the parts {kinds}; supported there: those of a timm Swin")
    whole: Any = cls.__new__(cls)
    nn.Module.__init__(whole)
    whole.patch_embed, whole.layers = body["patch_embed"], nn.Sequential(*stages)
    whole.norm, whole.head = nn.Identity(), ClassifierHead(1, 0, pool_type="")
    whole.num_classes, whole.global_pool = 0, ""
    whole.embed_dim = len(whole.patch_embed.proj.weight)
    return whole


def maps_of(body: Any) -> tuple[int, ...]:
    """The stages of a Swin, or blocks of a ViT, that maps are taken from, in forward order."""
    if type(body) is FeatureGetterNet:
        model = model_of(body)
        blocks = model.blocks if type(model) is VisionTransformer else model.layers
        return tuple(sorted(feature_take_indices(len(blocks), body.out_indices)[0]))  # type: ignore[arg-type]
    return tuple(int(name.removeprefix("layers_")) for name in body if name in body.return_layers)


def place_in(body: Any, name: str) -> str:
    """What a module of timm's model is called in the detector."""
    inner = f"model.{name}" if type(body) is FeatureGetterNet else name.replace("layers.", "layers_", 1)
    return f"backbone.body.{inner}"


def patch_of(body: Any) -> int:
    """The side of a patch, of a model that takes images of any size."""
    model = body if type(body) in MODELS else model_of(body)
    embed = model.patch_embed
    any_size, argument = not embed.strict_img_size, "strict_img_size=False"
    if type(model) is VisionTransformer:
        any_size, argument = model.dynamic_img_size, "dynamic_img_size=True"
    if not any_size:
        raise ModelError(
            f"the {type(model).__name__} in 'backbone' takes images of one size, {tuple(embed.img_size)}, and a "
            f"detector's differ: create it with {argument}"
        )
    if len(set(embed.patch_size)) > 1:
        raise ModelError(f"the patches in 'backbone' are of {tuple(embed.patch_size)}; supported there: squares")
    return int(embed.patch_size[0])
