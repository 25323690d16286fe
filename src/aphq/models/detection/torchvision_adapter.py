"""torchvision's Mask R-CNN and Faster R-CNN on a ResNet as a chain of units: stem, residual blocks, pyramid, heads.

Batch norms stay in float behind their quantized convolutions: a scale and a shift per channel, which cost nothing next
to the convolution and keep the model's own names and weights. The state is that of the Swin detectors, with one map for
each layer of the ResNet that is read; the background comes first in torchvision's outputs and last in the state.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import AnchorGenerator, RegionProposalNetwork, RPNHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FeaturePyramidNetwork, FrozenBatchNorm2d, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from torchvision.ops.poolers import initLevelMapper

from aphq.data.scenes import ScenePreprocessing
from aphq.errors import DataError, ModelError
from aphq.models.architecture import State, Step, Unit, register, unchanged
from aphq.models.detection import torchvision_scenes as scenes
from aphq.models.detection.adapter import map_unit, without
from aphq.models.detection.detector import Detections, Size
from aphq.models.detection.family import DetectionArchitecture
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.detection.torchvision_checkpoint import fill
from aphq.models.detection.torchvision_config import STEM, Body, RcnnConfig, returned_maps
from aphq.models.loading import read_checkpoint
from aphq.models.timm_parts import require_type

SUPPORTED = "of torchvision's detectors MaskRCNN and FasterRCNN with a ResNet and a feature pyramid are supported"
PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "transform": (GeneralizedRCNNTransform,),
    "backbone": (BackboneWithFPN,),
    "backbone.body": (IntermediateLayerGetter,),
    "backbone.fpn": (FeaturePyramidNetwork,),
    "backbone.fpn.extra_blocks": (LastLevelMaxPool,),
    "rpn": (RegionProposalNetwork,),
    "rpn.head": (RPNHead,),
    "rpn.anchor_generator": (AnchorGenerator,),
    "roi_heads": (RoIHeads,),
    "roi_heads.box_roi_pool": (MultiScaleRoIAlign,),
    "roi_heads.box_head": (TwoMLPHead, FastRCNNConvFCHead),
    "roi_heads.box_predictor": (FastRCNNPredictor,),
}
MASK_PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "roi_heads.mask_roi_pool": (MultiScaleRoIAlign,),
    "roi_heads.mask_head": (MaskRCNNHeads,),
    "roi_heads.mask_predictor": (MaskRCNNPredictor,),
}
BATCH_NORMS = (nn.BatchNorm2d, FrozenBatchNorm2d)
CHANNELS = 1  # maps are [1, channels, height, width]


@register
class TorchvisionRcnn(DetectionArchitecture):
    family = "torchvision.RCNN"
    classes = (FasterRCNN, MaskRCNN)
    refused: ClassVar[dict[type[nn.Module], str]] = {
        KeypointRCNN: f"its keypoint head has no adapter; {SUPPORTED}",
        RetinaNet: f"its heads of one stage have no adapter; {SUPPORTED}",
        FCOS: f"its heads of one stage have no adapter; {SUPPORTED}",
        SSD: f"its heads of one stage have no adapter; {SUPPORTED}",
    }
    numbered_by_id = True  # the published weights have an output for each of COCO's ids, gaps included

    def check(self, model: Any) -> None:
        require_type(model, "", FasterRCNN, MaskRCNN)
        parts = PARTS | (MASK_PARTS if type(model) is MaskRCNN else {})
        for name, wanted in parts.items():
            part: Any = model
            for attribute in name.split("."):
                part = getattr(part, attribute)  # a part may be None, which is no module
            require_type(part, name, *wanted)
        _check_body(model.backbone.body)
        if model.transform.fixed_size is not None:
            raise ModelError("module 'transform' has a fixed_size; supported there: min_size and max_size")
        RcnnConfig.of(model)

    def units(self, model: Any) -> tuple[Unit, ...]:
        body = model.backbone.body
        returned = returned_maps(body)
        maps = list(returned.values())
        units = [_stem_unit("maxpool" if "maxpool" in body else "relu")]
        for layer, blocks in _layers(body):
            kept = returned.get(layer)
            for number in range(len(blocks)):
                last = number + 1 == len(blocks)
                bridge = _keep(kept, ends=kept == maps[-1]) if last and kept is not None else unchanged
                name = f"backbone.body.{layer}.{number}"
                units.append(map_unit(name, "block", bridge=bridge, channel_dim=CHANNELS))
        heads = [_proposal_unit(maps), _box_unit()]
        heads += [_mask_unit()] if self.has_masks(model) else []
        return (*units, _pyramid_unit(maps, self.has_masks(model)), *heads)

    def open_attention(self, model: Any) -> None:
        """There is none; but what torchvision would guess from the first image it sees is settled."""
        settle(model)

    def describe(self, model: Any) -> dict[str, Any]:
        config = RcnnConfig.of(model)
        with torch.device("meta"):
            wanted = {(name, x.shape) for name, x in config.build().state_dict().items()}
        differing = wanted ^ {(name, x.shape) for name, x in model.state_dict().items()}
        if differing:
            name, _ = min(differing)
            raise ModelError(
                f"{name!r} is not what torchvision's constructors make of it: a part of this "
                f"{type(model).__name__} was exchanged; {SUPPORTED}"
            )
        return config.to_dict()

    def build(self, description: dict[str, Any]) -> nn.Module:
        config = RcnnConfig.from_dict(description)
        try:
            model = config.build()
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, ZeroDivisionError) as problem:
            raise ModelError(f"cannot build a torchvision detector from its description: {problem}") from None
        settle(model)
        return model

    def from_file(self, description: dict[str, Any], weights: Path) -> nn.Module:
        model = self.build(description)
        fill(model, read_checkpoint(weights), weights)
        return model.eval()

    def num_classes(self, model: Any) -> int:
        return len(model.roi_heads.box_predictor.cls_score.bias) - 1  # rows of an integer weight may be filled up

    def scenes(self, model: Any) -> ScenePreprocessing:
        transform = model.transform
        mean, std = tuple(transform.image_mean), tuple(transform.image_std)
        sizes = (int(transform.min_size[-1]), int(transform.max_size), int(transform.size_divisible))
        try:
            return ScenePreprocessing(*sizes, mean, std, "down")
        except DataError as problem:
            raise ModelError(f"module 'transform' cannot be followed: {problem}") from None

    def stages(self, model: Any) -> int:
        return 1

    def has_masks(self, model: Any) -> bool:
        return bool(model.roi_heads.has_mask())

    def regions_of(self, teacher: Any, image: Tensor, size: Size) -> State:
        settle(teacher)
        return scenes.regions_of(teacher, image, size)

    def detect(self, model: Any, image: Tensor, size: Size, original: Size) -> Detections:
        settle(model)
        return scenes.detect(model, image, size, original)


def settle(model: Any) -> None:
    """Tell the poolings their scales. By itself each infers them from the first image it gets, and a small one with
    much padding may mislead it for good."""
    heads = model.roi_heads
    pools = [p for p in (heads.box_roi_pool, heads.mask_roi_pool) if p is not None and p.scales is None]
    if not pools:
        return
    body = Body.of(model.backbone.body)
    strides = dict(zip(body.returned.values(), body.strides(), strict=True))
    strides["pool"] = 2 * list(strides.values())[-1]
    for pool in pools:
        read = [stride for name, stride in strides.items() if name in pool.featmap_names]
        pool.scales = [1 / stride for stride in read]
        ends = (int(math.log2(read[0])), int(math.log2(read[-1])))
        pool.map_levels = initLevelMapper(*ends, pool.canonical_scale, pool.canonical_level)


def _layers(body: Any) -> list[tuple[str, Any]]:
    return [(name, child) for name, child in body.named_children() if name.startswith("layer")]


def _check_body(body: Any) -> None:
    """A ResNet: stem, then layers of residual blocks, and nothing else."""
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


def _stem_unit(last: str) -> Unit:
    name = f"backbone.body.{last}"

    def run(model: Any, state: State) -> State:
        body = model.backbone.body
        x = body["relu"](body["bn1"](body["conv1"](state["image"])))
        return {**without(state, "image"), "x": body["maxpool"](x) if last == "maxpool" else x}

    modules = ("backbone.body.conv1", "backbone.body.bn1")
    return Unit(name, "patch_embed", run, unchanged, modules, makes=("x",), channel_dim=CHANNELS)


def _keep(name: str, ends: bool) -> Step:
    """After the last block of a layer that is read: its map waits for the pyramid, and goes on unless the body ends."""

    def bridge(model: nn.Module, state: State) -> State:
        kept = {**state, f"c.{name}": state["x"]}
        return without(kept, "x") if ends else kept

    return bridge


def _pyramid_unit(maps: list[str], masks: bool) -> Unit:
    def run(model: Any, state: State) -> State:
        levels = model.backbone.fpn(OrderedDict((name, state[f"c.{name}"]) for name in maps))
        rest = without(state, *(f"c.{name}" for name in maps))
        return {**rest, **{f"p.{name}": levels[name] for name in maps}}

    def bridge(model: Any, state: State) -> State:
        """Regions become features; the levels stay for the proposal head."""
        levels, heads = _levels(model, state, maps), model.roi_heads
        features = {"box.0.in": scenes.region_features(heads.box_roi_pool, levels, state["regions.0"])}
        if masks:
            features["mask.in"] = scenes.region_features(heads.mask_roi_pool, levels, state["regions.mask"])
        return {**without(state, "regions.0", "regions.mask"), **features}

    makes = tuple(f"p.{name}" for name in maps)
    return Unit("backbone.fpn", "neck", run, bridge, ("backbone.fpn",), makes=makes, channel_dim=CHANNELS)


def _levels(model: Any, state: State, maps: list[str]) -> OrderedDict[str, Tensor]:
    """The levels of the pyramid with the coarsest, which is the last one thinned out."""
    levels = OrderedDict((name, state[f"p.{name}"]) for name in maps)
    thinned, names = model.backbone.fpn.extra_blocks([levels[maps[-1]]], [], [])
    levels[names[-1]] = thinned[-1]
    return levels


def _proposal_unit(maps: list[str]) -> Unit:
    def run(model: Any, state: State) -> State:
        logits, deltas = model.rpn.head(list(_levels(model, state, maps).values()))
        return {
            **without(state, *(f"p.{name}" for name in maps)),
            "rpn.cls": torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]),
            "rpn.reg": torch.cat([flatten_anchors(x, 4) for x in deltas]),
        }

    return Unit("rpn.head", "head", run, unchanged, ("rpn.head",), makes=("rpn.cls", "rpn.reg"))


def _box_unit() -> Unit:
    def run(model: Any, state: State) -> State:
        cls, reg = model.roi_heads.box_predictor(model.roi_heads.box_head(state["box.0.in"]))
        background_last = torch.cat([cls[:, 1:], cls[:, :1]], dim=1)
        return {**without(state, "box.0.in"), "box.0.cls": background_last, "box.0.reg": reg[:, 4:]}

    modules = ("roi_heads.box_head", "roi_heads.box_predictor")
    return Unit(modules[1], "head", run, unchanged, modules, makes=("box.0.cls", "box.0.reg"))


def _mask_unit() -> Unit:
    """Of the masks of all classes only that of the region's class is an answer."""

    def run(model: Any, state: State) -> State:
        logits = model.roi_heads.mask_predictor(model.roi_heads.mask_head(state["mask.in"]))
        labels = state["labels"].long()
        chosen = logits[torch.arange(len(labels), device=labels.device), labels]
        return {**without(state, "mask.in", "labels"), "mask.0": chosen}

    modules = ("roi_heads.mask_head", "roi_heads.mask_predictor")
    return Unit(modules[1], "head", run, unchanged, modules, makes=("mask.0",))
