"""torchvision's detectors as chains of units, held against torchvision itself."""

import json
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models as library
from torchvision.models.detection import FCOS, FasterRCNN, KeypointRCNN, MaskRCNN, RetinaNet
from torchvision.models.detection.ssd import SSD
from torchvision.models.resnet import Bottleneck

from aphq.errors import ModelError
from aphq.evaluation.coco import detect
from aphq.models.architecture import architecture_of, run_units
from aphq.models.coverage import coverage
from aphq.models.detection.family import family_of
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.detection.scenes import MASKS
from aphq.models.student import make_student
from aphq.recipe import Recipe

from .rcnn import OUTPUTS, photo, rcnn

KINDS: dict[str, dict[str, Any]] = {"mask": {}, "second": {"second": True}, "boxes": {"masks": False}}


def as_image(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_units_cover_the_detector_in_forward_order(kind: str) -> None:
    model = rcnn(**KINDS[kind])
    units = architecture_of(model).units(model)
    heads = 2 if kind == "boxes" else 3
    assert [unit.kind for unit in units] == ["patch_embed", *["block"] * 5, "neck", *["head"] * heads]
    owned = [f"{m}.{n}" for unit in units for m in unit.modules for n in model.get_submodule(m).state_dict()]
    assert sorted(owned) == sorted(model.state_dict()), "every tensor has one unit"


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_the_detector(kind: str) -> None:
    """Every answer of the chain is what torchvision's own modules say of the same regions."""
    model = rcnn(**KINDS[kind])
    family = family_of(model)
    image = family.scenes(model).normalise(photo(70, 90))
    known = family.regions_of(model, image, (70, 90))
    found = run_units(model, architecture_of(model).units(model), {"image": image, **known})
    features, heads = model.backbone(image), model.roi_heads
    logits, deltas = model.rpn.head(list(features.values()))
    pooled = heads.box_roi_pool(features, [known["regions.0"]], [(96, 96)])
    cls, reg = heads.box_predictor(heads.box_head(pooled))
    expected = {
        "rpn.cls": torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]),
        "rpn.reg": torch.cat([flatten_anchors(x, 4) for x in deltas]),
        "box.0.cls": cls[:, [1, 2, 3, 0]],
        "box.0.reg": reg[:, 4:],
    }
    if kind != "boxes":
        pooled = heads.mask_roi_pool(features, [known["regions.mask"]], [(96, 96)])
        masks = heads.mask_predictor(heads.mask_head(pooled))
        expected["mask.0"] = masks[torch.arange(len(masks)), known["labels"].long()]
        assert len(masks) >= MASKS
        assert known["labels"].min() >= 1
        assert known["labels"].max() < OUTPUTS
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_layers_may_be_named_in_any_order_and_some_left_out() -> None:
    """Maps come in the order in which the body makes them, whatever the order of their names."""
    model = rcnn(masks=False, returned={"layer4": "coarse", "layer2": "fine"})
    architecture = architecture_of(model)
    family, image = family_of(model), torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(0))
    known = family.regions_of(model, image, (64, 96))
    assert model.roi_heads.box_roi_pool.scales == [1 / 8, 1 / 32]
    found = run_units(model, architecture.units(model), {"image": image, **known})
    logits, _ = model.rpn.head(list(model.backbone(image).values()))
    assert torch.equal(found["rpn.cls"], torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]))
    again: Any = architecture.build(json.loads(json.dumps(architecture.describe(model)))).eval()
    again.load_state_dict(model.state_dict())
    size = (64, 96)
    assert torch.equal(family.detect(again, image, size, size).boxes, family.detect(model, image, size, size).boxes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(64, 96), (96, 64)])
