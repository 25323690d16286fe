"""The detector as a chain of units: patch embedding, Swin blocks, merges, pyramid, proposal head, box and mask heads.

The chain carries a state. `x` is the map on its way through the backbone; the results of the four stages wait in it as
`c0` to `c3` for the pyramid, whose levels `p0` to `p3` become the features of the regions (`box.s.in`, `mask.in`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import PatchMerging, WindowAttention
from torch import Tensor, nn

from aphq.data.scenes import ScenePreprocessing
from aphq.errors import ModelError
from aphq.models.architecture import (
    NormPair,
    State,
    Step,
    Unit,
    register,
    replace_all,
    unchanged,
)
from aphq.models.attention import SwinAttention
from aphq.models.detection.checkpoint import load_detector
from aphq.models.detection.config import ROI_LEVELS, DetectorConfig
from aphq.models.detection.detector import Detections, Detector, Size
from aphq.models.detection.family import DetectionArchitecture
from aphq.models.detection.pyramid import coarsest
from aphq.models.detection.regions import BOX_SIZE, MASK_SIZE, region_features
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.detection.scenes import regions_of
from aphq.models.detection.swin import SwinBlock
from aphq.models.timm_parts import require_type, timm_mlp

LEVELS = range(ROI_LEVELS)


@register
class SwinDetector(DetectionArchitecture):
    family = "aphq.Detector"
    classes = (Detector,)

    def check(self, model: Any) -> None:
        require_type(model, "", Detector)  # a subclass may look at its regions in another way
        require_type(model.backbone.patch_embed, "backbone.patch_embed", PatchEmbed)
        for s, stage in enumerate(model.backbone.layers):
            if stage.downsample is not None:
                require_type(stage.downsample, f"backbone.layers.{s}.downsample", PatchMerging)
            for b, block in enumerate(stage.blocks):
                name = f"backbone.layers.{s}.blocks.{b}"
                require_type(block, name, SwinBlock)
                require_type(block.attn, f"{name}.attn", WindowAttention, SwinAttention)
                require_type(block.mlp, f"{name}.mlp", Mlp)
                require_type(block.mlp.act, f"{name}.mlp.act", nn.GELU)

    def units(self, model: Any) -> tuple[Unit, ...]:
        units = [map_unit("backbone.patch_embed", "patch_embed", reads="image")]
        for s, stage in enumerate(model.backbone.layers):
            for b in range(len(stage.blocks)):
                name = f"backbone.layers.{s}.blocks.{b}"
                norms = (  # zeros fill up the windows after norm1: they must go on meaning zero
                    NormPair(f"{name}.norm1", f"{name}.attn.qkv", may_shift=False),
                    NormPair(f"{name}.norm2", f"{name}.mlp.fc1"),
                )
                bridge = _keep_stage(s) if b + 1 == len(stage.blocks) else unchanged
                units.append(
                    map_unit(
                        name,
                        "block",
                        bridge=bridge,
                        mlp=timm_mlp(model.get_submodule(f"{name}.mlp"), f"{name}.mlp"),
                        norms=norms,
                    )
                )
            if stage.downsample is not None:
                name = f"backbone.layers.{s}.downsample"
                units.append(map_unit(name, "merge", norms=(NormPair(f"{name}.norm", f"{name}.reduction"),)))
        heads = [_box_unit(model.config, s) for s in range(model.config.stages)]
        heads += [_mask_unit(model.config, s) for s in range(model.config.stages)]
        return (*units, _pyramid_unit(model.config), _proposal_unit(), *heads)

    def open_attention(self, model: Any) -> None:
        replace_all(model, {WindowAttention: SwinAttention})

    def describe(self, model: Any) -> dict[str, Any]:
        config: DetectorConfig = model.config
        return config.to_dict()

    def build(self, description: dict[str, Any]) -> nn.Module:
        config = DetectorConfig.from_dict(description)
        try:
            return Detector(config)
        except (RuntimeError, TypeError, ValueError) as problem:
            raise ModelError(f"cannot build a detector from its description: {problem}") from None

    def from_file(self, description: dict[str, Any], weights: Path) -> nn.Module:
        arguments = dict(description)
        kind, num_classes = arguments["kind"], arguments.pop("num_classes")
        return load_detector(f"{kind}_swin_t", weights, num_classes, **arguments)

    def scenes(self, model: Any) -> ScenePreprocessing:
        return ScenePreprocessing()

    def stages(self, model: Any) -> int:
        config: DetectorConfig = model.config
        return config.stages

    def regions_of(self, teacher: Any, image: Tensor, size: Size) -> State:
        return regions_of(teacher, image, size)

    def detect(self, model: Any, image: Tensor, size: Size, original: Size) -> Detections:
        found: Detections = model(image, size, original)
        return found


def map_unit(name: str, kind: Any, reads: str = "x", bridge: Step = unchanged, **parts: Any) -> Unit:
    """A unit that is one module from the map `reads` to the map `x`."""

    def run(model: nn.Module, state: State) -> State:
        return {**without(state, reads), "x": model.get_submodule(name)(state[reads])}

    return Unit(name, kind, run, bridge, (name,), makes=("x",), **parts)


def without(state: State, *names: str) -> State:
    return {name: x for name, x in state.items() if name not in names}


def _keep_stage(stage: int) -> Step:
    """After a stage's last block: its result waits for the pyramid, and goes on unless the backbone ends here."""

    def bridge(model: nn.Module, state: State) -> State:
        kept = {**state, f"c{stage}": state["x"]}
        return without(kept, "x") if stage == LEVELS[-1] else kept

    return bridge


