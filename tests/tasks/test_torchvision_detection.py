"""The whole pipeline on torchvision's detectors: every stage, artifacts, AP, and the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision.models._api as registered
from PIL import Image
from torch import nn
from typer.testing import CliRunner, Result

import aphq
from aphq.cli.app import app
from aphq.errors import ModelError
from aphq.evaluation.coco import detect
from aphq.models.detection.family import family_of
from aphq.models.loading import load_model
from aphq.models.student import enable
from aphq.stages import RUN_STAGE
from aphq.stages.importance import Importances

from ..coco_set import write
from ..models.detection.rcnn import photo, rcnn, rcnn_builder
from ..runs import sha256, stopped_after
from ..scenes_of import COUNT, pictures, scene_workspace, short_recipe

NAME = "tiny_maskrcnn"


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that torchvision knows."""
    monkeypatch.setitem(registered.BUILTIN_MODELS, NAME, rcnn_builder)
    return NAME


def picture(height: int = 70, width: int = 90) -> Image.Image:
    return Image.fromarray(photo(height, width).permute(1, 2, 0).numpy())


def found_by(model: nn.Module) -> Any:
    return detect(model, picture(), family_of(model).scenes(model))


@pytest.mark.parametrize("kind", [{}, {"second": True, "masks": False}], ids=["mask", "boxes"])
def test_a_detector_goes_through_every_stage_to_an_artifact(kind: dict[str, Any], tmp_path: Path) -> None:
    coco = write(tmp_path / "coco")
    run = aphq.quantize(rcnn(**kind), short_recipe(), pictures(), device="cpu", out=tmp_path / "run", val=coco)
    assert list(run.seconds) == [
        "mlp_reconstruction",
        "layernorm_reparameterisation",
        "scale_search",
        "block_reconstruction",
    ]
    assert not [row.name for row in run.coverage if row.note]
    assert run.sizes is not None
    again = aphq.load(tmp_path / "run")
    found, expected = found_by(again), found_by(run.model)
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.scores, expected.scores)
    measured = run.accuracy["quantized"]
    assert 0 <= measured.box.ap <= 100
    assert (measured.mask is None) == ("masks" in kind)
    assert ("mask AP" in run.summary()) == ("masks" not in kind)
    assert aphq.evaluate(tmp_path / "run", coco, device="cpu") == measured
    assert aphq.quantize(rcnn(**kind), short_recipe(), pictures(), device="cpu", out=tmp_path / "run").accuracy == (
        run.accuracy
    ), "a finished run is not redone"


