import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.engine.hooks import watch_inputs
from aphq.models.student import enable, finalise
from aphq.report import observe
from aphq.report.observe import Distance, Spread, histograms, importance_of_blocks, model_name
from aphq.stages import RUN_STAGE

from ..runs import all_images, pixels, sha256, short, workspace


def measured(path: Path) -> dict[str, object]:
    return json.loads((path / observe.MEASUREMENTS).read_text())


def test_decibels_are_ten_times_the_logarithm_of_the_power_ratio() -> None:
    distance = Distance()
    distance.add(torch.full((100,), 10.0), torch.full((100,), 11.0))
    assert distance.decibels == pytest.approx(20.0)
    same = Distance()
    same.add(torch.ones(3), torch.ones(3))
    assert same.decibels == observe.MOST_DECIBELS
    assert Distance().decibels is None, "no signal has no ratio"


def test_a_box_holds_extremes_and_quantiles() -> None:
    spread = Spread()
    spread.add(torch.linspace(-1, 1, 201))
    spread.add(torch.tensor([5.0]))
    box = spread.box()
    assert box is not None
    assert (box[0], box[-1]) == (-1, 5)
    assert box == sorted(box)
    assert box[3] == pytest.approx(0, abs=0.02)
    assert Spread().box() is None


def test_histograms_share_their_bins() -> None:
    found = histograms(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([3.0]))
    assert (found["lower"], found["upper"]) == (0, 3)
    assert sum(found["before"]) == pytest.approx(1, abs=1e-3)
    assert found["after"][-1] == 1
    assert sum(histograms(torch.ones(4), torch.ones(4))["before"]) == pytest.approx(1), "constants have a bin too"


def test_a_student_that_rounds_nothing_makes_no_error(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short("w4a4", "fast"))
    found = observe.observe(work)  # quantizers have no scales yet, and are off
    assert all(unit["snr"] > 90 for unit in found["units"])
    assert found["agreement"]["same"] == 100


def test_every_layer_and_unit_is_measured(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short("w4a4", "fast"))
    for stage in work.recipe.stages:
        RUN_STAGE[type(stage)](work, stage)
    finalise(work.student)
    enable(work.student)
    before = {name: tensor.clone() for name, tensor in work.student.state_dict().items()}
    found = observe.observe(work)
    assert [unit["name"] for unit in found["units"]] == [unit.name for unit in work.units]
    assert all(0 < unit["snr"] < 60 for unit in found["units"])
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert {"patch_embed.proj", "blocks.0.attn.qkv", "blocks.1.attn.qk", "blocks.1.mlp.fc2", "head"} <= set(layers)
    assert layers["blocks.0.attn.qkv"]["output_snr"] is None, "its values are rescaled, so they do not compare"
    assert layers["blocks.0.attn.proj"]["output_snr"] > 0
    assert layers["blocks.0.attn.qk"]["rounding_snr"].keys() == {"left", "right"}
    assert layers["blocks.0.mlp.fc1"]["unit"] == "blocks.0"
    assert len(layers["blocks.0.mlp.fc1"]["before"]) == 7
    assert [mlp["name"] for mlp in found["mlps"]] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in work.student.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [*work.student.modules(), *work.teacher.modules()])


def test_exponentials_are_measured_as_the_probabilities_they_become(tiny_vit: Any) -> None:
    """So that runs with either kind of softmax compare."""
    weight = tiny_vit.blocks[1].attn.qkv.weight.data
    weight[: 2 * len(weight) // 3] *= 4  # some rows of attention are peaked then, and some even
    work = workspace(tiny_vit, short("w6a6", "fast"))
    for stage in work.recipe.stages:
        RUN_STAGE[type(stage)](work, stage)
    finalise(work.student)
    seen: list[tuple[torch.Tensor, ...]] = []
    product = work.student.get_submodule("blocks.1.attn.pv")
    with torch.no_grad(), watch_inputs({"": product}, lambda _, inputs: seen.append(inputs)):
        work.student(all_images(work))
    ((weights, _, total),) = seen
    expected = Distance()
    expected.add(weights / total, product.left(weights) / total)  # type: ignore[operator]
    layers = {layer["name"]: layer for layer in observe.observe(work)["layers"]}
    assert layers["blocks.1.attn.pv"]["rounding_snr"]["left"] == pytest.approx(expected.decibels, abs=0.1)


def test_importance_keeps_the_class_token_apart(tiny_vit: nn.Module) -> None:
    blocks = importance_of_blocks(workspace(tiny_vit))
    assert [block["unit"] for block in blocks] == ["blocks.0", "blocks.1"]
    assert blocks[0]["grid"] == [4, 4]
    assert len(blocks[0]["prefix"]) == 1
    assert len(blocks[0]["channels"]) == 32
    last = blocks[-1]
    assert last["tokens"] == [0] * 16, "behind the last block only the class token is read"
    assert last["prefix"][0] == pytest.approx(17)


def test_importance_of_windows_is_a_map_without_a_class_token(tiny_swin: nn.Module) -> None:
    blocks = importance_of_blocks(workspace(tiny_swin))
    assert blocks[0]["grid"] == [8, 8]
    assert blocks[-1]["grid"] == [4, 4]
    assert not blocks[0]["prefix"]


def test_the_measurements_of_a_run_are_small_and_finite(runs: dict[str, Path]) -> None:
    for path in runs.values():
        text = (path / observe.MEASUREMENTS).read_text()
        assert len(text) < 200_000
        assert "NaN" not in text
        assert "Infinity" not in text
        assert measured(path)["environment"]["torch"] == torch.__version__.split("+")[0] or torch.__version__  # type: ignore[index]
    assert measured(runs["labelled"])["command"] is None, "pytest is not the command line tool"


def test_a_run_is_the_same_and_is_saved_when_it_cannot_be_observed(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = short("w4a4", "fast")
    aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "seen", device="cpu")

    def fail(*_: object) -> None:
        raise RuntimeError("nothing to see")

    monkeypatch.setattr("aphq.api.write_measurements", fail)
    aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "unseen", device="cpu")
    assert "nothing to see" in caplog.text
    assert not (tmp_path / "unseen" / observe.MEASUREMENTS).exists()
    assert (tmp_path / "unseen" / "report.html").exists()
    files = [tmp_path / name / "model.safetensors" for name in ("seen", "unseen")]
    assert sha256(files[0]) == sha256(files[1])


def test_models_are_named_by_timm_or_by_class(tiny_vit: nn.Module) -> None:
    assert model_name(tiny_vit) == "VisionTransformer"
    tiny_vit.pretrained_cfg = {"architecture": "vit_small"}  # type: ignore[assignment]
    assert model_name(tiny_vit) == "vit_small"


def test_short_numbers_keep_four_digits() -> None:
    assert observe.short(math.pi) == 3.142