def _pyramid_unit(config: DetectorConfig) -> Unit:
    """The norms after the stages belong to it, because each feeds one lateral convolution."""

    def run(model: Any, state: State) -> State:
        maps = [model.backbone.output(i, state[f"c{i}"]) for i in LEVELS]
        levels = model.neck(maps)[:ROI_LEVELS]
        return {**without(state, *(f"c{i}" for i in LEVELS)), **{f"p{i}": level for i, level in enumerate(levels)}}

    def bridge(model: nn.Module, state: State) -> State:
        """Regions become features; the levels stay for the proposal head."""
        levels = [state[f"p{i}"] for i in LEVELS]
        features = {
            f"box.{s}.in": region_features(levels, state[f"regions.{s}"], BOX_SIZE) for s in range(config.stages)
        }
        features["mask.in"] = region_features(levels, state["regions.mask"], MASK_SIZE)
        return {**without(state, "regions.mask", *(f"regions.{s}" for s in range(config.stages))), **features}

    norms = tuple(NormPair(f"backbone.norm{i}", f"neck.lateral_convs.{i}.conv") for i in LEVELS)
    modules = (*(f"backbone.norm{i}" for i in LEVELS), "neck")
    makes = tuple(f"p{i}" for i in LEVELS)
    return Unit("neck", "neck", run, bridge, modules, norms=norms, makes=makes)


def _proposal_unit() -> Unit:
    def run(model: Any, state: State) -> State:
        levels = [state[f"p{i}"] for i in LEVELS]
        logits, deltas = model.rpn_head([*levels, coarsest(levels[-1])])
        return {
            **without(state, *(f"p{i}" for i in LEVELS)),
            "rpn.cls": torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]),
            "rpn.reg": torch.cat([flatten_anchors(x, 4) for x in deltas]),
        }

    return Unit("rpn_head", "head", run, unchanged, ("rpn_head",), makes=("rpn.cls", "rpn.reg"))


def _box_unit(config: DetectorConfig, stage: int) -> Unit:
    name = f"roi_head.bbox_head.{stage}" if config.stages > 1 else "roi_head.bbox_head"

    def run(model: nn.Module, state: State) -> State:
        cls, reg = model.get_submodule(name)(state[f"box.{stage}.in"])
        return {**without(state, f"box.{stage}.in"), f"box.{stage}.cls": cls, f"box.{stage}.reg": reg}

    return Unit(name, "head", run, unchanged, (name,), makes=(f"box.{stage}.cls", f"box.{stage}.reg"))


def _mask_unit(config: DetectorConfig, stage: int) -> Unit:
    """Of the masks of all classes only that of the region's class is an answer; the others are never looked at."""
    name = f"roi_head.mask_head.{stage}" if config.stages > 1 else "roi_head.mask_head"
    last = stage + 1 == config.stages

    def run(model: nn.Module, state: State) -> State:
        logits = model.get_submodule(name)(state["mask.in"])
        labels = state["labels"].long()
        chosen = logits[torch.arange(len(labels), device=labels.device), labels]
        rest = without(state, "mask.in", "labels") if last else state
        return {**rest, f"mask.{stage}": chosen}

    return Unit(name, "head", run, unchanged, (name,), makes=(f"mask.{stage}",))
