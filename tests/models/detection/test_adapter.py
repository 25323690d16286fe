from typing import Any

import pytest
import torch
from torch import nn

from aphq.errors import ModelError
from aphq.models.architecture import architecture_of, run_units
from aphq.models.coverage import coverage
from aphq.models.detection import Detector
from aphq.models.detection.regions import BOX_SIZE, MASK_SIZE, region_features
from aphq.models.detection.rpn import flatten_anchors
from aphq.models.detection.scenes import MASKS, REGIONS, regions_of
from aphq.models.student import make_student
from aphq.recipe import Recipe

from .nets import detector, picture

KINDS = ["mask_rcnn", "cascade_mask_rcnn"]


@pytest.mark.parametrize("kind", KINDS)
def test_units_cover_the_detector_in_forward_order(kind: str) -> None:
    model = detector(kind)
    units = architecture_of(model).units(model)
    kinds = [unit.kind for unit in units]
    heads = 1 + 2 * model.config.stages
    blocks = ["block", "merge", "block", "block", "merge", "block", "merge", "block"]
    assert kinds == ["patch_embed", *blocks, "neck", *["head"] * heads]
    owned = [f"{m}.{n}" for unit in units for m in unit.modules for n, _ in model.get_submodule(m).named_parameters()]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters()), "every parameter has one unit"


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_the_detector(kind: str) -> None:
    """Every answer of the chain, from the modules themselves on the same regions."""
    model, image = detector(kind), picture(50, 90)
    known = regions_of(model, image, (50, 90))
    found = run_units(model, architecture_of(model).units(model), {"image": image, **known})
    levels = model.levels(image)
    logits, deltas = model.rpn_head(levels)
    expected = {
        "rpn.cls": torch.cat([flatten_anchors(x, 1)[:, 0] for x in logits]),
        "rpn.reg": torch.cat([flatten_anchors(x, 4) for x in deltas]),
    }
    for s, head in enumerate(model.roi_head.box_heads):
        cls, reg = head(region_features(levels, known[f"regions.{s}"], BOX_SIZE))
        expected |= {f"box.{s}.cls": cls, f"box.{s}.reg": reg}
    features = region_features(levels, known["regions.mask"], MASK_SIZE)
    for s, head in enumerate(model.roi_head.mask_heads):
        expected[f"mask.{s}"] = head(features)[torch.arange(len(features)), known["labels"].long()]
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_is_the_detector_and_nothing_in_it_stays_float(kind: str) -> None:
    model = detector(kind)
    architecture = architecture_of(model)
    student: Any = make_student(model, architecture, architecture.units(model), Recipe())
    found, expected = student(picture()), model(picture())
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.masks, expected.masks)
    rows = {row.name: row for row in coverage(student)}
    multiplying = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    layers = [name for name, module in model.named_modules() if isinstance(module, multiplying)]
    products = 2 * sum(model.config.depths)
    assert len(rows) == len(layers) + products
    assert all(not row.note and row.input_bits for row in rows.values())
    upsample = next(row for name, row in rows.items() if name.endswith("upsample"))
    assert (upsample.kind, upsample.weight_bits, upsample.weight_granularity) == ("convolution", 4, "channel")
    assert rows["backbone.patch_embed.proj"].input_bits == 8


def test_regions_are_the_teachers_best_and_some_of_the_rest() -> None:
    model, image = detector("cascade_mask_rcnn", proposals=300, proposals_per_level=200), picture()
    known = regions_of(model, image, (64, 96))
    for s in range(3):
        assert known[f"regions.{s}"].shape == (REGIONS, 4)
    assert len(known["labels"]) == len(known["regions.mask"]) >= MASKS
    assert known["labels"].max() < model.num_classes


def test_an_image_in_which_nothing_is_found_still_has_regions() -> None:
    model: Any = detector()
    model.roi_head.bbox_head.fc_cls.bias[-1] = 1e4
    known = regions_of(model, picture(), (64, 96))
    assert len(known["regions.mask"]) == MASKS
    assert all(torch.isfinite(x).all() for x in known.values())


def test_description_builds_an_equal_detector() -> None:
    model = detector("cascade_mask_rcnn")
    architecture = architecture_of(model)
    again = architecture.build(architecture.describe(model))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(picture()).boxes, model(picture()).boxes)


def test_a_part_it_does_not_know_is_named() -> None:
    model: Any = detector()
    model.backbone.layers[1].blocks[0].mlp.act = nn.SiLU()
    with pytest.raises(ModelError, match=r"'backbone.layers.1.blocks.0.mlp.act' is a SiLU"):
        architecture_of(model)

    class Other(Detector):
        pass

    with pytest.raises(ModelError, match="is a Other; supported there: Detector"):
        architecture_of(Other(model.config))
