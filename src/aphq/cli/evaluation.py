"""`aphq eval`: options that do not apply to what is measured are refused, not ignored."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from aphq.errors import DataError, ExportError, RecipeError
from aphq.runtimes.session import SUFFIXES, ExportedModel
from aphq.tasks import Task
from aphq.tasks.detection import Detection


def check_source(path: Path) -> None:
    """A file that is neither a run folder nor an exported model that a runtime here reads."""
    if path.suffix == ".pt2" and not path.is_dir():
        raise ExportError(
            f"{path} is a torch.export program, which torch.export.load(...).module() runs; eval takes run folders and "
            ".onnx and .xml files"
        )
    if path.is_file() and path.suffix not in SUFFIXES:
        raise ExportError(f"cannot measure {path}: eval takes run folders and .onnx and .xml files")


def check_options(path: Path, model: nn.Module, task: Task, *, device: str, detections: Path | None) -> None:
    if detections is not None and not isinstance(task, Detection):
        raise DataError(f"--detections is for detectors, and {path} holds none")
    if isinstance(model, ExportedModel) and device not in ("auto", "cpu"):
        raise RecipeError(f"{path} runs on the CPU: --device {device} is for run folders")
