"""torchvision's Mask R-CNN and Faster R-CNN as a chain of units: those of a ResNet or a timm model, pyramid, heads.

Batch norms stay in float behind their quantized convolutions: a scale and a shift per channel, which cost nothing next
to the convolution and keep the model's own names and weights. The state is that of the Swin detectors, with one map for
each layer or stage that is read; the background comes first in torchvision's outputs and last in the state.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads
from torchvision.models.detection.rpn import AnchorGenerator, RegionProposalNetwork, RPNHead
from torchvision.models.detection.ssd import SSD
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import MultiScaleRoIAlign
from torchvision.ops.poolers import initLevelMapper

from aphq.data.scenes import ScenePreprocessing
from aphq.errors import DataError, ModelError
from aphq.models.architecture import State, Unit, architecture_named, register, unchanged
from aphq.models.attention import open_attentions
from aphq.models.detection import torchvision_scenes as scenes
from aphq.models.detection.adapter import without
from aphq.models.detection.detector import Detections, Size
from aphq.models.detection.family import DetectionArchitecture
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.detection.timm_backbone import adopted
from aphq.models.detection.timm_body import TimmBody, check_timm, timm_trunk
from aphq.models.detection.torchvision_checkpoint import fill
from aphq.models.detection.torchvision_config import RcnnConfig, body_of
from aphq.models.detection.torchvision_resnet import CHANNELS, check_resnet, resnet_trunk
from aphq.models.detection.torchvision_trunk import Trunk
from aphq.models.loading import read_checkpoint
from aphq.models.timm_parts import require_type

SUPPORTED = (
    "of torchvision's detectors MaskRCNN and FasterRCNN with a ResNet or timm's Swin or ViT and a feature pyramid are "
    "supported"
)
PARTS: dict[str, tuple[type[nn.Module], ...]] = {
    "transform": (GeneralizedRCNNTransform,),
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
        model = canonical(model)
        if _on_resnet(model):
            check_resnet(model.backbone)
        else:
            check_timm(model.backbone, int(model.transform.size_divisible))
        if model.transform.fixed_size is not None:
            raise ModelError("module 'transform' has a fixed_size; supported there: min_size and max_size")
        RcnnConfig.of(model)

    def units(self, model: Any) -> tuple[Unit, ...]:
        model = canonical(model)
        trunk = (resnet_trunk if _on_resnet(model) else timm_trunk)(model.backbone)
        maps, masks = list(body_of(model.backbone).names), self.has_masks(model)
        heads = [_proposal_unit(maps), _box_unit()]
        heads += [_mask_unit()] if masks else []
        return (*trunk.units, _pyramid_unit(trunk, maps, masks), *heads)

    def open_attention(self, model: Any) -> None:
        """Of a timm model, whose backbone becomes a `TimmBackbone`; and what torchvision would guess from the first
        image it sees is settled."""
        if not _on_resnet(model):
            model.backbone = adopted(model.backbone)
            architecture_named(TimmBody.of(model.backbone).family).open_attention(model.backbone.body)
        settle(model)

    def describe(self, model: Any) -> dict[str, Any]:
        model = canonical(model)
        config = RcnnConfig.of(model)
        with torch.device("meta"):
            built: Any = config.build()
            if any(open_attentions(model)):
                self.open_attention(built)
        differing = _shapes(built) ^ _shapes(model)
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
            settle(model)
        except (RuntimeError, TypeError, ValueError, LookupError, ZeroDivisionError, AssertionError) as problem:
            raise ModelError(f"cannot build a torchvision detector from its description: {problem}") from None
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


def _on_resnet(model: Any) -> bool:
    return type(model.backbone) is BackboneWithFPN


def canonical(model: Any) -> Any:
    """The model itself, or one of the same parts in which a backbone of the user's own class is a `TimmBackbone`."""
    if _on_resnet(model):
        return model
    same = copy.copy(model)
    same._modules = {**model._modules, "backbone": adopted(model.backbone)}
    return same


def settle(model: Any) -> None:
    """Tell the poolings their scales. By itself each infers them from the first image it gets, and a small one with
    much padding may mislead it for good."""
    heads = model.roi_heads
    pools = [p for p in (heads.box_roi_pool, heads.mask_roi_pool) if p is not None and p.scales is None]
    if not pools:
        return
    body = body_of(canonical(model).backbone)
    powers = (2 ** round(math.log2(stride)) for stride in body.strides())  # torchvision knows no others
    strides = dict(zip(body.names, powers, strict=True))
    strides["pool"] = 2 * list(strides.values())[-1]
    for pool in pools:
        read = [stride for name, stride in strides.items() if name in pool.featmap_names]
        pool.scales = [1 / stride for stride in read]
        ends = (int(math.log2(read[0])), int(math.log2(read[-1])))
        pool.map_levels = initLevelMapper(*ends, pool.canonical_scale, pool.canonical_level)


def _shapes(model: Any) -> set[tuple[str, torch.Size]]:
    return {(name, x.shape) for name, x in model.state_dict().items()}


def _pyramid_unit(trunk: Trunk, maps: list[str], masks: bool) -> Unit:
    def run(model: Any, state: State) -> State:
        levels = model.backbone.fpn(trunk.read(model, state))
        return {**without(state, *trunk.takes), **{f"p.{name}": levels[name] for name in maps}}

    def bridge(model: Any, state: State) -> State:
        """Regions become features; the levels stay for the proposal head."""
        levels, heads = _levels(model, state, maps), model.roi_heads
        features = {"box.0.in": scenes.region_features(heads.box_roi_pool, levels, state["regions.0"])}
        if masks:
            features["mask.in"] = scenes.region_features(heads.mask_roi_pool, levels, state["regions.mask"])
        return {**without(state, "regions.0", "regions.mask"), **features}

    modules = (*(pair.norm for pair in trunk.norms), "backbone.fpn")
    makes = tuple(f"p.{name}" for name in maps)
    return Unit("backbone.fpn", "neck", run, bridge, modules, norms=trunk.norms, makes=makes, channel_dim=CHANNELS)


def _levels(model: Any, state: State, maps: list[str]) -> OrderedDict[str, Tensor]:
    """The levels of the pyramid; where there is one more, that is the last one thinned out."""
    levels = OrderedDict((name, state[f"p.{name}"]) for name in maps)
    if model.backbone.fpn.extra_blocks is None:
        return levels
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
