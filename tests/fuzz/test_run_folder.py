"""Run folders of a stopped and of a finished run with one file damaged: refused, or the same artifact in the end."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import nn

import aphq
from aphq.engine.files import write_sealed
from aphq.engine.folder import RunFolder
from aphq.errors import ArtifactError
from aphq.report import write_report
from tests.runs import pixels, sha256, short, stopped_after

from .cases import cases
from .isolation import outcome_of
from .mutation import Spoiler

Build = Callable[..., nn.Module]
JSONS = ("run.json", "result.json", "measurements.json", "config.json")


def quantize(model: nn.Module, out: Path) -> aphq.Run:
    recipe = short("w4a4", "balanced", steps=2, scale_search__candidates=4, layernorm_reparameterisation__candidates=4)
    return aphq.quantize(model, recipe, pixels(), out=out, device="cpu")


class Case:
    """A stopped and a finished run to copy, the model, and what must come out."""

    def __init__(self, model: nn.Module, root: Path) -> None:
        self.model, self.root = model, root
        quantize(model, root / "finished")
        self.artifact = sha256(root / "finished" / "model.safetensors")
        with stopped_after("block_reconstruction", "blocks.1"):
            quantize(model, root / "stopped")

    def copy(self, which: str) -> Path:
        shutil.rmtree(self.root / "case", ignore_errors=True)
        shutil.copytree(self.root / which, self.root / "case")
        return self.root / "case"


@pytest.fixture(scope="module")
def case(vit: Build, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(vit(), tmp_path_factory.mktemp("runs"))


def one_checkpoint(spoiler: Spoiler, folder: Path) -> Path:
    return spoiler.one_of(sorted((folder / "checkpoints").rglob("*.safetensors")))


def go_on(case: Case, folder: Path) -> None:
    quantize(case.model, folder)
    assert sha256(folder / "model.safetensors") == case.artifact, "another artifact than without the damage"


@cases(0.03)
@given(data=st.data())
def test_a_damaged_checkpoint(case: Case, data: st.DataObject) -> None:
    spoiler, folder = Spoiler(data), case.copy("stopped")
    file = one_checkpoint(spoiler, folder)
    content = file.read_bytes()
    spoilt = spoiler.bytes(content) if spoiler.below(2) else spoiler.header(content)
    file.write_bytes(spoilt)
    outcome_of(lambda: go_on(case, folder), seconds=60)


@cases(0.03)
@given(data=st.data())
def test_a_forged_checkpoint(case: Case, data: st.DataObject) -> None:
    """Sealed again, so that only what it holds can tell: any model may come out, but nothing breaks."""
    spoiler, folder = Spoiler(data), case.copy("stopped")
    file = one_checkpoint(spoiler, folder)
    write_sealed(file, spoiler.tensors(file.read_bytes()) if load(file.read_bytes()) else {})
    outcome_of(lambda: quantize(case.model, folder), seconds=60)


@cases(0.04)
@given(data=st.data())
def test_a_damaged_record_of_a_finished_run(case: Case, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    folder = case.copy("finished")
    name = spoiler.one_of((*JSONS, "events.jsonl", "sample.safetensors"))
    file = folder / name
    if name in JSONS and spoiler.below(4):
        file.write_bytes(spoiler.json_text(file.read_text()).encode("utf-8", "surrogatepass"))
    elif name == "events.jsonl" and spoiler.below(4):
        lines = file.read_text().splitlines()
        at = spoiler.below(len(lines))
        lines[at] = spoiler.json_text(lines[at])
        file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    else:
        file.write_bytes(spoiler.bytes(file.read_bytes()))
    outcome_of(lambda: RunFolder.sample_in(folder))
    outcome_of(lambda: write_report([folder]))
    outcome_of(lambda: go_on(case, folder))


def test_a_flipped_bit_in_a_checkpoint_is_noticed(case: Case) -> None:
    folder = case.copy("stopped")
    file = folder / "checkpoints" / "scale_search" / "blocks.0.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    done = outcome_of(lambda: go_on(case, folder))
    assert "blocks.0.safetensors is damaged (its contents do not have the hash" in done.message


def test_a_record_gone_wrong_does_not_cost_the_model(case: Case) -> None:
    folder = case.copy("finished")
    (folder / "result.json").write_text('{"seconds": [1], "accuracy": 3}')
    assert outcome_of(lambda: go_on(case, folder)).kind == "loaded"
    (folder / "config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"config.json is damaged"):
        quantize(case.model, folder)
