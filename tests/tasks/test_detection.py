"""The whole pipeline on detectors: the same stages as for classifiers, images one by one."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.data import Preprocessing
from aphq.errors import DataError, ModelError, RecipeError
from aphq.models.student import enable
from aphq.presets import preset
from aphq.recipe import JointTuning, Rotation
from aphq.stages import RUN_STAGE
from aphq.stages.importance import Importances
from aphq.tasks.detection import MLP_IMAGES, MOST_IMAGES, Detection

from ..coco_set import write
from ..models.detection.nets import detector, picture
from ..runs import sha256, stopped_after
from ..scenes_of import COUNT, RULES, STAGES, pictures, scene_workspace, short_recipe


def quantize(model: nn.Module, recipe: Any = None, **options: Any) -> aphq.Run:
    options = {"preprocessing": RULES, "device": "cpu", **options}
    return aphq.quantize(model, recipe or short_recipe(), pictures(), **options)


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_a_detector_goes_through_every_stage_to_an_artifact(kind: str, tmp_path: Path) -> None:
    run = quantize(detector(kind), out=tmp_path / "run", val=write(tmp_path / "coco"))
    assert list(run.seconds) == STAGES
    assert not [row.name for row in run.coverage if row.note]
    assert run.sizes is not None
    assert run.sizes.ratio > 2
    again = aphq.load(tmp_path / "run")
    found, expected = again(picture()), run.model(picture())
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.scores, expected.scores)
    assert 0 <= run.accuracy["quantized"].box.ap <= 100
    assert "box AP" in run.summary()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["accuracy"]["float"]["images"] == 3
    assert aphq.evaluate(tmp_path / "run", write(tmp_path / "again"), device="cpu") == run.accuracy["quantized"]
    recalled = quantize(detector(kind), out=tmp_path / "run")
    assert recalled.accuracy == run.accuracy, "a finished run is not redone"


def test_eight_bits_change_little_and_three_bits_more() -> None:
    model = detector()
    work8, work3 = (scene_workspace(model, short_recipe(bits)) for bits in ("w8a8", "w3a3"))
    losses = []
    for work in (work8, work3):
        for stage in work.recipe.stages:
            if stage.NAME in ("layernorm_reparameterisation", "scale_search"):
                RUN_STAGE[type(stage)](work, stage)
        enable(work.student)
        rows = work.image_rows()
        parts = [rows[slice(i, i + 1)] for i in range(COUNT)]
        pairs = [tuple(_predict(m, work.units, x) for m in (work.student, work.teacher)) for x in parts]
        losses.append(sum(float(work.distillation.loss(*pair)) for pair in pairs))
    assert losses[0] < 0.1 * losses[1]


def _predict(model: nn.Module, units: Any, x: Any) -> Any:
    from aphq.models.architecture import run_units

    return run_units(model, units, x)


def test_reparameterised_norms_before_the_pyramid_change_nothing_in_float() -> None:
    """They feed 1 x 1 convolutions, the other pairs linear layers; sizes differ, windows are padded."""
    work = scene_workspace(detector())
    stage = work.recipe.stage("layernorm_reparameterisation")
    before = work.student.get_parameter("neck.lateral_convs.0.conv.weight").clone()
    x = work.image_rows()[slice(3, 4)]
    expected = _predict(work.student, work.units, x)
    RUN_STAGE[type(stage)](work, stage)
    got = _predict(work.student, work.units, x)
    assert not torch.equal(work.student.get_parameter("neck.lateral_convs.0.conv.weight"), before)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["mse", "brecq", "ph", "aph", "fisher"])
def test_every_importance_works_on_images_of_different_sizes(kind: str) -> None:
    recipe = short_recipe(importance__kind=kind, importance__epsilon=1e-3)
    work = scene_workspace(detector(), recipe)
    stage: Any = work.recipe.stage("block_reconstruction")
    importances = Importances(work, stage.importance)
    for visit in work.walk():
        if visit.unit.kind == "neck":
            assert importances.at(visit.unit.name, visit).each is None
            break
        enable(work.student.get_submodule(visit.unit.name), False)
        weights = importances.at(visit.unit.name, visit)
        for number in range(COUNT):
            target = visit.teacher_out[slice(number, number + 1)]["x"]
            error = weights.weigh(torch.ones_like(target), torch.tensor([number]))
            assert error.shape == target.shape
            assert torch.isfinite(error).all()
            assert (error >= 0).all()


def test_fisher_follows_the_gradients_of_places_and_channels() -> None:
    """A channel that the later network ignores has no importance."""
    model: Any = detector()
    last = model.backbone.layers[3].blocks[0]
    model.backbone.norm3.weight[2] = 0  # the last stage's output is read through this norm alone
    work = scene_workspace(model)
    stage: Any = work.recipe.stage("block_reconstruction")
    found = Importances(work, stage.importance).of_scenes["backbone.layers.3.blocks.0"]
    assert last is model.backbone.layers[3].blocks[0]
    assert found.channels[2] < 0.5 * found.channels.median()
    assert found[slice(0, 1)].shape[-1] == len(found.channels)


def test_losses_of_every_unit_are_finite_and_fall(tmp_path: Path) -> None:
    changes = {
        "block_reconstruction__steps": 60,
        "block_reconstruction__regulariser": 0.0,  # it grows on purpose, and is part of the loss
        "block_reconstruction__rounding_lr": 1e-2,
        "mlp_reconstruction__steps": 2,
    }
    run = quantize(detector(), short_recipe("w3a3", **changes), out=tmp_path / "run")
    units = {name: e["losses"] for name, e in unit_events(tmp_path / "run", "block_reconstruction").items()}
    assert {"neck", "rpn_head", "roi_head.bbox_head", "roi_head.mask_head"} <= set(units)
    assert all(math.isfinite(loss) for losses in units.values() for loss in losses)
    fell = [name for name, losses in units.items() if sum(losses[-12:]) < sum(losses[:12])]
    assert len(fell) >= 0.6 * len(units)
    assert run.path is not None


def test_mlps_learn_from_the_tokens_of_several_images(tmp_path: Path) -> None:
    changes = {
        "mlp_reconstruction__steps": 60,
        "mlp_reconstruction__batch": COUNT - 1,
        "mlp_reconstruction__learning_rate": 3e-3,
        "block_reconstruction__steps": 0,
    }
    quantize(detector(), short_recipe("w4a4", **changes), out=tmp_path / "run")
    units = unit_events(tmp_path / "run", "mlp_reconstruction")
    assert len(units) == sum(detector().config.depths)
    for name, event in units.items():
        assert sum(event["losses"][-12:]) < 0.7 * sum(event["losses"][:12]), name


def test_a_loss_starts_where_it_should_whatever_the_first_image_holds(tmp_path: Path) -> None:
    """With rates of next to nothing the mean over all images stays where it was scaled to, though images differ."""
    changes = {
        "block_reconstruction__steps": 120,
        "block_reconstruction__regulariser": 0.0,
        "block_reconstruction__weight_lr": 1e-12,
        "block_reconstruction__scale_lr": 1e-12,
        "mlp_reconstruction__steps": 0,
    }
    recipe = short_recipe("w4a4", **changes)
    quantize(detector(), recipe, out=tmp_path / "run")
    stage: Any = recipe.stage("block_reconstruction")
    for name, event in unit_events(tmp_path / "run", "block_reconstruction").items():
        mean = sum(event["losses"]) / len(event["losses"])
        assert mean == pytest.approx(stage.first_loss, rel=0.3), name


def unit_events(folder: Path, stage: str) -> dict[str, Any]:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return {e["unit"]: e for e in events if e["event"] == "unit" and e["stage"] == stage}


def test_a_stopped_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    model = detector()
    quantize(model, out=tmp_path / "whole")
    expected = sha256(tmp_path / "whole" / "model.safetensors")
    for stage, unit in (("importance", "fisher-4-20"), ("block_reconstruction", "rpn_head")):
        with stopped_after(stage, unit):
            quantize(model, out=tmp_path / "stopped")
    assert quantize(model, out=tmp_path / "stopped").resumed
    assert sha256(tmp_path / "stopped" / "model.safetensors") == expected


def test_memory_stays_within_its_bounds(tmp_path: Path) -> None:
    """With next to no memory for activations they go to disk, and the result is the same."""
    plain = quantize(detector(), out=tmp_path / "plain")
    bounded = quantize(detector(), out=tmp_path / "bounded", host_memory_gb=1e-4)
    assert plain.path is not None
    assert bounded.path is not None
    assert sha256(plain.path / "model.safetensors") == sha256(bounded.path / "model.safetensors")
    events = [json.loads(line) for line in (tmp_path / "bounded" / "events.jsonl").read_text().splitlines()]
    cached = next(e["cached"] for e in reversed(events) if e["event"] == "stage_finished")
    assert set(cached) == {"disk"}, "the process itself takes more than that already"


def test_every_further_stage_works_on_detectors_too(tmp_path: Path) -> None:
    """Rotation of the heads changes nothing in float, and the whole detector can be tuned at once."""
    recipe = short_recipe("w4a4", "fast").including(Rotation(), JointTuning(steps=4))
    run = quantize(detector(), recipe, out=tmp_path / "run")
    searched = ["layernorm_reparameterisation", "scale_search", "error_compensation"]
    assert list(run.seconds) == ["rotation", *searched, "joint_tuning"]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    losses = next(e["losses"] for e in events if e.get("stage") == "joint_tuning" and e["event"] == "unit")
    assert all(math.isfinite(loss) for loss in losses)


def test_recipes_are_run_image_by_image() -> None:
    adapted = Detection().adapt(preset("w4a4", "paper"))
    assert adapted.calibration.images == MOST_IMAGES
    assert adapted.calibration.batch == 1
    assert not adapted.calibration.augment
    batches = {stage.NAME: stage.batch for stage in adapted.stages if hasattr(stage, "batch")}
    assert batches == {"mlp_reconstruction": MLP_IMAGES, "block_reconstruction": 1}
    assert Detection().adapt(adapted) == adapted


def test_what_a_detector_cannot_use_is_refused(tmp_path: Path) -> None:
    model = detector()
    with pytest.raises(DataError, match="COCO annotations"):
        quantize(model, val=tmp_path)
    with pytest.raises(DataError, match="3 categories, the model 5 classes"):
        quantize(detector(num_classes=5), val=write(tmp_path / "coco"))
    with pytest.raises(DataError, match=r"PIL images or uint8 tensors .* torch.float32"):
        aphq.quantize(model, short_recipe(), [torch.rand(3, 8, 8)], device="cpu")
    with pytest.raises(DataError, match="ScenePreprocessing, not Preprocessing"):
        quantize(model, preprocessing=Preprocessing((32, 32)))
    with pytest.raises(RecipeError, match="needs calibration images"):
        aphq.quantize(model, short_recipe(), device="cpu")
    broken: Any = detector()
    broken.neck.fpn_convs[0].conv.weight[0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        quantize(broken)


def test_images_that_are_measured_on_are_no_calibration_images(tmp_path: Path) -> None:
    coco = write(tmp_path / "coco")
    with pytest.raises(DataError, match=r"'\d.png' is one that is measured on: calibrate on others"):
        aphq.quantize(detector(), short_recipe(), coco[1], preprocessing=RULES, val=coco, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_a_gpu_runs_every_stage_and_agrees_with_the_cpu(kind: str, tmp_path: Path) -> None:
    quantize(detector(kind), out=tmp_path / "whole", device="cuda")
    searched = short_recipe("w8a8", "fast")
    there, here = (quantize(detector(kind), searched, device=device).model.cpu() for device in ("cuda", "cpu"))
    with torch.no_grad():
        for x, y in zip(there.levels(picture()), here.levels(picture()), strict=True):  # type: ignore[operator]
            assert float((x - y).norm()) < 0.1 * float(y.norm())
    found, expected = there(picture()), here(picture())
    assert len(found) == len(expected)
    assert float((found.scores - expected.scores).abs().median()) < 0.05  # untrained: one region may tip over