def test_what_is_found_is_what_torchvision_finds(kind: str, size: tuple[int, int]) -> None:
    """Where the image has its final size already; only the order of operations when it is normalised differs."""
    model, pixels = rcnn(**KINDS[kind]), photo(*size)
    found = detect(model, as_image(pixels), family_of(model).scenes(model))
    (expected,) = model([pixels / 255])
    assert len(found) > 3
    torch.testing.assert_close(found.boxes, expected["boxes"], rtol=0, atol=1e-3)
    torch.testing.assert_close(found.scores, expected["scores"], rtol=0, atol=1e-4)
    assert torch.equal(found.labels, expected["labels"] - 1)
    if kind == "boxes":
        assert found.masks is None
    else:
        assert found.masks is not None
        assert (found.masks != (expected["masks"][:, 0] >= 0.5)).float().mean() < 1e-3


@pytest.mark.parametrize("size", [(65, 80), (128, 190), (50, 61), (40, 150)])
def test_resized_images_come_to_the_same_size_and_nearly_the_same_objects(size: tuple[int, int]) -> None:
    """torchvision resizes without rounding to 8 bits: of boxes that compete closely another may win."""
    model, pixels = rcnn(), photo(*size)
    rules = family_of(model).scenes(model)
    images, _ = model.transform([pixels / 255])
    assert [rules.resized(size)] == images.image_sizes
    prepared = rules.normalise(rules.scene(as_image(pixels)).pixels)
    assert (prepared - images.tensors).abs().max() < 1.01 / 255 / 0.224
    found = detect(model, as_image(pixels), rules)
    (expected,) = model([pixels / 255])
    far = (found.boxes[:, None] - expected["boxes"]).abs().amax(-1)
    far = far.masked_fill(found.labels[:, None] != expected["labels"] - 1, torch.inf)
    assert (far.min(dim=0).values < 1.0).float().mean() >= 0.9


def test_a_small_first_image_does_not_settle_the_scales() -> None:
    """By itself torchvision guesses them from the first image: wrong, if that is tiny and mostly padding."""
    misled, model = rcnn(min_size=33, max_size=33), rcnn(min_size=33, max_size=33)
    misled([photo(33, 33) / 255])
    assert misled.roi_heads.box_roi_pool.scales[0] == 1 / 2
    detect(model, as_image(photo(33, 33)), family_of(model).scenes(model))
    assert model.roi_heads.box_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    model.roi_heads.mask_roi_pool.scales = None
    architecture_of(model).open_attention(model)
    assert model.roi_heads.mask_roi_pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_is_the_detector_and_nothing_in_it_stays_float(kind: str) -> None:
    model = rcnn(**KINDS[kind])
    architecture = architecture_of(model)
    student = make_student(model, architecture, architecture.units(model), Recipe())
    rules, image = family_of(model).scenes(model), as_image(photo(64, 96))
    assert torch.equal(detect(student, image, rules).boxes, detect(model, image, rules).boxes)
    rows = {row.name: row for row in coverage(student)}
    multiplying = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    assert rows.keys() == {name for name, module in model.named_modules() if isinstance(module, multiplying)}
    assert all(not row.note and row.input_bits for row in rows.values())
    assert rows["backbone.body.conv1"].input_bits == 8
    if kind != "boxes":
        assert rows["roi_heads.mask_predictor.conv5_mask"].weight_bits == 4


@pytest.mark.parametrize("kind", KINDS)
def test_description_builds_an_equal_detector(kind: str) -> None:
    model = rcnn(**KINDS[kind], rpn_nms_thresh=0.6, box_nms_thresh=0.4, bbox_reg_weights=(8.0, 8.0, 4.0, 4.0))
    architecture = architecture_of(model)
    again: Any = architecture.build(json.loads(json.dumps(architecture.describe(model)))).eval()
    again.load_state_dict(model.state_dict())
    image, rules = as_image(photo(80, 70)), family_of(model).scenes(model)
    assert family_of(again).scenes(again) == rules
    found, expected = detect(again, image, rules), detect(model, image, rules)
    assert len(found) > 3
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.scores, expected.scores)


