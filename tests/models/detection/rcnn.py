"""torchvision detectors small enough for a test."""

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import AnchorGenerator, RPNHead
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign

Frozen = partial(FrozenBatchNorm2d, eps=0.0)  # as torchvision's published weights want it
WIDTH, OUTPUTS = 8, 4
WIDTHS = {"layer1": 16, "layer2": 8, "layer3": 12, "layer4": 16}
EVERY = {name: str(number) for number, name in enumerate(WIDTHS)}


def body(norm: Any) -> nn.Module:
    """Both kinds of blocks, with and without a convolution beside them."""

    def beside(inputs: int, outputs: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    layers = [
        [Bottleneck(8, 4, 1, beside(8, 16, 1), base_width=128, norm_layer=norm), Bottleneck(16, 4, norm_layer=norm)],
        [BasicBlock(16, 8, 2, beside(16, 8, 2), norm_layer=norm)],
        [BasicBlock(8, 12, 2, beside(8, 12, 2), norm_layer=norm)],
        [Bottleneck(12, 4, 2, beside(12, 16, 2), norm_layer=norm)],
    ]
    stem = {"conv1": nn.Conv2d(3, 8, 7, 2, 3, bias=False), "bn1": norm(8), "relu": nn.ReLU(inplace=True)}
    parts = OrderedDict(**stem, maxpool=nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(parts | {f"layer{n + 1}": nn.Sequential(*blocks) for n, blocks in enumerate(layers)})


def backbone(norm: Any, pyramid_norm: Any, returned: dict[str, str]) -> BackboneWithFPN:
    widths = [width for name, width in WIDTHS.items() if name in returned]
    return BackboneWithFPN(body(norm), returned, widths, WIDTH, norm_layer=pyramid_norm)


@torch.no_grad()
def rcnn(
    masks: bool = True,
    second: bool = False,
    returned: dict[str, str] | None = None,
    trunk: nn.Module | None = None,
    **changes: Any,
) -> Any:
    """Untrained, but it finds things. `second`: with the parts of torchvision's second version; `trunk`: on a backbone
    that is no ResNet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        norm = nn.BatchNorm2d if second else Frozen
        parts: dict[str, Any] = {"box_head": TwoMLPHead(WIDTH * 49, 16), "min_size": 64, "max_size": 96}
        parts |= {"rpn_pre_nms_top_n_test": 60, "rpn_post_nms_top_n_test": 40, "box_detections_per_img": 12}
        if second:
            parts["rpn_head"] = RPNHead(WIDTH, 3, conv_depth=2)
            parts["box_head"] = FastRCNNConvFCHead((WIDTH, 7, 7), [8, 6], [16], norm_layer=nn.BatchNorm2d)
        if masks:
            parts["mask_head"] = MaskRCNNHeads(WIDTH, [8, 6], 1, norm_layer=nn.BatchNorm2d if second else None)
            parts["mask_predictor"] = MaskRCNNPredictor(6, 5, OUTPUTS)
        parts["box_predictor"] = FastRCNNPredictor(16, OUTPUTS)
        trunk = trunk or backbone(norm, nn.BatchNorm2d if second else None, dict(returned or EVERY))
        if returned:
            names = [name for layer, name in sorted(returned.items())]
            parts["box_roi_pool"] = MultiScaleRoIAlign(names, 7, 2)
            parts["rpn_anchor_generator"] = AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3)
        model: Any = (MaskRCNN if masks else FasterRCNN)(trunk, **{**parts, **changes})
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(0.5 + torch.rand_like(tensor))
            elif tensor.is_floating_point() and tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
        for layer, gain in ((model.roi_heads.box_predictor.cls_score, 1.5), (model.rpn.head.cls_logits, 1.0)):
            layer.weight.normal_(0, gain)
        model.rpn.head.bbox_pred.weight.normal_(0, 0.05)
    return model.eval().requires_grad_(False)


def rcnn_builder(*, weights: Any = None, weights_backbone: Any = "fetched", **options: Any) -> Any:
    """Like torchvision's builders, which without `weights_backbone=None` fetch some."""
    assert weights is None, "no network"
    assert weights_backbone is None, "no network"
    assert options.pop("num_classes", OUTPUTS) == OUTPUTS
    return rcnn(**options)


def photo(height: int, width: int) -> Tensor:
    """uint8 [3, height, width], smooth."""
    coarse = torch.rand(1, 3, 5, 6, generator=torch.Generator().manual_seed(height + width))
    return (nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0] * 255).to(torch.uint8)
