"""What a torchvision Mask or Faster R-CNN is made of, read from the module and built again from plain values.

Read from the parts themselves, because torchvision's models do not keep their constructor arguments. Settings that only
training looks at (sampling, matching) are not kept: a model that is built again is for inference.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import AnchorGenerator, RPNHead
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

from aphq.errors import ModelError
from aphq.models.detection.timm_body import TimmBody
from aphq.typed import TypedError, from_plain, to_plain

NORMS: dict[str, type[nn.Module]] = {"batch": nn.BatchNorm2d, "frozen": FrozenBatchNorm2d}
BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}
STEM = ("conv1", "bn1", "relu")  # then perhaps `maxpool`, then layer1, layer2, ...
MOST_CONVOLUTIONS = 64
Weights4 = tuple[float, float, float, float]


@dataclass(frozen=True)
class Norm:
    kind: Literal["batch", "frozen"]
    eps: float

    @classmethod
    def within(cls, module: nn.Module, name: str) -> Norm | None:
        """That of all norms in a module; None where there is none."""
        kinds = {cls_: kind for kind, cls_ in NORMS.items()}
        found = {(kinds[type(m)], float(m.eps)) for m in module.modules() if type(m) in kinds}  # type: ignore[arg-type]
        if len(found) > 1:
            raise ModelError(f"module {name!r} mixes batch norms ({sorted(found)}); supported there: one kind, one eps")
        return cls(*found.pop()) if found else None  # type: ignore[arg-type]


def norm_layer(norm: Norm | None) -> Callable[..., nn.Module] | None:
    return None if norm is None else partial(NORMS[norm.kind], eps=norm.eps)


@dataclass(frozen=True)
class Block:
    """A residual block: `planes` as ResNet's papers count, `width` channels inside a bottleneck."""

    kind: Literal["basic", "bottleneck"]
    inputs: int
    planes: int
    width: int
    stride: int
    dilation: int
    shortcut: int  # the stride of the convolution beside the block; 0 where there is none

    @classmethod
    def of(cls, block: Any) -> Block:
        shortcut = 0 if block.downsample is None else block.downsample[0].stride[0]
        out, inputs = block.conv1.weight.shape[:2]
        if type(block) is BasicBlock:
            return cls("basic", inputs, out, out, block.conv1.stride[0], 1, shortcut)
        planes = block.conv3.weight.shape[0] // Bottleneck.expansion
        return cls("bottleneck", inputs, planes, out, block.conv2.stride[0], block.conv2.dilation[0], shortcut)

    @property
    def outputs(self) -> int:
        return self.planes * BLOCKS[self.kind].expansion

    def build(self, norm: Callable[..., nn.Module] | None) -> nn.Module:
        make = norm or nn.BatchNorm2d
        beside: nn.Module | None = None
        if self.shortcut:
            convolution = nn.Conv2d(self.inputs, self.outputs, 1, stride=self.shortcut, bias=False)
            beside = nn.Sequential(convolution, make(self.outputs))
        wide: Any = {} if self.kind == "basic" else {"base_width": self.width * 64 / self.planes}
        block = BLOCKS[self.kind]
        return block(self.inputs, self.planes, self.stride, beside, dilation=self.dilation, norm_layer=make, **wide)


def returned_maps(body: Any) -> dict[str, str]:
    """Name of a layer -> name of its map, in the order in which they are made."""
    return {name: str(body.return_layers[name]) for name, _ in body.named_children() if name in body.return_layers}


