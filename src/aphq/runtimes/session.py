"""An exported file as a module: images in, logits or embeddings out, whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from aphq.errors import ExportError
from aphq.export.metadata import batch_from, classes_from, preprocessing_from, task_from
from aphq.runtimes.batches import Infer, in_batches
from aphq.typed import nearest

RUNTIMES = ("onnxruntime", "openvino")
SUFFIXES = {".onnx": "onnxruntime", ".xml": "openvino"}  # of exported files, and what runs them unless told otherwise


class ExportedModel(nn.Module):
    """Looks like the quantized model to whatever evaluates it."""

    def __init__(self, infer: Infer, metadata: Mapping[str, str], where: str) -> None:
        super().__init__()
        self.infer, self.metadata = infer, dict(metadata)
        self.task = task_from(metadata, where)
        self.num_classes = classes_from(metadata, where)
        self.preprocessing = preprocessing_from(metadata, where)
        self.batch = batch_from(metadata, where)

    def forward(self, images: Tensor) -> Tensor:
        wanted = self.preprocessing.shape
        if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
            shape = ", ".join(map(str, wanted))
            raise ExportError(f"the file takes images of shape [batch, {shape}], got {list(images.shape)}")
        return in_batches(self.infer, images, self.batch)


def open_exported(path: str | Path, runtime: str = "onnxruntime", threads: int | None = None) -> ExportedModel:
    """A .onnx or .xml file, ready to run; ONNX Runtime knows only .onnx."""
    file = Path(path)
    if not file.is_file():
        raise ExportError(f"there is no file {file}")
    if runtime not in RUNTIMES:
        raise ExportError(f"there is no runtime {runtime!r} for exported files: {nearest(runtime, RUNTIMES)}")
    if runtime == "onnxruntime" and file.suffix != ".onnx":
        raise ExportError(f"ONNX Runtime cannot run {file}: give a .onnx file, or --runtime openvino")
    infer, metadata = open_session(file, runtime, threads)
    return ExportedModel(infer, metadata, str(file))


def open_session(file: Path, runtime: str, threads: int | None) -> tuple[Infer, dict[str, str]]:
    """(function from images to logits, metadata)"""
    from aphq.runtimes import onnxruntime, openvino

    if runtime == "onnxruntime":
        return onnxruntime.open_session(file, threads)
    return openvino.open_session(file, threads)
