"""The gate, the files it lets through, and what runs them."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import aphq
from aphq.errors import DataError, ExportError, RunError, RuntimeMissingError
from aphq.export import export, onnx_file, openvino_file, sites
from aphq.export.metadata import preprocessing_from
from aphq.export.parity import Match, allowed_beside, compare_whole
from aphq.runtimes.session import open_exported

from ..models.variants import family
from ..runs import pixels
from .exports import calibrated, normalised, relative, small_run

onnx = pytest.importorskip("onnx")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run().export("onnx", out=tmp_path_factory.mktemp("exported") / "model").path


def test_an_export_is_compared_and_written(tmp_path: Path) -> None:
    found = small_run().export("onnx", out=tmp_path / "small.onnx")
    assert found.path == tmp_path / "small.onnx"
    assert found.bytes == found.path.stat().st_size
    assert not found.forced
    assert set(found.parity.matches) >= {"reference", "in float64", "onnxruntime"}
    assert found.parity.passed
    assert found.parity.images == 16
    assert all(word in found.summary() for word in ("reference", "onnxruntime", "agreement", "small.onnx"))
    assert json.dumps(found.to_dict())


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_the_file_runs_and_knows_its_images(file: Path, runtime: str) -> None:
    pytest.importorskip(runtime)
    run, model = small_run(), open_exported(file, runtime, threads=1)
    images = normalised(run.model, 5)
    assert relative(model(images), run.model(images)) < 0.05
    assert model.num_classes == 10
    assert run.images is not None
    assert model.preprocessing == run.images.preprocessing
    parity = json.loads(model.metadata["aphq.parity"])
    assert parity["passed"]
    assert model.metadata["aphq.recipe"] == "w8a8-fast"
    with pytest.raises(ExportError, match=r"images of shape \[batch, 3, 32, 32\], got \[5, 3, 16, 16\]"):
        model(images[:, :, :16, :16])


@pytest.mark.parametrize("batch", [2, None])
def test_other_batches(tmp_path: Path, batch: int | None) -> None:
    run = small_run()
    path = run.export("onnx", out=tmp_path / "model", batch=batch).path
    images = normalised(run.model, 5)  # not a multiple of two
    for runtime in ("onnxruntime", "openvino"):
        pytest.importorskip(runtime)
        assert relative(open_exported(path, runtime)(images), run.model(images)) < 0.05


def test_openvino_files(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    run = small_run()
    found = run.export("openvino", out=tmp_path / "model")
    assert sorted(file.name for file in found.files) == ["model.bin", "model.xml"]
    assert found.parity.matches["openvino"].error < 1e-3
    images = normalised(run.model, 3)
    model = open_exported(found.path, "openvino")
    assert relative(model(images), run.model(images)) < 1e-3
    assert preprocessing_from(model.metadata, "").size == (32, 32)
    assert model.metadata["aphq.tuned_for"] == "openvino"  # what it was made for, although nobody asked
    with pytest.raises(ExportError, match="ONNX Runtime cannot run"):
        open_exported(found.path, "onnxruntime")


def test_a_graph_that_openvino_cannot_read_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setattr(openvino_file, "build", lambda *_: onnx.ModelProto())
    with pytest.raises(ExportError, match="OpenVINO cannot load the exported graph"):
        small_run().export("openvino", out=tmp_path / "model")


def test_what_torch_cannot_record_is_explained(tmp_path: Path) -> None:
    model: Any = copy.deepcopy(small_run().model)
    model.norm.register_forward_hook(lambda _, __, out: out if float(out.sum()) > 0 else -out)
    with pytest.raises(ExportError, match=r"cannot record the forward pass of this VisionTransformer: ."):
        export(model, "torch", out=tmp_path / "model", data=pixels(4))


def embedding_file(tmp_path: Path) -> Path:
    return export(calibrated(family("timm vit, embedding")), out=tmp_path / "embed", data=pixels(4)).path


def test_an_exported_embedding_has_no_accuracy(tmp_path: Path) -> None:
    file = embedding_file(tmp_path)
    with pytest.raises(DataError, match=r"has no classifier: .*leave out the labelled images"):
        aphq.evaluate(file, (pixels(4), torch.zeros(4, dtype=torch.long)))


@pytest.mark.parametrize("task", [None, "segmentation"])
def test_files_of_other_versions(file: Path, tmp_path: Path, task: str | None) -> None:
    """One that does not say what it is for is a classifier; one that says something unknown is refused."""
    proto = onnx.load(file)
    (entry,) = (entry for entry in proto.metadata_props if entry.key == "aphq.task")
    proto.metadata_props.remove(entry)
    if task is not None:
        proto.metadata_props.add(key="aphq.task", value=task)
    onnx.save(proto, tmp_path / "other.onnx")
    if task is not None:
        with pytest.raises(ExportError, match=r"other\.onnx is for 'segmentation', which this version does not know"):
            open_exported(tmp_path / "other.onnx")
    else:
        assert aphq.evaluate(tmp_path / "other.onnx", (pixels(4), torch.zeros(4, dtype=torch.long))).images == 4


@pytest.mark.parametrize("batch", [1, None])
def test_torch_programs(tmp_path: Path, batch: int | None) -> None:
    run = small_run()
    found = run.export("torch", out=tmp_path / "model", batch=batch)
    extra = {"aphq.preprocessing": ""}
    program = torch.export.load(found.path, extra_files=extra)
    images = normalised(run.model, batch or 3)
    assert relative(program.module()(images), run.model(images)) < 1e-4
    assert json.loads(extra["aphq.preprocessing"])["size"] == [32, 32]
    kinds = {tensor.dtype for tensor in program.state_dict.values() if tensor.ndim == 2}
    assert torch.int8 in kinds
    with pytest.raises(ExportError, match="cannot be tuned"):
        run.export("torch", out=tmp_path / "model", tuned_for="openvino")


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are a fifth too large in one layer."""
    run, original = small_run(), sites.weight_format

    def off(layer: Any) -> Any:
        from dataclasses import replace

        found, wrong = original(layer), run.model.get_parameter("blocks.1.mlp.fc1.weight")
        return replace(found, scale=found.scale * 1.2) if torch.equal(layer.weight, wrong) else found

    monkeypatch.setattr(sites, "weight_format", off)
    with pytest.raises(ExportError, match=r"not written \(reference: error .* in blocks.1: FAILED"):
        run.export("onnx", out=tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    found = run.export("onnx", out=tmp_path / "model.onnx", force=True)
    assert found.forced
    kept = json.loads(open_exported(found.path).metadata["aphq.parity"])
    assert not kept["passed"]
    assert kept["reference"]["where"] == "blocks.1"
    assert "by force" in found.summary()


def test_a_runtime_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth too much in every unit, which a whole model that is allowed to differ might hide."""
    original = onnx_file.fused

    def off(content: bytes, batch: int | None) -> Any:
        found = original(content, batch)
        return {**found, "onnxruntime": lambda x: 1.1 * found["onnxruntime"](x)}

    monkeypatch.setattr(onnx_file, "fused", off)
    with pytest.raises(ExportError, match=r"not written \(onnxruntime, by unit: error .* in .*: FAILED"):
        small_run().export("onnx", out=tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_model_that_amplifies_rounding_may_differ_more_but_not_arbitrarily() -> None:
    logits = torch.randn(8, 10, generator=torch.Generator().manual_seed(0))
    calm, wild = (allowed_beside(Match(0.0, math.inf, worst=w)) for w in (0.1, 5.0))  # of the median image: both 0
    assert compare_whole(logits, 1.15 * logits, calm).passed
    assert not compare_whole(logits, 1.3 * logits, calm).passed
    assert compare_whole(logits, 1.7 * logits, wild).passed
    assert not compare_whole(logits, -logits, wild).passed
    assert allowed_beside(None) == calm  # what is not known excuses nothing


@pytest.mark.parametrize(
    ("message", "means_float32"),
    [
        ("expected scalar type Double but found Float", True),
        ("mat1 and mat2 must have the same dtype, but got Double and Float", True),
        ("Input type (double) and bias type (float) should be the same", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("The size of tensor a (4) must match the size of tensor b (5)", False),
    ],
)
def test_only_a_model_that_insists_on_float32_is_spared_float64(
    tmp_path: Path, message: str, means_float32: bool
) -> None:
    model: Any = copy.deepcopy(small_run().model)

    def refuse(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].dtype == torch.float64:
            raise RuntimeError(message)

    model.norm.register_forward_pre_hook(refuse)
    if means_float32:
        parity = export(model, "torch", out=tmp_path / "model", data=pixels(4)).parity
        assert "in float64" not in parity.matches
        assert parity.matches["torch"].allowed == 0.2
    else:
        with pytest.raises(RuntimeError, match=re.escape(message)):
            export(model, "torch", out=tmp_path / "model", data=pixels(4))


def test_a_run_folder_has_its_own_images(tmp_path: Path, tiny_vit: Any) -> None:
    from ..runs import short

    out = tmp_path / "run"
    aphq.quantize(tiny_vit, short("w4a4", "fast"), pixels(), out=out, device="cpu")
    found = export(out, "onnx")
    assert found.path == out / "model.onnx"
    assert found.parity.images == 16
    (out / "sample.safetensors").unlink()
    with pytest.raises(ExportError, match="there are none: pass a folder of images"):
        export(out, "onnx")
    assert export(out, "onnx", data=pixels(4)).parity.images == 4
    (out / "sample.safetensors").write_bytes(b"nonsense")
    with pytest.raises(RunError, match=r"sample\.safetensors is damaged"):
        export(out, "onnx")


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_damaged_file_is_named(file: Path, tmp_path: Path, content: bytes | None, runtime: str) -> None:
    pytest.importorskip(runtime)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(file.read_bytes()[:5000] if content is None else content)
    with pytest.raises(ExportError, match=r"broken\.onnx"):
        open_exported(broken, runtime)


def test_somebody_elses_file_is_named(file: Path, tmp_path: Path) -> None:
    proto = onnx.load(file)
    del proto.metadata_props[:]
    onnx.save(proto, tmp_path / "other.onnx")
    for runtime in ("onnxruntime", "openvino"):
        pytest.importorskip(runtime)
        with pytest.raises(ExportError, match="was not exported by aphq"):
            open_exported(tmp_path / "other.onnx", runtime)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"to": "onx"}, "cannot export to 'onx'.*onnx"),
        ({"tuned_for": "openvin"}, "cannot tune for 'openvin'.*openvino"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"images": 0}, "at least 1 image; got 0"),
        ({"images": -3}, "at least 1 image; got -3"),
    ],
)
def test_wrong_words_are_explained(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError, match=words):
        small_run().export(**{"to": "onnx", "out": tmp_path / "model", **arguments})
    with pytest.raises(ExportError, match="there is no file"):
        open_exported(tmp_path / "none.onnx")
    (tmp_path / "x.onnx").touch()
    with pytest.raises(ExportError, match=r"no runtime 'tensorrt'"):
        open_exported(tmp_path / "x.onnx", "tensorrt")


def test_a_float_model_is_not_exported(tiny_vit: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="was not quantized by aphq"):
        export(tiny_vit, "onnx", out=tmp_path / "x.onnx", data=pixels(4))
    with pytest.raises(ExportError, match="say where to write"):
        export(small_run().model, "onnx", data=pixels(4))


@pytest.mark.parametrize("library", ["onnx", "onnxruntime", "openvino"])
def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, file: Path
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, library, None)
    extra = "openvino" if library == "openvino" else "onnx"
    message = rf"{library} .*pip install 'aphq\[{extra}\]'"
    if library != "openvino":
        with pytest.raises(RuntimeMissingError, match=message):
            small_run().export("onnx", out=tmp_path / "model")
    if library != "onnx":
        with pytest.raises(RuntimeMissingError, match=message):
            open_exported(file, library)