@dataclass(frozen=True)
class Body:
    """A ResNet up to the last layer that is read."""

    channels: int  # of the stem: a convolution, its norm, and a pooling to half the size if `pooled`
    kernel: int
    stride: int
    pooled: bool
    layers: tuple[tuple[Block, ...], ...]
    returned: dict[str, str]  # name of a layer -> name of its map
    norm: Norm

    @classmethod
    def of(cls, body: Any) -> Body:
        layers = [child for name, child in body.named_children() if name.startswith("layer")]
        norm = Norm.within(body, "backbone.body")
        if norm is None:
            raise ModelError(
                "module 'backbone.body' has no batch norm; supported there: BatchNorm2d, FrozenBatchNorm2d"
            )
        stem = body["conv1"]
        return cls(
            stem.weight.shape[0],
            stem.kernel_size[0],
            stem.stride[0],
            "maxpool" in body,
            tuple(tuple(Block.of(block) for block in layer) for layer in layers),
            returned_maps(body),
            norm,
        )

    def strides(self) -> list[int]:
        """Pixels between neighbours on the map of each layer that is read, in their order."""
        stride, found = self.stride * (2 if self.pooled else 1), []
        for number, layer in enumerate(self.layers):
            for block in layer:
                stride *= block.stride
            if f"layer{number + 1}" in self.returned:
                found.append(stride)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.returned.values())

    def widths(self) -> list[int]:
        return [layer[-1].outputs for n, layer in enumerate(self.layers) if f"layer{n + 1}" in self.returned]

    def backbone(self, width: int, norm: Callable[..., nn.Module] | None) -> nn.Module:
        return BackboneWithFPN(self.build(), dict(self.returned), self.widths(), width, norm_layer=norm)

    def build(self) -> nn.Module:
        norm = norm_layer(self.norm)
        assert norm is not None
        stem = nn.Conv2d(3, self.channels, self.kernel, self.stride, padding=self.kernel // 2, bias=False)
        parts: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=stem, bn1=norm(self.channels), relu=nn.ReLU(inplace=True)
        )
        if self.pooled:
            parts["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
        for number, layer in enumerate(self.layers):
            parts[f"layer{number + 1}"] = nn.Sequential(*(block.build(norm) for block in layer))
        return nn.Sequential(parts)


def body_of(backbone: Any) -> Body | TimmBody:
    """What is below the pyramid."""
    return Body.of(backbone.body) if type(backbone) is BackboneWithFPN else TimmBody.of(backbone)


@dataclass(frozen=True)
class Pool:
    """How regions become features."""

    maps: tuple[str, ...]
    size: tuple[int, int]
    sampling_ratio: int
    canonical_scale: int
    canonical_level: int

    @classmethod
    def of(cls, pool: Any) -> Pool:
        names = tuple(str(name) for name in pool.featmap_names)
        return cls(names, tuple(pool.output_size), pool.sampling_ratio, pool.canonical_scale, pool.canonical_level)

    def build(self) -> MultiScaleRoIAlign:
        more = {"canonical_scale": self.canonical_scale, "canonical_level": self.canonical_level}
        return MultiScaleRoIAlign(list(self.maps), self.size, self.sampling_ratio, **more)


@dataclass(frozen=True)
class Proposals:
    sizes: tuple[tuple[float, ...], ...]
    ratios: tuple[tuple[float, ...], ...]
    convolutions: int
    before: int  # the best of each level go into the suppression
    after: int
    iou: float
    score: float

    def __post_init__(self) -> None:
        if not 0 <= self.convolutions <= MOST_CONVOLUTIONS:  # a number from a file, which a loop would follow
            raise ModelError(f"a proposal head has up to {MOST_CONVOLUTIONS} convolutions, not {self.convolutions}")

    @classmethod
    def of(cls, rpn: Any) -> Proposals:
        generator = rpn.anchor_generator
        sizes, ratios = (
            tuple(tuple(float(x) for x in level) for level in table)
            for table in (generator.sizes, generator.aspect_ratios)
        )
        before, after = rpn._pre_nms_top_n["testing"], rpn._post_nms_top_n["testing"]
        return cls(sizes, ratios, len(rpn.head.conv), before, after, float(rpn.nms_thresh), float(rpn.score_thresh))

    def build(self, width: int) -> dict[str, Any]:
        generator = AnchorGenerator(self.sizes, self.ratios)
        return {
            "rpn_anchor_generator": generator,
            "rpn_head": RPNHead(width, generator.num_anchors_per_location()[0], self.convolutions),
            "rpn_pre_nms_top_n_test": self.before,
            "rpn_post_nms_top_n_test": self.after,
            "rpn_nms_thresh": self.iou,
            "rpn_score_thresh": self.score,
        }


@dataclass(frozen=True)
class Boxes:
    pool: Pool
    convolutions: tuple[int, ...]  # channels of each; none in a head of two linear layers
    linears: tuple[int, ...]
    norm: Norm | None
    weights: Weights4  # of the box coder
    score: float
    iou: float
    most: int

    @classmethod
    def of(cls, heads: Any) -> Boxes:
        head: Any = heads.box_head
        convolutions: tuple[int, ...] = ()
        if isinstance(head, TwoMLPHead):
            linears: tuple[int, ...] = (head.fc6.weight.shape[0], head.fc7.weight.shape[0])
        else:
            convolutions = tuple(layer[0].weight.shape[0] for layer in head if hasattr(layer, "__getitem__"))
            linears = tuple(layer.weight.shape[0] for layer in head if hasattr(layer, "weight"))
        norm = Norm.within(head, "roi_heads.box_head")
        weights: Any = tuple(float(weight) for weight in heads.box_coder.weights)
        rules = (float(heads.score_thresh), float(heads.nms_thresh), int(heads.detections_per_img))
        return cls(Pool.of(heads.box_roi_pool), convolutions, linears, norm, weights, *rules)

    def build(self, width: int, outputs: int) -> dict[str, Any]:
        shape = (width, *self.pool.size)
        head: nn.Module
        if self.convolutions:
            head = FastRCNNConvFCHead(shape, list(self.convolutions), list(self.linears), norm_layer(self.norm))
        else:
            head = TwoMLPHead(width * shape[1] * shape[2], self.linears[0])
        return {
            "box_roi_pool": self.pool.build(),
            "box_head": head,
            "box_predictor": FastRCNNPredictor(self.linears[-1], outputs),
            "box_score_thresh": self.score,
            "box_nms_thresh": self.iou,
            "box_detections_per_img": self.most,
            "bbox_reg_weights": self.weights,
        }


@dataclass(frozen=True)
class Masks:
    pool: Pool
    convolutions: tuple[int, ...]
    dilation: int
    reduced: int  # channels behind the transposed convolution
    norm: Norm | None

    @classmethod
    def of(cls, heads: Any) -> Masks:
        convolutions = tuple(layer[0].weight.shape[0] for layer in heads.mask_head)
        reduced = heads.mask_predictor.conv5_mask.weight.shape[1]
        norm = Norm.within(heads.mask_head, "roi_heads.mask_head")
        return cls(Pool.of(heads.mask_roi_pool), convolutions, heads.mask_head[0][0].dilation[0], reduced, norm)

    def build(self, width: int, outputs: int) -> dict[str, Any]:
        return {
            "mask_roi_pool": self.pool.build(),
            "mask_head": MaskRCNNHeads(width, list(self.convolutions), self.dilation, norm_layer(self.norm)),
            "mask_predictor": MaskRCNNPredictor(self.convolutions[-1], self.reduced, outputs),
        }


@dataclass(frozen=True)
class RcnnConfig:
    body: Body | TimmBody
    width: int  # channels of the pyramid
    pyramid_norm: Norm | None
    proposals: Proposals
    boxes: Boxes
    masks: Masks | None
    outputs: int  # classes and the background
    shortest: int
    longest: int
    divisor: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @classmethod
    def of(cls, model: Any) -> RcnnConfig:
        """What is in a model that the adapter has checked."""
        heads, transform = model.roi_heads, model.transform
        mean, std = (tuple(float(x) for x in table) for table in (transform.image_mean, transform.image_std))
        return cls(
            body_of(model.backbone),
            model.backbone.out_channels,
            Norm.within(model.backbone.fpn, "backbone.fpn"),
            Proposals.of(model.rpn),
            Boxes.of(heads),
            Masks.of(heads) if heads.has_mask() else None,
            heads.box_predictor.cls_score.weight.shape[0],
            int(transform.min_size[-1]),  # the others are for training
            int(transform.max_size),
            int(transform.size_divisible),
            mean,  # type: ignore[arg-type]
            std,  # type: ignore[arg-type]
        )

    def build(self) -> nn.Module:
        backbone = self.body.backbone(self.width, norm_layer(self.pyramid_norm))
        parts = {
            **self.proposals.build(self.width),
            **self.boxes.build(self.width, self.outputs),
            **(self.masks.build(self.width, self.outputs) if self.masks else {}),
        }
        sizes = {"min_size": self.shortest, "max_size": self.longest, "size_divisible": self.divisor}
        looks = {"image_mean": list(self.mean), "image_std": list(self.std)}
        model: nn.Module = (MaskRCNN if self.masks else FasterRCNN)(backbone, **parts, **sizes, **looks)
        return model

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RcnnConfig:
        try:
            return from_plain(cls, data)
        except TypedError as problem:
            raise ModelError(f"torchvision detector: {problem}") from None
