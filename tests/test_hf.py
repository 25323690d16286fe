"""Models of transformers from its folders, and back into them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.errors import ArtifactError, ModelError
from aphq.models.architecture import architecture_of, predict
from aphq.models.loading import load_model

from .export.exports import calibrated, normalised
from .models.families import FAMILIES, HF_FAMILIES
from .models.variants import family
from .runs import pixels, short

transformers = pytest.importorskip("transformers")
NAMES = [name for name in FAMILIES if name in HF_FAMILIES]
QUICK = ("transformers vit", "transformers beit", "transformers siglip", "transformers swin v2, padded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A float ViT as transformers saves it, with an image processor."""
    path = tmp_path / "vit"
    model: Any = family("transformers vit")
    model.save_pretrained(path)
    said = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"shortest_edge": 40}}
    (path / "preprocessor_config.json").write_text(json.dumps({**said, "do_center_crop": True, "resample": 2}))
    return path


def test_a_folder_is_a_model(folder: Path) -> None:
    model, original = load_model(str(folder)), family("transformers vit")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(predict(model, images), predict(original, images))
    assert not model.training
    known = architecture_of(model).preprocessing(model)
    assert (known.size, known.mean, known.std) == ((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert (known.interpolation, known.crop_pct, known.crop_mode) == ("bilinear", 0.8, "center")


def test_a_folder_on_the_command_line(folder: Path, tmp_path: Path) -> None:
    run = aphq.quantize(str(folder), short("w8a8", "fast"), pixels(), out=tmp_path / "run", device="cpu")
    assert type(aphq.load(tmp_path / "run")) is type(run.model) is transformers.ViTForImageClassification


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"architectures": ["ResNetForImageClassification"]},
            "holds ResNetForImageClassification, which has no adapter",
        ),
        ({"architectures": None}, "a model of type 'vit', which has no adapter: supported: Beit"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized already; start from the float model"),
        ({"format": "aphq"}, "aphq has quantized already"),
        ({"architectures": ["ViTModel"]}, r"no weights for pooler\.dense"),
        ({"hidden_size": 48}, "cannot load a ViTForImageClassification"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    change(folder, **values)
    with pytest.raises(ModelError, match=message):
        load_model(str(folder))


def test_folders_without_a_model_and_arguments_that_do_not_apply(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no model: there is no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="weights and model arguments do not apply"):
        load_model(str(folder), num_classes=3)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="damaged"):
        load_model(str(folder))


def test_nothing_is_fetched_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was asked"))
    change(folder, attn_implementation="somebody/kernels", auto_map={"AutoModel": "evil.Model"})
    load_model(str(folder))


@pytest.mark.parametrize("key", ["auto_map", "attn_implementation", "_attn_implementation", "quantization_config"])
def test_a_description_cannot_ask_for_code_or_kernels(key: str) -> None:
    model = family("transformers vit")
    architecture = architecture_of(model)
    description = architecture.describe(model)
    description["config"][key] = "somebody/kernels"
    built: Any = architecture.build(description)
    assert built.config._attn_implementation == "sdpa"
    assert getattr(built.config, "auto_map", None) is None
    with pytest.raises(ModelError, match=r"'os\.system' is not among the classes of transformers\.ViT"):
        architecture.build({**description, "class": "os.system"})


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES])
def test_what_transformers_loads_is_what_was_saved(name: str, tmp_path: Path) -> None:
    import aphq.hf

    model: Any = calibrated(family(name), "w4a8")
    images = normalised(model, 4)
    aphq.hf.save_pretrained(model, tmp_path / "first")
    assert not hasattr(model.config, "quantization_config"), "the model in memory is left alone"
    again = type(model).from_pretrained(tmp_path / "first")
    again.save_pretrained(tmp_path / "second")
    third = type(model).from_pretrained(tmp_path / "second")
    with torch.no_grad():
        expected = predict(model, images)
        assert torch.equal(predict(again, images), expected)
        assert torch.equal(predict(third, images), expected)
    config = json.loads((tmp_path / "first" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "aphq"
    assert (tmp_path / "first" / "model.safetensors").stat().st_size < 4 * sum(p.numel() for p in model.parameters())


def test_a_forged_scale_is_found_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    import aphq.hf

    aphq.hf.save_pretrained(calibrated(family("transformers vit")), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(key for key in tensors if key.endswith("input_quantizer.scale"))
    save_file({**tensors, name: -tensors[name]}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match="impossible scale"):
        transformers.ViTForImageClassification.from_pretrained(tmp_path)


def test_a_forged_name_of_an_mlp_is_found_out(tmp_path: Path) -> None:
    import aphq.hf

    aphq.hf.save_pretrained(calibrated(family("transformers vit")), tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    change(tmp_path, quantization_config={**said, "relu": ["vit.nowhere.mlp"]})
    with pytest.raises(ArtifactError, match=r"an MLP 'vit\.nowhere\.mlp' that the model has not"):
        transformers.ViTForImageClassification.from_pretrained(tmp_path)


def test_other_models_have_their_own_format(tiny_vit: nn.Module, tmp_path: Path) -> None:
    import aphq.hf

    with pytest.raises(ArtifactError, match=r"for others there is aphq\.save"):
        aphq.hf.save_pretrained(calibrated(tiny_vit), tmp_path)
