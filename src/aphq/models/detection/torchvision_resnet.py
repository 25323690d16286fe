"""A ResNet under torchvision's pyramid: what is supported of it, and its units: the stem and every residual block."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from aphq.errors import ModelError
from aphq.models.architecture import State, Unit, unchanged
from aphq.models.detection.adapter import map_unit, without
from aphq.models.detection.torchvision_config import STEM, returned_maps
from aphq.models.detection.torchvision_trunk import Trunk, keep
from aphq.models.timm_parts import require_type

BATCH_NORMS = (nn.BatchNorm2d, FrozenBatchNorm2d)
CHANNELS = 1  # maps are [1, channels, height, width]


def check_resnet(backbone: Any) -> None:
    """A ResNet: stem, then layers of residual blocks, and nothing else; a pyramid with one level more."""
    body = backbone.body
    require_type(body, "backbone.body", IntermediateLayerGetter)
    require_type(backbone.fpn, "backbone.fpn", FeaturePyramidNetwork)
    require_type(backbone.fpn.extra_blocks, "backbone.fpn.extra_blocks", LastLevelMaxPool)
    names = [name for name, _ in body.named_children()]
    layers = [f"layer{number + 1}" for number in range(len(_layers(body)))]
    for found, wanted in zip(names, STEM, strict=False):
        if found != wanted:
            kind = type(body[found]).__name__
            raise ModelError(
                f"module 'backbone.body.{found}' is a {kind}; supported there: the parts of a ResNet "
                f"({', '.join(STEM)}, maxpool, layer1, ...)"
            )
    if names not in ([*STEM, *layers], [*STEM, "maxpool", *layers]) or not layers:
        raise ModelError(f"module 'backbone.body' has the parts {', '.join(names)}; supported there: those of a ResNet")
    if not set(body.return_layers) <= set(layers):
        raise ModelError(f"module 'backbone.body' returns {list(body.return_layers)}; supported there: {layers}")
    require_type(body["bn1"], "backbone.body.bn1", *BATCH_NORMS)
    require_type(body["relu"], "backbone.body.relu", nn.ReLU)
    for name, layer in _layers(body):
        require_type(layer, f"backbone.body.{name}", nn.Sequential)
        for number, block in enumerate(layer):
            where = f"backbone.body.{name}.{number}"
            require_type(block, where, BasicBlock, Bottleneck)
            require_type(block.relu, f"{where}.relu", nn.ReLU)
            for inner, module in block.named_modules(prefix=where):
                if getattr(module, "groups", 1) != 1:
                    raise ModelError(
                        f"module {inner!r} is a grouped convolution; supported there: convolutions of one group"
                    )


def resnet_trunk(backbone: Any) -> Trunk:
    body = backbone.body
    returned = returned_maps(body)
    maps = list(returned.values())
    units = [_stem_unit("maxpool" if "maxpool" in body else "relu")]
    for layer, blocks in _layers(body):
        kept = returned.get(layer)
        for number in range(len(blocks)):
            last = number + 1 == len(blocks)
            bridge = keep(kept, ends=kept == maps[-1]) if last and kept is not None else unchanged
            name = f"backbone.body.{layer}.{number}"
            units.append(map_unit(name, "block", bridge=bridge, channel_dim=CHANNELS))

    def read(model: Any, state: State) -> OrderedDict[str, Tensor]:
        return OrderedDict((name, state[f"c.{name}"]) for name in maps)

    return Trunk(tuple(units), read, tuple(f"c.{name}" for name in maps))


def _layers(body: Any) -> list[tuple[str, Any]]:
    return [(name, child) for name, child in body.named_children() if name.startswith("layer")]


def _stem_unit(last: str) -> Unit:
    name = f"backbone.body.{last}"

    def run(model: Any, state: State) -> State:
        body = model.backbone.body
        x = body["relu"](body["bn1"](body["conv1"](state["image"])))
        return {**without(state, "image"), "x": body["maxpool"](x) if last == "maxpool" else x}

    modules = ("backbone.body.conv1", "backbone.body.bn1")
    return Unit(name, "patch_embed", run, unchanged, modules, makes=("x",), channel_dim=CHANNELS)
