"""The commands on a detector: quantize, measure, inspect, draw."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from aphq.cli.app import app

from ..coco_set import write
from ..models.detection.nets import TINY, detector
from ..scenes_of import pictures, short_recipe


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weights, calib/ and a COCO set; run/ is a finished run."""
    folder = tmp_path_factory.mktemp("detector")
    torch.save({"state_dict": dict(detector().state_dict())}, folder / "weights.pth")
    (folder / "calib").mkdir()
    for number, pixels in enumerate(pictures()):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / "calib" / f"{number}.png")
    write(folder / "coco")
    (folder / "recipe.json").write_text(short_recipe("w8a8", "fast").to_json())
    shape = [f"--model-arg={key}={list(v) if isinstance(v, tuple) else v}" for key, v in TINY.items()]
    shape = [pair for pair in shape if "num_classes" not in pair]
    done = run(
        *("quantize", "mask_rcnn_swin_t", "--weights", folder / "weights.pth", "--data", folder / "calib"),
        *("--bits", folder / "recipe.json", "--short-side=48", "--device=cpu", "--out", folder / "run", *shape),
        *("--coco", folder / "coco" / "instances.json", "--coco-images", folder / "coco" / "images", "--json"),
    )
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["accuracy"].keys() == {"float", "quantized"}
    return folder


def coco(files: Path) -> tuple[str | Path, ...]:
    return "--coco", files / "coco" / "instances.json", "--images", files / "coco" / "images"


def test_eval_measures_and_keeps_the_detections(files: Path, tmp_path: Path) -> None:
    kept = tmp_path / "found.json"
    done = run("eval", files / "run", *coco(files), "--device=cpu", "--json", "--detections", kept)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["images"] == 3
    assert 0 <= found["mask"]["ap"] <= 100
    assert {"image_id", "category_id", "bbox", "score", "segmentation"} <= json.loads(kept.read_text())[0].keys()
    assert "box AP" in run("eval", files / "run", *coco(files), "--device=cpu").stdout


def test_inspect_lists_the_transposed_convolution(files: Path) -> None:
    text = run("inspect", files / "run").stdout
    line = next(line for line in text.splitlines() if "roi_head.mask_head.upsample" in line)
    assert "8 bit / channel" in line


class TestPredict:
    def picture(self, files: Path) -> Path:
        return files / "coco" / "images" / "0.png"

    def test_draws_float_and_quantized_side_by_side(self, files: Path, tmp_path: Path) -> None:
        out = tmp_path / "out.png"
        done = run("predict", files / "run", self.picture(files), "-o", out, "--score=0.3", "--device=cpu", "--json")
        assert done.exit_code == 0, done.stderr
        found = json.loads(done.stdout)["found"]
        assert list(found) == ["float", "quantized"], "the weights are where they were"
        assert found["quantized"]
        with Image.open(out) as drawing:
            assert drawing.width == 2 * 90 + 8
            assert drawing.height > 60

    def test_names_come_from_annotations(self, files: Path, tmp_path: Path) -> None:
        options = ("-o", tmp_path / "out.jpg", "--score=0.3", "--device=cpu", "--json", *coco(files)[:2])
        found = json.loads(run("predict", files / "run", self.picture(files), *options).stdout)["found"]
        assert {o["label"] for o in found["quantized"]} <= {"car", "tree", "lake"}

    def test_without_the_float_weights_the_quantized_stand_alone(self, files: Path, tmp_path: Path) -> None:
        source = (files / "run" / "source.json").read_text()
        (files / "run" / "source.json").unlink()
        alone = (self.picture(files), "-o", tmp_path / "out.png", "--device=cpu", "--json")
        try:
            done = run("predict", files / "run", *alone)
            assert list(json.loads(done.stdout)["found"]) == ["quantized"]
            done = run("predict", files / "run", *alone, "--weights", files / "weights.pth")
            assert list(json.loads(done.stdout)["found"]) == ["float", "quantized"]
        finally:
            (files / "run" / "source.json").write_text(source)

    def test_other_weights_are_refused(self, files: Path, tmp_path: Path) -> None:
        state = {name: x + 1 if x.is_floating_point() else x for name, x in detector().state_dict().items()}
        save_file(state, tmp_path / "other.safetensors")
        given = ("-o", tmp_path / "out.png", "--weights", tmp_path / "other.safetensors", "--device=cpu")
        done = run("predict", files / "run", self.picture(files), *given)
        assert done.exit_code == 1
        assert "was quantized from" in done.stderr

    def test_troubles_are_one_sentence(self, files: Path, tmp_path: Path) -> None:
        for arguments, words in (
            ((tmp_path / "no.jpg", "-o", tmp_path / "out.png"), "no such file"),
            ((self.picture(files), "-o", tmp_path / "out.what"), "cannot tell the format"),
        ):
            done = run("predict", files / "run", *arguments, "--device=cpu")
            assert done.exit_code == 1
            assert words in done.stderr


def test_what_does_not_go_together_is_refused(files: Path, tmp_path: Path) -> None:
    for arguments, words in (
        ((), "nothing to measure on"),
        (coco(files)[:2], "go together"),
        (("--val", tmp_path, *coco(files)), "give one of them"),
        (("--val", tmp_path), "COCO annotations"),
    ):
        done = run("eval", files / "run", *arguments)
        assert done.exit_code == 1
        assert words in done.stderr
