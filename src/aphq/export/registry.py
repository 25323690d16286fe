"""Exporters by name: what `--to` may say. One file each, found here, so that another is one file more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from aphq.errors import ExportError
from aphq.export.sites import STYLES
from aphq.models.architecture import Step
from aphq.typed import nearest


@dataclass(frozen=True)
class Options:
    """How a file is made."""

    batch: int | None = 1  # images per run; None lets it vary
    tuned_for: str = "any"  # the runtime the graph is shaped for

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ExportError(f"the batch must be at least 1, or None for any size; got {self.batch}")
        if self.tuned_for not in STYLES:
            raise ExportError(f"cannot tune for {self.tuned_for!r}: {nearest(self.tuned_for, STYLES)}")


Predict = Callable[[Tensor], Tensor]  # normalised images -> logits
REFERENCE = "reference"  # the way to run a graph operator by operator, as it stands


@dataclass(frozen=True)
class Draft:
    """An export that has not been written yet, and the ways to run it."""

    options: Options  # as it was made
    fused: dict[str, Predict]  # the whole model, by runtime
    write: Callable[[Path, dict[str, str]], list[Path]]  # (path, metadata) -> the files written
    parts: Callable[[Step, Tensor], dict[str, Predict]] | None = None  # (step, sample) -> that step alone, by each way


class Exporter(Protocol):
    suffix: str

    def draft(self, model: nn.Module, images: Tensor, options: Options) -> Draft:
        """Build the export for images of this shape."""


_EXPORTERS: dict[str, Callable[[], Exporter]] = {}


def register(name: str) -> Callable[[type[Any]], type[Any]]:
    """Class decorator: make an exporter known as `--to name`."""

    def keep(cls: type[Any]) -> type[Any]:
        _EXPORTERS[name] = cls
        return cls

    return keep


def exporter_named(name: str) -> Exporter:
    from aphq.export import onnx_file, openvino_file, torch_file  # noqa: F401 - importing them registers them

    if name not in _EXPORTERS:
        raise ExportError(f"cannot export to {name!r}: {nearest(name, _EXPORTERS)}")
    return _EXPORTERS[name]()