def test_descriptions_that_make_no_sense_are_refused() -> None:
    architecture = architecture_of(rcnn())
    for place, key, value in (
        ("proposals", "convolutions", 10**9),
        ("body", "layers", []),
        ("body", "channels", -1),
        ("boxes", "linears", []),
        ("masks", "pool", "what"),
    ):
        description = architecture.describe(rcnn())
        description[place][key] = value
        with pytest.raises(ModelError):
            architecture.build(description)


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "fasterrcnn_resnet50_fpn"])
def test_torchvisions_own_detectors_are_described(name: str) -> None:
    with torch.device("meta"):
        model = library.get_model(name, weights=None, weights_backbone=None).eval()
        architecture = architecture_of(model)
        again = architecture.build(architecture.describe(model))
    shapes = [{name: x.shape for name, x in m.state_dict().items()} for m in (model, again)]
    assert shapes[0] == shapes[1]
    assert len(architecture.units(model)) == 1 + 16 + 1 + (2 if name.startswith("faster") else 3)


def test_detectors_without_an_adapter_are_refused_with_what_there_is() -> None:
    for name, cls in (
        ("retinanet_resnet50_fpn", RetinaNet),
        ("fcos_resnet50_fpn", FCOS),
        ("ssdlite320_mobilenet_v3_large", SSD),
        ("keypointrcnn_resnet50_fpn", KeypointRCNN),
    ):
        refused: Any = cls.__new__(cls)
        with pytest.raises(ModelError, match=rf"{cls.__name__}.*MaskRCNN and FasterRCNN with a ResNet"):
            architecture_of(refused)
        assert issubclass(library.get_model_builder(name).__annotations__["return"], cls)


def test_a_part_it_does_not_know_is_named() -> None:
    with torch.device("meta"):
        mobile = library.get_model("fasterrcnn_mobilenet_v3_large_fpn", weights=None, weights_backbone=None)
    with pytest.raises(ModelError, match=r"'backbone.body.0' is a Conv2dNormActivation; .* the parts of a ResNet"):
        architecture_of(mobile)
    plain = nn.Conv2d(3, 8, 3)
    plain.out_channels = 8
    with pytest.raises(ModelError, match=r"'backbone' is a Conv2d; supported there: BackboneWithFPN"):
        architecture_of(FasterRCNN(plain, 2))
    model = rcnn()
    model.backbone.body["layer1"][1].relu = nn.SiLU()
    with pytest.raises(ModelError, match=r"'backbone.body.layer1.1.relu' is a SiLU"):
        architecture_of(model)
    model = rcnn()
    model.backbone.body["layer1"][1] = Bottleneck(16, 4, groups=2, base_width=64)
    with pytest.raises(ModelError, match=r"'backbone.body.layer1.1.conv2' is a grouped convolution"):
        architecture_of(model)
    model = rcnn()
    model.roi_heads.box_head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 49, 16))
    with pytest.raises(ModelError, match=r"'roi_heads.box_head' is a Sequential; .* TwoMLPHead or FastRCNNConvFCHead"):
        architecture_of(model)
    model = rcnn(fixed_size=(64, 64))
    with pytest.raises(ModelError, match="fixed_size"):
        architecture_of(model)
    model = rcnn()
    model.backbone.body["bn1"].eps = 1e-3
    with pytest.raises(ModelError, match=r"'backbone.body' mixes batch norms"):
        architecture_of(model)
    model = rcnn()
    model.rpn.head.cls_logits = nn.Conv2d(8, 3, 1, bias=False)
    with pytest.raises(ModelError, match=r"'rpn.head.cls_logits.bias' .* a part of this MaskRCNN was exchanged"):
        architecture_of(model).describe(model)

    class Other(MaskRCNN):
        pass

    other: Any = rcnn()
    other.__class__ = Other
    with pytest.raises(ModelError, match="is a Other; supported there: FasterRCNN or MaskRCNN"):
        architecture_of(other)
