"""`aphq.quantize` as its callers know it: any data, any model they have, any recipe, and the model comes back whole."""

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import aphq
from aphq.data import Preprocessing
from aphq.errors import DataError, ModelError, RecipeError
from aphq.presets import resolve_recipe
from aphq.quant.layers import quantizers
from aphq.recipe import Activations, Override, Recipe, Weights

from .data.conftest import picture
from .runs import SHORT, pixels, short

Build = Callable[..., nn.Module]
FAST = short("w4a4", "fast")


def same(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# -- recipes -----------------------------------------------------------------------------------------------------------

BITS = {f"w{bits}a{bits}": {"weights__bits": bits, "activations__bits": bits} for bits in range(2, 9)}
RECIPES: dict[str, dict[str, Any]] = {
    **BITS,
    "w4a8": {"activations__bits": 8},
    "per tensor": {"weights__granularity": "tensor", "activations__attention": "tensor"},
    "symmetric": {"weights__symmetric": True, "activations__symmetric": True},
    "symmetric weights at 2 bits": {"weights__symmetric": True, "weights__bits": 2},
    "weights only": {"activations__bits": None},
    "activations only": {"weights__bits": None},
    "image in float": {"activations__image_bits": None},
    "head in float": {"overrides": {"head*": None}},
    "mixed": {"overrides": {"*.fc1": Override(weights=8), "*.attn.pv": Override(activations=8), "*.qkv": None}},
    "augmented": {"calibration__augment": True},
}


@pytest.mark.parametrize("family", ["vit", "swin"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_kind_of_recipe_runs_saves_and_loads_exactly(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, name: str
) -> None:
    if family == "swin" and name in BITS and name not in ("w2a2", "w8a8"):
        pytest.skip("the ViT stands for these")
    effort = "balanced" if family == "vit" else "fast"
    recipe = short("w4a4", effort, steps=2) if effort == "balanced" else FAST
    for path, value in RECIPES[name].items():
        recipe = recipe.with_value(path.replace("__", "."), value)
    model = request.getfixturevalue(family)()
    run = aphq.quantize(model, recipe, pixels(), out=tmp_path / "run", device="cpu")
    again = aphq.load(tmp_path / "run")
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found = run.model(x)
        assert torch.isfinite(found).all()
        assert torch.equal(again(x), found)
    assert same(again, run.model)
    assert {row.weight_bits for row in run.coverage if row.kind != "product"} >= (
        {recipe.weights.bits} if not recipe.overrides else set()
    )


def test_a_recipe_without_bits_gives_the_float_model(tiny_vit: nn.Module, tmp_path: Path) -> None:
    recipe = Recipe(weights=Weights(bits=None), activations=Activations(bits=None))
    run = aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "run", device="cpu")
    assert not list(quantizers(run.model))
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(run.model(x), tiny_vit(x))
    assert torch.equal(aphq.load(tmp_path / "run")(x), tiny_vit(x))


def test_presets_files_and_names(tiny_vit: nn.Module, tmp_path: Path) -> None:
    assert resolve_recipe("w3a3", "paper") == aphq.preset("w3a3", "paper")
    file = tmp_path / "mine.json"
    file.write_text(FAST.to_json())
    assert resolve_recipe("w3a3") == aphq.preset("w3a3", "balanced")
    assert resolve_recipe(str(file)) == resolve_recipe(file) == resolve_recipe(FAST) == FAST
    for recipe in (file, FAST):
        with pytest.raises(RecipeError, match="an effort goes with a preset"):
            aphq.quantize(tiny_vit, recipe, pixels(), effort="fast")
    with pytest.raises(RecipeError, match="there is no preset 'w44'"):
        aphq.quantize(tiny_vit, "w44", pixels())


# -- data --------------------------------------------------------------------------------------------------------------


def test_all_ways_to_give_the_same_images_give_the_same_model(tiny_vit: nn.Module) -> None:
    data = pixels(16)
    labels = torch.arange(16)
    ways: list[Any] = [
        DataLoader(TensorDataset(data, labels), batch_size=5),
        iter(data.split(3)),
        list(data),
        [{"pixel_values": part} for part in data.split(7)],
    ]
    expected = aphq.quantize(tiny_vit, FAST, data, device="cpu").model
    for way in ways:
        assert same(aphq.quantize(tiny_vit, FAST, way, device="cpu").model, expected)


def test_a_folder_and_a_zip_give_the_same_model(tiny_vit: nn.Module, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(20):
        picture(seed=i).save(folder / f"{i:02d}.png")
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)
    runs = [aphq.quantize(tiny_vit, FAST, source, device="cpu") for source in (folder, str(tmp_path / "images.zip"))]
    assert same(runs[0].model, runs[1].model)


def test_float_images_are_taken_as_normalised(tiny_vit: nn.Module) -> None:
    data = pixels(16)
    normal = Preprocessing.of_model(tiny_vit).normalise(data)
    left, right = (aphq.quantize(tiny_vit, FAST, images, device="cpu").model for images in (data, normal))
    assert same(left, right)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (None, "needs calibration images"),
        (torch.zeros(4, 3, 16, 16), r"needs images of shape \[N, 3, 32, 32\]"),
        ([], "no usable calibration image"),
        (torch.full((4, 3, 32, 32), torch.nan), "NaN"),
        (7, "cannot take calibration images from int"),
    ],
)
def test_wrong_data_is_refused(tiny_vit: nn.Module, data: Any, says: str) -> None:
    with pytest.raises((DataError, RecipeError), match=says):
        aphq.quantize(tiny_vit, FAST, data, device="cpu")


