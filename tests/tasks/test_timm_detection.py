"""The whole pipeline on torchvision's detectors with timm's models below: every stage, artifacts, resuming."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

import aphq
from aphq.errors import AphqError
from aphq.evaluation.coco import detect
from aphq.models.architecture import architecture_of, run_units
from aphq.models.detection.family import family_of
from aphq.models.student import enable, opened_copy
from aphq.stages import RUN_STAGE

from ..coco_set import write
from ..models.detection.rcnn import photo, rcnn
from ..models.detection.timm_nets import Features, on_timm, swin
from ..runs import sha256, stopped_after
from ..scenes_of import COUNT, STAGES, pictures, scene_workspace, short_recipe

KINDS = ("swin", "swin, whole", "swin v2", "vit, whole")  # stages side by side, a model as it is, cosines, tokens


def found_by(model: nn.Module, size: tuple[int, int] = (70, 90)) -> Any:
    image = Image.fromarray(photo(*size).permute(1, 2, 0).numpy())
    return detect(model, image, family_of(model).scenes(model))


@pytest.mark.parametrize("kind", KINDS)
def test_a_detector_goes_through_every_stage_to_an_artifact(kind: str, tmp_path: Path) -> None:
    """On images of four sizes, by two steps of each loop."""
    recipe = short_recipe(mlp_reconstruction__steps=2, block_reconstruction__steps=2)
    run = aphq.quantize(
        on_timm(kind), recipe, pictures(), device="cpu", out=tmp_path / "run", val=write(tmp_path / "c")
    )
    assert list(run.seconds) == STAGES
    assert not [row.name for row in run.coverage if row.note]
    products = [row for row in run.coverage if row.kind == "product"]
    assert len(products) == 2 * (3 if kind.startswith("vit") else 5)
    assert {row.input_bits for row in products} == {4}
    again = aphq.load(tmp_path / "run")
    for size in ((70, 90), (96, 64), (40, 120)):
        found, expected = found_by(again, size), found_by(run.model, size)
        assert torch.equal(found.boxes, expected.boxes)
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.masks, expected.masks)
    assert 0 <= run.accuracy["quantized"].box.ap <= 100
    assert aphq.quantize(on_timm(kind), recipe, pictures(), device="cpu", out=tmp_path / "run").accuracy == (
        run.accuracy
    ), "a finished run is not redone"


@pytest.mark.parametrize("kind", ["swin, some stages", "our vit"])
def test_the_effort_fast_needs_no_loop(kind: str, tmp_path: Path) -> None:
    model, recipe = on_timm(kind, masks=False), short_recipe("w8a8", "fast")
    run = aphq.quantize(model, recipe, pictures(), device="cpu", out=tmp_path / "run")
    assert not [row.name for row in run.coverage if row.note]
    assert torch.equal(found_by(aphq.load(tmp_path / "run")).boxes, found_by(run.model).boxes)


@pytest.mark.parametrize(
    ("kind", "unit"), [("swin", "backbone.body.layers_1.blocks.1"), ("vit, whole", "backbone.fpn")]
)
def test_a_stopped_run_ends_as_if_nothing_had_happened(kind: str, unit: str, tmp_path: Path) -> None:
    recipe = short_recipe(mlp_reconstruction__steps=2, block_reconstruction__steps=2)

    def quantize(out: Path) -> aphq.Run:
        return aphq.quantize(on_timm(kind), recipe, pictures(), device="cpu", out=out)

    quantize(tmp_path / "whole")
    with stopped_after("block_reconstruction", unit):
        quantize(tmp_path / "stopped")
    assert quantize(tmp_path / "stopped").resumed
    assert sha256(tmp_path / "stopped" / "model.safetensors") == sha256(tmp_path / "whole" / "model.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_eight_bits_are_close_to_float_and_three_are_not(kind: str) -> None:
    losses, far = [], []
    for bits in ("w8a8", "w3a3"):
        model = on_timm(kind)
        work = scene_workspace(opened_copy(model, architecture_of(model)), short_recipe(bits))
        for stage in work.recipe.stages:
            if stage.NAME == "scale_search":
                RUN_STAGE[type(stage)](work, stage)
        enable(work.student)
        rows, total = work.image_rows(), 0.0
        for number in range(COUNT):
            one = rows[slice(number, number + 1)]
            total += float(
                work.distillation.loss(*(run_units(m, work.units, one) for m in (work.student, work.teacher)))
            )
        losses.append(total)
        image = family_of(model).scenes(model).normalise(photo(64, 96))  # none that the scales were found on
        pairs = zip(work.student.backbone(image).values(), model.backbone(image).values(), strict=True)  # type: ignore[operator, union-attr]
        far.append(max(float((x - y).norm() / y.norm()) for x, y in pairs))
    assert losses[0] < 0.1 * losses[1]
    assert far[0] < 0.1 < far[1]


def test_a_backbone_of_one_size_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model = rcnn(trunk=Features(swin(features_only=True, strict_img_size=True)))
    with pytest.raises(AphqError, match="strict_img_size=False"):
        aphq.quantize(model, short_recipe(), pictures(), device="cpu", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