def test_a_stopped_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Stem and heads are units of several modules, some of which hold buffers alone."""

    def quantize(out: Path) -> aphq.Run:
        return aphq.quantize(rcnn(), short_recipe(), pictures(), device="cpu", out=out)

    quantize(tmp_path / "whole")
    with stopped_after("block_reconstruction", "roi_heads.box_predictor"):
        quantize(tmp_path / "stopped")
    assert quantize(tmp_path / "stopped").resumed
    assert sha256(tmp_path / "stopped" / "model.safetensors") == sha256(tmp_path / "whole" / "model.safetensors")


@pytest.mark.gpu
def test_a_gpu_runs_every_stage_and_agrees_with_the_cpu(tmp_path: Path) -> None:
    aphq.quantize(rcnn(), short_recipe(), pictures(), device="cuda", out=tmp_path / "whole")
    searched = short_recipe("w8a8", "fast")
    there, here = (aphq.quantize(rcnn(), searched, pictures(), device=d).model.cpu() for d in ("cuda", "cpu"))
    found, expected = found_by(there), found_by(here)
    assert len(found) == len(expected)
    torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=0.05)


def test_eight_bits_agree_with_float_and_three_do_not() -> None:
    losses, boxes = [], []
    for bits in ("w8a8", "w3a3"):
        model = rcnn()
        work = scene_workspace(model, short_recipe(bits))
        for stage in work.recipe.stages:
            if stage.NAME == "scale_search":
                RUN_STAGE[type(stage)](work, stage)
        enable(work.student)
        rows = work.image_rows()
        total = 0.0
        for number in range(COUNT):
            pair = [_run(m, work.units, rows[slice(number, number + 1)]) for m in (work.student, work.teacher)]
            total += float(work.distillation.loss(*pair))
        losses.append(total)
        ours, theirs = found_by(work.student), found_by(work.teacher)
        far = (ours.boxes[:, None] - theirs.boxes).abs().amax(-1)
        far = far.masked_fill(ours.labels[:, None] != theirs.labels, torch.inf)
        boxes.append(float((far.min(dim=0).values < 3.0).float().mean()))
    assert losses[0] < 0.1 * losses[1]
    assert boxes[0] >= 0.7
    assert boxes[0] > boxes[1]


def _run(model: nn.Module, units: Any, x: Any) -> Any:
    from aphq.models.architecture import run_units

    return run_units(model, units, x)


def test_fisher_follows_channels_that_come_first() -> None:
    """A channel that the later network ignores has no importance."""
    model = rcnn()
    model.backbone.fpn.inner_blocks[3][0].weight[:, 5] = 0  # the last layer's map is read here alone
    work = scene_workspace(model)
    stage: Any = work.recipe.stage("block_reconstruction")
    found = Importances(work, stage.importance).of_scenes["backbone.body.layer4.0"]
    assert found.channels.shape == (16,)
    assert found.channels[5] < 1e-3 * found.channels.max()
    weights = found[slice(0, 1)]
    assert weights.shape == (1, 16, 2, 3)
    assert weights[0, 5].max() < 1e-3 * weights.max()


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_commands(named: str, tmp_path: Path) -> None:
    """quantize by torchvision's name with a file, eval, predict with the float model beside it."""
    torch.save(rcnn().state_dict(), tmp_path / "weights.pth")
    (tmp_path / "calib").mkdir()
    for number, pixels in enumerate(pictures()):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "calib" / f"{number}.png")
    (tmp_path / "recipe.json").write_text(short_recipe("w8a8", "fast").to_json())
    labels, images = write(tmp_path / "coco")
    done = run(
        *("quantize", named, "--weights", tmp_path / "weights.pth", "--data", tmp_path / "calib", "--device=cpu"),
        *("--bits", tmp_path / "recipe.json", "--short-side=48", "--out", tmp_path / "run", "--json"),
    )
    assert done.exit_code == 0, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["preprocessing"]["shortest"] == 48
    assert config["preprocessing"]["longest"] == 72
    assert config["preprocessing"]["rounding"] == "down"
    done = run("eval", tmp_path / "run", "--coco", labels, "--images", images, "--device=cpu", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["images"] == 3
    shown = (images / "0.png", "-o", tmp_path / "out.png", "--score=0.1", "--coco", labels, "--device=cpu", "--json")
    done = run("predict", tmp_path / "run", *shown)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)["found"]
    assert list(found) == ["float", "quantized"], "the weights are where they were"
    assert {thing["label"] for thing in found["quantized"]} <= {"car", "tree", "lake"}
    (tmp_path / "run" / "source.json").unlink()
    found = json.loads(run("predict", tmp_path / "run", *shown, "--weights", tmp_path / "weights.pth").stdout)["found"]
    assert list(found) == ["float", "quantized"]


def test_weights_of_older_versions_load_and_others_are_named(named: str, tmp_path: Path) -> None:
    model = rcnn()
    older = {
        name.replace("rpn.head.conv.0.0.", "rpn.head.conv.")
        .replace("_blocks.0.0.", "_blocks.0.")
        .replace("mask_head.1.0.", "mask_head.mask_fcn2."): tensor
        for name, tensor in model.state_dict().items()
    }
    older["backbone.body.bn1.num_batches_tracked"] = torch.tensor(3)
    assert {"rpn.head.conv.weight", "backbone.fpn.inner_blocks.0.weight", "roi_heads.mask_head.mask_fcn2.bias"} <= {
        *older
    }
    torch.save(older, tmp_path / "older.pth")
    loaded = load_model(named, tmp_path / "older.pth")
    assert torch.equal(found_by(loaded).boxes, found_by(model).boxes)
    del older["rpn.head.conv.weight"]
    torch.save(older, tmp_path / "less.pth")
    with pytest.raises(ModelError, match=r"missing: rpn.head.conv.0.0.weight"):
        load_model(named, tmp_path / "less.pth")


def test_without_weights_nothing_random_is_quantized(named: str) -> None:
    with pytest.raises(ModelError, match="torchvision cannot create"):
        load_model(named)