def test_identical_and_single_images_still_work(tiny_vit: nn.Module) -> None:
    for data in (pixels(1), torch.zeros(4, 3, 32, 32, dtype=torch.uint8)):
        model = aphq.quantize(tiny_vit, short("w4a4", steps=2), data, device="cpu").model
        assert torch.isfinite(model(torch.randn(2, 3, 32, 32))).all()


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["half", "training", "gradients", "plain"])
def test_the_callers_model_is_left_as_it_was(vit: Build, kind: str) -> None:
    model = vit()
    if kind == "half":
        model = model.half()
    elif kind == "training":
        model = model.train()
    elif kind == "gradients":
        model = model.requires_grad_(True)
    before = copy.deepcopy(model)
    run = aphq.quantize(model, short("w4a4", steps=2), pixels(), device="cpu")
    assert same(model, before)
    assert model.training == before.training
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in before.parameters()]
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert not run.model.training
    assert not any(p.requires_grad for p in run.model.parameters())
    assert run.model(torch.randn(2, 3, 32, 32)).dtype == torch.float32


def test_weights_that_are_not_numbers_are_refused(tiny_vit: nn.Module) -> None:
    tiny_vit.get_parameter("blocks.1.mlp.fc1.weight").data[0, 0] = torch.nan
    with pytest.raises(ModelError, match="not finite"):
        aphq.quantize(tiny_vit, FAST, pixels(), device="cpu")


def test_a_quantized_model_is_not_quantized_again(tiny_vit: nn.Module, tmp_path: Path) -> None:
    run = aphq.quantize(tiny_vit, FAST, pixels(), out=tmp_path / "run", device="cpu")
    for model in (run.model, aphq.load(tmp_path / "run")):
        with pytest.raises(ModelError, match="quantized already"):
            aphq.quantize(model, FAST, pixels(), device="cpu")


def test_other_models_and_misplaced_weights_are_refused(tiny_vit: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot quantize a Linear"):
        aphq.quantize(nn.Linear(3, 3), FAST, pixels())
    with pytest.raises(ModelError, match="goes with a model's name"):
        aphq.quantize(tiny_vit, FAST, pixels(), weights=tmp_path / "x.safetensors")


def test_an_unknown_device_is_refused(tiny_vit: nn.Module) -> None:
    with pytest.raises(RecipeError, match="cannot use the device 'quantum'"):
        aphq.quantize(tiny_vit, FAST, pixels(), device="quantum")


# -- what comes back ---------------------------------------------------------------------------------------------------


def test_the_summary_tells_accuracy_size_time_and_place(tiny_vit: nn.Module, tmp_path: Path) -> None:
    val = (pixels(20, seed=9), torch.arange(20) % 10)
    recipe = FAST.with_value("overrides", {"head": None})
    run = aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "run", val=val, device="cpu")
    text = run.summary()
    for words in ("top-1", "(20 images)", "agreement", "MB", "times smaller", "scale search", "float or partly: head"):
        assert words in text
    assert str(tmp_path / "run") in text
    assert run.accuracy.keys() == {"float", "quantized"}
    assert run.to_dict()["float_layers"] == ["head"]
    assert callable(aphq.evaluate), "a folder of that name must not hide the function"
    assert aphq.evaluate(run.model, val, device="cpu") == run.accuracy["quantized"]
    assert aphq.evaluate(tmp_path / "run", val, device="cpu") == run.accuracy["quantized"]
    assert aphq.evaluate(tiny_vit, val, device="cpu") == run.accuracy["float"]


