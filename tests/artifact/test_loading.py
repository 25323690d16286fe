"""What is loaded computes what was saved, and a damaged or forged file is an ArtifactError and nothing else."""

import copy
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import aphq
from aphq.artifact import info_of
from aphq.artifact.saving import file_sha256
from aphq.errors import ArtifactError

from ..runs import pixels, short

Build = Callable[..., nn.Module]
Config = dict[str, Any]


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("vit", {}),
        ("vit", {"global_pool": "map", "class_token": False}),
        ("vit", {"qk_norm": True, "init_values": 1e-5, "reg_tokens": 2}),
        ("vit", {"in_chans": 1}),
        ("distilled", {}),
        ("swin", {}),
        ("swin", {"window_size": 3}),
    ],
)
def test_a_loaded_model_gives_exactly_the_saved_models_outputs(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, arguments: dict[str, Any]
) -> None:
    model = request.getfixturevalue(family)(**arguments)
    channels = arguments.get("in_chans", 3)
    run = aphq.quantize(model, short("w4a4"), pixels(channels=channels), out=tmp_path / "run", device="cpu")
    again = aphq.load(tmp_path / "run")
    x = torch.randn(4, channels, 32, 32)
    with torch.no_grad():
        assert torch.equal(again(x), run.model(x))
        assert not torch.equal(again(x), model(x)), "and it is the quantized one"
    assert not again.training
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert info_of(again) == info_of(run.model)


def test_the_bias_that_a_swin_reduction_gained_is_there(tiny_swin: nn.Module, tmp_path: Path) -> None:
    aphq.quantize(tiny_swin, short("w4a4", "fast"), pixels(), out=tmp_path, device="cpu")
    reduction: Any = aphq.load(tmp_path).get_submodule("layers.1.downsample.reduction")
    assert tiny_swin.get_submodule("layers.1.downsample.reduction").bias is None
    assert reduction.bias.abs().max() > 0


