"""What `aphq bench` measures with."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import aphq
from aphq.bench import bench, float_model, race
from aphq.errors import ExportError
from aphq.export.metadata import describe
from aphq.export.registry import Options

from .export.exports import calibrated, normalised, small_run


def test_models_take_turns() -> None:
    order: list[str] = []
    times = race([lambda: order.append("a"), lambda: (order.append("b"), time.sleep(0.002))], 0.03)
    assert order[-4:] == ["a", "b", "a", "b"]
    (_, fast), (slow, _) = times
    assert len(fast) == len(slow)
    assert min(slow) > 0.002


def test_the_float_model_has_its_own_activations_again(tiny_vit: nn.Module) -> None:
    from .runs import pixels, short

    recipe = short("w4a4", "balanced").without("block_reconstruction")
    model = aphq.quantize(tiny_vit, recipe, pixels(), device="cpu").model
    assert isinstance(model.get_submodule("blocks.0.mlp.act"), nn.ReLU)
    found = float_model(model)
    assert isinstance(found.get_submodule("blocks.0.mlp.act"), nn.GELU)
    assert isinstance(model.get_submodule("blocks.0.mlp.act"), nn.ReLU)


def test_float_means_float(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit, "w2a2")
    images = normalised(model, 4)
    assert not torch.allclose(float_model(model)(images), model(images), atol=1e-2)


def test_memory_is_that_of_the_model(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    aphq.save(small_run().model, tmp_path)
    (row,) = bench(tmp_path, runtimes=["pytorch"], seconds=0.05)
    assert row.memory_bytes is not None
    assert 0 <= row.memory_bytes < 2**28
    assert row.bytes == (tmp_path / "model.safetensors").stat().st_size
    assert row.speedup is None


def test_the_threads_of_torch_are_given_back(tmp_path: Path) -> None:
    aphq.save(small_run().model, tmp_path)
    before = torch.get_num_threads()
    bench(tmp_path, runtimes=["pytorch"], seconds=0.01, memory=False, threads=before + 1)
    assert torch.get_num_threads() == before


def test_without_onnx_pytorch_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aphq.save(small_run().model, tmp_path)
    monkeypatch.setattr("aphq.bench.installed", lambda library: library != "onnx")
    assert [row.runtime for row in bench(tmp_path, seconds=0.01, memory=False)] == ["pytorch"]


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="at least 1"):
        bench(tmp_path, threads=0)


def test_metadata_needs_a_quantized_model(tiny_vit: nn.Module) -> None:
    with pytest.raises(ExportError, match="was not quantized"):
        describe(tiny_vit, Options())