def test_progress_is_reported_from_start_to_end(tiny_vit: nn.Module) -> None:
    from aphq.engine.progress import Progress

    class Noted(Progress):
        def __init__(self) -> None:
            self.totals: dict[str, int] = {}
            self.done: dict[str, int] = {}

        def start(self, stage: str, total: int) -> None:
            self.stage = stage
            self.totals[stage], self.done[stage] = total, 0

        def advance(self, steps: int, note: str = "") -> None:
            self.done[self.stage] += steps

    noted = Noted()
    aphq.quantize(tiny_vit, short(), pixels(SHORT["calibration.images"]), progress=noted, device="cpu")
    assert list(noted.totals)[-4:] == [stage.NAME for stage in short().stages]
    stages = {stage.NAME for stage in short().stages}
    assert {k: noted.done[k] for k in stages} == {k: noted.totals[k] for k in stages}


def test_the_events_tell_what_memory_each_stage_took(tiny_vit: nn.Module, tmp_path: Path) -> None:
    aphq.quantize(tiny_vit, short(steps=1), pixels(), out=tmp_path / "run", device="cpu")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    finished = [event for event in events if event["event"] == "stage_finished"]
    assert [event["stage"] for event in finished] == [stage.NAME for stage in short().stages]
    for event in finished:
        if Path("/proc/self/status").exists():
            assert 50 * 2**20 < event["memory"]["host"] < 2**40, "torch alone takes so much"
        assert "gpu" not in event["memory"]
        assert event["cached"]["host"] > 0


def test_the_public_names_are_there() -> None:
    assert all(getattr(aphq, name) is not None for name in aphq.__all__)
    assert set(aphq.__all__) <= set(dir(aphq))
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        aphq.quantise  # noqa: B018


# -- what could not be saved, or would flatter -------------------------------------------------------------------------


def test_a_recipe_that_quantizes_without_stages_is_refused(tiny_vit: nn.Module) -> None:
    with pytest.raises(RecipeError, match="no stage scale_search"):
        aphq.quantize(tiny_vit, Recipe(weights=Weights(bits=4)), pixels())


@pytest.mark.parametrize("change", ["another head", "another epsilon"])
def test_a_model_that_cannot_be_described_is_refused_before_the_run(
    tiny_vit: nn.Module, tmp_path: Path, change: str
) -> None:
    model: Any = copy.deepcopy(tiny_vit)
    if change == "another head":
        model.head = nn.Sequential(nn.Dropout(), model.head)
    else:
        model.blocks[1].norm1.eps = 5.0
    with pytest.raises(ModelError, match=r"cannot be saved.*head\.1" if "head" in change else "was changed after"):
        aphq.quantize(model, FAST, pixels(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_artifact_that_computes_something_else_does_not_count_as_finished(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any) -> nn.Module:
        model: Any = aphq.load(*args)
        model.head.bias.data.add_(1.0)
        return model

    monkeypatch.setattr("aphq.api.load", wrong)
    for _ in range(2):
        with pytest.raises(ModelError, match="does not compute what the one in memory does"):
            aphq.quantize(tiny_vit, FAST, pixels(), out=tmp_path / "run")
    monkeypatch.undo()
    assert aphq.quantize(tiny_vit, FAST, pixels(), out=tmp_path / "run").sizes is not None


@pytest.mark.parametrize("augment", [False, True])
def test_images_that_are_measured_on_are_no_calibration_images(
    tiny_vit: nn.Module, tmp_path: Path, augment: bool
) -> None:
    for number in range(10):
        file = tmp_path / "val" / str(number) / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        picture(48, 40, seed=number).save(file)
    recipe = FAST.with_value("calibration.augment", augment)
    with pytest.raises(DataError, match=r"'\d/\d.png' is one that is measured on: calibrate on others"):
        aphq.quantize(tiny_vit, recipe, tmp_path / "val", val=tmp_path / "val")
    other = tmp_path / "calib" / "0.png"  # of the same name, and another picture
    other.parent.mkdir()
    picture(48, 40, seed=99).save(other)
    aphq.quantize(tiny_vit, recipe, other.parent, val=tmp_path / "val")


def test_evaluation_leaves_the_model_as_it_was(tiny_vit: nn.Module) -> None:
    model = copy.deepcopy(tiny_vit).train()
    aphq.evaluate(model, (pixels(4), torch.zeros(4, dtype=torch.int64)), device="cpu")
    assert model.training
