"""Images are prepared as transformers' own image processors prepare them."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aphq.data.preprocessing import Preprocessing
from aphq.errors import ModelError
from aphq.models.architecture import architecture_of, predict
from aphq.models.loading import load_model

from ..families import hf_model
from ..variants import family

transformers = pytest.importorskip("transformers")
FILE = "preprocessor_config.json"
CLASSES = {
    "transformers vit": "ViTImageProcessor",
    "transformers deit": "DeiTImageProcessor",
    "transformers beit": "BeitImageProcessor",
    "transformers clip": "CLIPImageProcessor",
    "transformers siglip": "SiglipImageProcessor",
    "transformers dinov2": "BitImageProcessor",
    "transformers swin": "ViTImageProcessor",
}
SMALL = {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}}


def model_in(folder: Path, name: str, said: object, file: str = FILE) -> Any:
    model: Any = family(name)
    model.save_pretrained(folder)
    (folder / file).write_text(said if isinstance(said, str) else json.dumps(said))
    return load_model(str(folder))


def preprocessing(model: Any) -> Preprocessing:
    found: Preprocessing = architecture_of(model).preprocessing(model)  # type: ignore[assignment]
    return found


def picture() -> Image.Image:
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (9, 14, 3), dtype=np.uint8)).resize((150, 90), Image.Resampling.BICUBIC)


def same(model: Any, processor: Any) -> bool:
    """Whether both prepare an image alike; two libraries round a resized pixel differently now and then."""
    known = preprocessing(model)
    ours = known.normalise(known.eval_transform(picture())[None])[0]
    theirs = processor(picture(), return_tensors="pt")["pixel_values"][0]
    return ours.shape == theirs.shape and float((ours - theirs).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("transformers vit", {"size": 32}),
        ("transformers vit", {"size": {"height": 32, "width": 32}, "resample": 3}),
        ("transformers vit", {"size": [32, 32], "do_normalize": False}),
        ("transformers vit", {"size": 32, "do_rescale": False, "image_mean": [120.0] * 3, "image_std": [60.0] * 3}),
        ("transformers vit", {"size": 32, "rescale_factor": 1 / 127.5}),
        ("transformers deit", {**SMALL, "do_center_crop": True}),
        ("transformers deit", {"size": 37, "crop_size": 32}),
        ("transformers beit", {**SMALL, "do_center_crop": True}),
        ("transformers beit", {"size": 32, "crop_size": 20, "do_center_crop": False}),
        ("transformers clip", {"size": 40, "crop_size": 32}),
        ("transformers clip", {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}),
        ("transformers dinov2", {"size": {"shortest_edge": 20}, "crop_size": 16, "image_mean": [0.4, 0.5, 0.6]}),
    ],
)
def test_a_file_is_read_as_its_own_processor_reads_it(tmp_path: Path, name: str, said: dict[str, Any]) -> None:
    processor = getattr(transformers, CLASSES[name])(**said)
    model = model_in(tmp_path, name, {**processor.to_dict(), **said})
    assert same(model, processor)


@pytest.mark.parametrize("name", CLASSES)
def test_without_a_file_the_familys_processor_counts(name: str) -> None:
    defaults = getattr(transformers, CLASSES[name])()
    ratio = 224 / (defaults.size.get("height") or defaults.size["shortest_edge"])
    found = preprocessing(family(name))
    assert found.size == (32, 32)
    assert found.interpolation == {2: "bilinear", 3: "bicubic"}[int(defaults.resample)]
    assert found.crop_pct == (ratio if defaults.do_center_crop else 1.0)
    assert found.crop_mode == ("center" if "shortest_edge" in defaults.size else "squash")


def test_another_class_in_the_file_brings_its_own_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    said = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 40, "crop_size": 32}
    assert preprocessing(model_in(tmp_path, "transformers vit", said)).crop_mode == "center"
    assert not caplog.records
    model = model_in(tmp_path, "transformers vit", {"image_processor_type": "OddImageProcessor", "size": 32})
    assert preprocessing(model).crop_mode == "squash"
    assert "is for a 'OddImageProcessor', read as for a ViTImageProcessor" in caplog.text


def test_processors_saved_together_are_looked_at_first(tmp_path: Path) -> None:
    said = {"image_processor": {"size": 32, "resample": 1}}
    model_in(tmp_path, "transformers vit", {"size": 32, "resample": 0})
    assert (
        preprocessing(model_in(tmp_path, "transformers vit", said, "processor_config.json")).interpolation == "lanczos"
    )
    model = model_in(tmp_path, "transformers vit", {"processor_class": "CLIPProcessor"}, "processor_config.json")
    assert preprocessing(model).interpolation == "nearest"


def test_a_model_of_one_size_keeps_it_and_one_of_any_size_follows_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"size": {"shortest_edge": 32}, "crop_size": 24, "do_center_crop": True}
    fixed = preprocessing(model_in(tmp_path / "vit", "transformers vit", said))
    assert (fixed.size, fixed.crop_pct) == ((32, 32), 0.75)
    assert "makes images of (24, 24), the model takes (32, 32): resized in proportion" in caplog.text
    model = model_in(tmp_path / "dino", "transformers dinov2", said)
    assert preprocessing(model).size == (24, 24)
    with torch.no_grad():
        assert predict(model, torch.randn(2, 3, 24, 24)).shape == (2, 10)


def test_a_resized_side_survives_the_division(tmp_path: Path) -> None:
    for side in range(32, 200):
        said = {"size": {"height": side, "width": side}, "crop_size": 32, "do_center_crop": True}
        (tmp_path / FILE).write_text(json.dumps(said))
        model: Any = hf_model("ViTForImageClassification", "ViTConfig", num_hidden_layers=0)()
        model.config._name_or_path = str(tmp_path)
        assert int(32 / preprocessing(model).crop_pct) == side


def test_grey_models_get_one_number(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"size": 32, "image_mean": [0.25, 0.5, 0.75], "image_std": 0.5}))
    model: Any = hf_model("ViTForImageClassification", "ViTConfig", num_channels=1)()
    model.config._name_or_path = str(tmp_path)
    assert (preprocessing(model).mean, preprocessing(model).std) == ((0.5,), (0.5,))


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"size": {"longest_edge": 32}}, "'size' must be a number"),
        ({"size": {"shortest_edge": 32, "longest_edge": 64}}, "'size' must be a number"),
        ({"size": 0}, "'size' must be a number"),
        ({"size": "large"}, "'size' must be a number"),
        ({"size": [40, 60], "crop_size": [32, 32], "do_center_crop": True}, "differ in shape"),
        ({"size": 32, "resample": 9}, "'resample' must be one of PIL's numbers"),
        ({"size": 32, "do_pad": True}, "cannot be prepared with 'do_pad'"),
        ({"size": 32, "crop_pct": 0.9}, "cannot be prepared with 'crop_pct'"),
        ({"size": 32, "do_resize": False, "do_center_crop": True, "crop_size": 32}, "cropped without being resized"),
        ({"size": 32, "rescale_factor": 0}, "'rescale_factor' must be a number above 0"),
        ({"size": 32, "image_mean": "grey"}, "'image_mean' must be numbers"),
        ({"size": 32, "image_std": [0, 0, 0]}, "'std' must be"),
        ("{", "is damaged"),
        ("[1]", "is damaged"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, said: object, says: str) -> None:
    model = model_in(tmp_path, "transformers vit", said)
    with pytest.raises(ModelError, match=says) as caught:
        preprocessing(model)
    assert FILE in str(caught.value)


def test_a_folder_without_settings_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    preprocessing(family("transformers vit"))
    assert not caplog.records, "a model made here has nothing to lack"
    family("transformers vit").save_pretrained(tmp_path)  # type: ignore[operator]
    preprocessing(load_model(str(tmp_path)))
    assert f"{tmp_path} has no {FILE}" in caplog.text


def test_for_a_model_on_the_hub_the_settings_are_fetched_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError

    from aphq.models.hf import loading

    made: Any = family("transformers vit")
    made.config._name_or_path = "somebody/vit"
    asked: list[str] = []

    def download(name: str, file: str) -> str:
        asked.append(file)
        if file != FILE:
            raise EntryNotFoundError("404")
        repository = tmp_path / "models--somebody--vit"
        target = repository / "snapshots" / "1234" / file
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps({"size": 32, "resample": 1}))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("1234")
        return str(target)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(loading, "_from_hub", lambda _: {"architectures": ["ViTForImageClassification"]})
    monkeypatch.setattr(transformers.ViTForImageClassification, "from_pretrained", lambda *_, **__: (made, {}))
    assert preprocessing(made).interpolation == "bilinear"
    assert not asked, "a model that the caller brings is none to ask the network about"
    assert preprocessing(load_model("somebody/vit")).interpolation == "lanczos"
    assert FILE in asked
