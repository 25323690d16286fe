"""`aphq.load` of folders whose configuration or tensors were damaged or forged, with their hash made to fit."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import aphq
from aphq.artifact.info import info_of
from aphq.artifact.saving import file_sha256
from tests.runs import pixels, short

from .cases import cases
from .isolation import outcome_of
from .mutation import Spoiler

Build = Callable[..., nn.Module]
Files = dict[str, bytes]


@pytest.fixture(scope="module")
def artifacts(vit: Build, swin: Build, tmp_path_factory: pytest.TempPathFactory) -> list[Files]:
    """The files of two saved models: one with sizes in its tensors, one with sizes in its masks alone."""
    found = []
    for build in (vit, swin):
        folder = tmp_path_factory.mktemp("artifact")
        aphq.save(aphq.quantize(build(), short("w4a4", "fast"), pixels(), device="cpu").model, folder)
        found.append({name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")})
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where every case is written."""
    return tmp_path_factory.mktemp("case")


def load_and_use(folder: Path) -> None:
    """A correct load takes the images it says it takes, and gives finite numbers."""
    model = aphq.load(folder)
    info = info_of(model)
    assert info is not None
    with torch.no_grad():
        logits = model(torch.zeros(1, *info.preprocessing.shape))  # type: ignore[union-attr]
    assert logits.shape == (1, model.num_classes)


@cases(0.25)
@given(data=st.data())
def test_config(artifacts: list[Files], folder: Path, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    files = spoiler.one_of(artifacts)
    config = spoiler.json_text(files["config.json"].decode()).encode("utf-8", "surrogatepass")
    if spoiler.below(10) == 0:
        config = spoiler.bytes(config)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(files["model.safetensors"])
    outcome_of(lambda: load_and_use(folder))


@cases(0.15)
@given(data=st.data())
def test_tensors(artifacts: list[Files], folder: Path, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    files = spoiler.one_of(artifacts)
    (folder / "model.safetensors").write_bytes(spoiler.safetensors(files["model.safetensors"]))
    config = json.loads(files["config.json"])
    config["file"]["sha256"] = file_sha256(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    outcome_of(lambda: load_and_use(folder))


@pytest.mark.parametrize(
    "change",
    [
        {"img_size": [100_000, 100_000]},
        {"img_size": [2**20, 2**20], "window_size": [[2**10, 2**10]] * 2},
        {"depths": [1] * 100_000},
        {"depths": [10**9, 2]},
        {"embed_dim": 2**40},
    ],
)
def test_a_forged_swin_is_refused_before_anything_is_allocated(
    artifacts: list[Files], folder: Path, change: dict[str, object]
) -> None:
    config = json.loads(artifacts[1]["config.json"])
    config["architecture"]["arguments"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(artifacts[1]["model.safetensors"])
    assert outcome_of(lambda: aphq.load(folder), seconds=10, most=256 * 2**20).kind == "refused"
