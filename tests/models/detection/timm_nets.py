"""timm's models as backbones of torchvision's detectors, the way people write them, small enough for a test."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from aphq.detection import timm_backbone

from ...conftest import scramble
from .rcnn import WIDTH, rcnn

SWIN: dict[str, Any] = {"img_size": 64, "embed_dim": 8, "depths": (1, 2, 1, 1), "num_heads": (1, 2, 2, 4)}
VIT: dict[str, Any] = {"img_size": 64, "embed_dim": 16, "depth": 3, "num_heads": 2, "dynamic_img_size": True}
ANY_SIZE = {"strict_img_size": False}


def made(name: str, arguments: dict[str, Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return scramble(timm.create_model(name, **arguments))


def swin(**arguments: Any) -> Any:
    return made("swin_tiny_patch4_window7_224", {**SWIN, "window_size": 3, **ANY_SIZE, **arguments})


def swin_v2(**arguments: Any) -> Any:
    return made("swinv2_tiny_window8_256", {**SWIN, "window_size": 4, **ANY_SIZE, **arguments})


def vit(**arguments: Any) -> Any:
    return made("vit_tiny_patch16_224", {**VIT, **arguments})


def pyramid(widths: list[int], thinned: bool = True) -> FeaturePyramidNetwork:
    return FeaturePyramidNetwork(widths, WIDTH, LastLevelMaxPool() if thinned else None)


class Features(nn.Module):
    """Named as in torchvision; timm's lists of maps, channels last."""

    def __init__(self, body: Any, thinned: bool = True) -> None:
        super().__init__()
        self.body, self.out_channels = body, WIDTH
        self.fpn = pyramid(body.feature_info.channels(), thinned)

    def maps(self, images: Tensor) -> list[Tensor]:
        return [x.permute(0, 3, 1, 2) for x in self.body(images)]

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.fpn(OrderedDict((str(i), x) for i, x in enumerate(self.maps(images))))  # type: ignore[no-any-return]


class ChannelsFirst(Features):
    def maps(self, images: Tensor) -> list[Tensor]:
        return list(self.body(images))


class Permuting(nn.Module):
    """A module of its own between timm and the backbone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return {f"p{name}": x.permute(0, 3, 1, 2).contiguous() for name, x in self.model(images).items()}


class OtherNames(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.neck = pyramid(model.feature_info.channels())
        self.stem, self.out_channels = Permuting(model), WIDTH

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.neck(self.stem(images))  # type: ignore[no-any-return]


class WholeSwin(nn.Module):
    """Some maps of a whole classifier, the last one normalised."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.swin, self.fpn, self.out_channels = model, pyramid([16, 32, 64]), WIDTH

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        maps = self.swin.forward_intermediates(images, [1, 2, 3], norm=True, intermediates_only=True)
        return self.fpn(OrderedDict(zip("012", maps, strict=True)))  # type: ignore[no-any-return]


class WholeVit(nn.Module):
    """The tokens of a whole classifier as one map."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vit, self.fpn, self.out_channels = model, pyramid([16]), WIDTH

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        rows, columns = (side // 16 for side in images.shape[2:])
        tokens = self.vit.forward_features(images)[:, 1:]
        return self.fpn(OrderedDict(only=tokens.transpose(1, 2).unflatten(2, (rows, columns))))  # type: ignore[no-any-return]


BACKBONES: dict[str, Callable[[], Any]] = {
    "swin": lambda: Features(swin(features_only=True)),
    "swin, some stages": lambda: Features(swin(features_only=True, out_indices=(0, 2)), thinned=False),
    "swin, other names": lambda: OtherNames(swin(features_only=True, feature_cls="dict")),
    "swin, channels first": lambda: ChannelsFirst(swin(features_only=True, feature_cls="getter")),
    "swin, whole": lambda: WholeSwin(swin(num_classes=5)),
    "swin v2": lambda: Features(swin_v2(features_only=True)),
    "vit": lambda: ChannelsFirst(vit(features_only=True, out_indices=(0, 2))),
    "vit, whole": lambda: WholeVit(vit(num_classes=5, global_pool="token")),
    "ours": lambda: timm_backbone("swin_tiny_patch4_window7_224", WIDTH, pretrained=False, **SWIN, window_size=3),
    "our vit": lambda: timm_backbone("vit_tiny_patch16_224", WIDTH, pretrained=False, **VIT, reg_tokens=2),
}
LEVELS = {"swin, some stages": ["0", "1"], "swin, whole": ["0", "1", "2", "pool"], "vit": ["0", "1", "pool"]}
LEVELS |= {"vit, whole": ["only", "pool"], "our vit": ["0", "pool"]}
LEVELS |= {"swin, other names": ["p0", "p1", "p2", "p3", "pool"]}
FIVE = ["0", "1", "2", "3", "pool"]


def on_timm(kind: str, masks: bool = True, **changes: Any) -> Any:
    """A detector on one of the backbones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        trunk = BACKBONES[kind]()
    return rcnn(masks, trunk=trunk, **parts(LEVELS.get(kind, FIVE), masks), **changes)


def parts(levels: list[str], masks: bool) -> dict[str, Any]:
    """Anchors and poolings for levels of these names."""
    read = [name for name in levels if name != "pool"]
    sizes = tuple((16.0 * 2**i,) for i in range(len(levels)))
    found: dict[str, Any] = {"rpn_anchor_generator": AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * len(levels))}
    found["box_roi_pool"] = MultiScaleRoIAlign(read, 7, 2)
    if masks:
        found["mask_roi_pool"] = MultiScaleRoIAlign(read, 14, 2)
    return found