def test_saving_a_loaded_model_gives_the_same_file(tiny_swin: nn.Module, tmp_path: Path) -> None:
    aphq.quantize(tiny_swin, short("w3a3"), pixels(), out=tmp_path / "one", device="cpu")
    aphq.save(aphq.load(tmp_path / "one"), tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_loading_leaves_the_random_numbers_alone(tiny_vit: nn.Module, artifact: Path) -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    aphq.load(artifact)
    assert torch.equal(torch.rand(3), expected)


def test_nothing_is_unpickled(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *a, **k: pytest.fail("something was unpickled"))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("something was unpickled"))
    aphq.load(artifact)


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(vit: Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    model = aphq.quantize(vit(), short("w4a4"), pixels(), device="cpu").model
    aphq.save(model, folder)
    return folder


@pytest.fixture
def artifact(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(saved, tmp_path / "artifact")
    return tmp_path / "artifact"


def edit(folder: Path, change: Callable[[Config], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Forge the tensors together with their hash."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    edit(folder, lambda config: config["file"].update(sha256=file_sha256(folder / "model.safetensors")))


def arguments(**changes: Any) -> Callable[[Config], None]:
    return lambda config: config["architecture"]["arguments"].update(changes)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(version=2), r"has version 2; this aphq reads version 1"),
        (lambda c: c.pop("version"), r"has version None"),
        (lambda c: c.update(format="other"), "does not describe an aphq model"),
        (lambda c: c["architecture"].update(family="timm.ResNet"), "unknown model family 'timm.ResNet'"),
        (lambda c: c.pop("file"), "sha256 differs"),
        (lambda c: c.pop("architecture"), "architecture"),
        (lambda c: c["preprocessing"].update(size="big"), "'size' must be two positive integers"),
        (lambda c: c["recipe"]["weights"].update(bits=9), "weights.bits must be 2 to 8"),
        (lambda c: c["recipe"]["weights"].update(bits=5), "which does not fit the model"),
        (lambda c: c["packed"]["head.weight"].update(bits=5), "head.weight is packed as"),
        (lambda c: c["architecture"]["arguments"].update(activation="os.system"), "'os.system' is not among"),
        (lambda c: c.update(relu=["blocks.7.mlp"]), "names an MLP .blocks.7.mlp. that the model has not"),
        (arguments(embed_dim=64), "does not fit the model|does not hold a usable model"),
        (arguments(embed_dim=33), "cannot build a VisionTransformer"),
        (arguments(embed_dim=2**40), "does not fit the model|does not hold a usable model|cannot build"),
        (arguments(num_classes=10**12), "does not fit the model|does not hold a usable model|cannot build"),
        (arguments(img_size=[10**6, 10**6]), "does not fit the model|does not hold a usable model|cannot build"),
        (arguments(depth=10**9), "more blocks than there are tensors"),
        (arguments(surprise=1), "cannot build a VisionTransformer"),
    ],
)
def test_a_wrong_config_is_refused_in_a_sentence(artifact: Path, change: Callable[[Config], object], says: str) -> None:
    edit(artifact, change)
    with pytest.raises(ArtifactError, match=says) as caught:
        aphq.load(artifact)
    assert "\n" not in str(caught.value)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from leaves(inner, (*path, key))


def test_whatever_is_wrong_in_the_config_no_other_exception_comes_out(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value that the model is built from, removed or of another kind: an ArtifactError, or a whole model."""
    original = json.loads((artifact / "config.json").read_text())
    monkeypatch.setattr("aphq.artifact.loading.file_sha256", lambda _: original["file"]["sha256"])
    outcomes = {"refused": 0, "loaded": 0}
    for path in (p for p in leaves(original) if len(p) == 1 or p[0] == "architecture" or p[:2] == ("packed", "head")):
        for wrong in (..., -1, "x", []):
            config = copy.deepcopy(original)
            owner = config
            for key in path[:-1]:
                owner = owner[key]
            if wrong is ...:
                del owner[path[-1]]
            else:
                owner[path[-1]] = wrong
            (artifact / "config.json").write_text(json.dumps(config))
            try:
                model = aphq.load(artifact)
            except ArtifactError:
                outcomes["refused"] += 1
            except Exception as problem:
                pytest.fail(f"{path} = {wrong!r}: {type(problem).__name__}: {problem}")
            else:
                assert isinstance(model, nn.Module)
                outcomes["loaded"] += 1
    assert outcomes["refused"] > outcomes["loaded"]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\x00\xff", "[" * 100_000, '{"format": "aphq"}'])
def test_a_config_that_is_no_config(artifact: Path, text: str) -> None:
    (artifact / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArtifactError, match=r"config.json"):
        aphq.load(artifact)


def test_missing_files_are_named(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no folder"):
        aphq.load(tmp_path / "nowhere")
    (artifact / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"has no model.safetensors"):
        aphq.load(artifact)
    (artifact / "config.json").unlink()
    with pytest.raises(ArtifactError, match="holds no quantized model"):
        aphq.load(artifact)
    (artifact / "run.json").write_text("{}")
    with pytest.raises(ArtifactError, match="the run is not finished: start it again"):
        aphq.load(artifact)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused(artifact: Path, share: float) -> None:
    file = artifact / "model.safetensors"
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(ArtifactError, match="sha256 differs"):
        aphq.load(artifact)
    edit(artifact, lambda config: config["file"].update(sha256=file_sha256(file)))
    with pytest.raises(ArtifactError, match="is damaged"):
        aphq.load(artifact)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_flipped_bit_is_noticed(artifact: Path, share: float) -> None:
    file = artifact / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[int(len(content) * share)] ^= 0x10
    file.write_bytes(bytes(content))
    with pytest.raises(ArtifactError, match="sha256 differs"):
        aphq.load(artifact)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("head.weight"), "head.weight"),
        (lambda t: t.pop("head.bias"), "head.bias"),
        (lambda t: t.pop("head.input_quantizer.scale"), "scale"),
        (lambda t: t.pop("head.input_quantizer.zero_point"), "zero_point"),
        (lambda t: t.update(surprise=torch.zeros(2)), "does not hold a usable model"),
        (lambda t: t.update({"head.weight": t["head.weight"][:-1].clone()}), "the file is damaged"),
        (lambda t: t.update({"head.weight": t["head.weight"].float()}), "the file is damaged"),
        (lambda t: t.update({"head.bias": torch.zeros(11)}), "does not hold a usable model"),
        (lambda t: t["head.input_quantizer.scale"].fill_(torch.nan), "impossible scale"),
        (lambda t: t["head.input_quantizer.scale"].fill_(torch.inf), "impossible scale"),
        (lambda t: t["head.input_quantizer.scale"].fill_(-1), "impossible scale"),
        (lambda t: t["head.input_quantizer.scale"].fill_(0), "impossible scale"),
        (lambda t: t["head.input_quantizer.zero_point"].fill_(16), "impossible scale or zero-point"),
    ],
)
def test_forged_tensors_are_refused(artifact: Path, change: Callable[[dict[str, Tensor]], object], says: str) -> None:
    edit_tensors(artifact, change)
    with pytest.raises(ArtifactError, match=says):
        aphq.load(artifact)
