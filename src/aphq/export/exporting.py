"""The verb: build an export, hold it against the model, write it."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.artifact.info import architecture_behind, classifier_input, info_of
from aphq.artifact.loading import load
from aphq.data import load_calibration
from aphq.engine.folder import RunFolder
from aphq.errors import ExportError
from aphq.export.metadata import PREFIX, describe
from aphq.export.parity import Match, Parity, allowed_beside, compare_float64, compare_units, compare_whole
from aphq.export.registry import Draft, Options, exporter_named
from aphq.models.architecture import predict

PARITY_IMAGES = 32
UNIT_IMAGES = 8  # of them, for the slower comparison unit by unit


@dataclass(frozen=True)
class Exported:
    """What was written, and how well it matches."""

    path: Path
    files: tuple[Path, ...]
    parity: Parity
    forced: bool  # written although the gate refused it

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "files": {file.name: file.stat().st_size for file in self.files},
            "bytes": self.bytes,
            "parity": self.parity.to_dict(),
            "forced": self.forced,
        }

    def summary(self) -> str:
        note = "  written by force although it does not match" if self.forced else ""
        sizes = ", ".join(f"{file.name} {file.stat().st_size:,} bytes" for file in self.files)
        head = f"against the fake-quantized model on {self.parity.images} images:"
        return "\n".join([head, self.parity.text(), f"wrote {self.path.parent}: {sizes}{note}"])


def export(
    model: nn.Module | str | Path,
    to: str = "onnx",
    *,
    out: str | Path | None = None,
    data: Any = None,
    images: int = PARITY_IMAGES,
    batch: int | None = 1,
    tuned_for: str = "any",
    force: bool = False,
) -> Exported:
    """Write a quantized model as a file for another runtime, if it computes there what it does here.

    model: what `aphq.quantize` gave or `aphq.load` loaded, or the folder of a run.
    to: "onnx", "openvino" or "torch".
    out: the file; a run folder keeps it as model.onnx, model.xml or model.pt2 by itself.
    data: images to compare on, as for `aphq.quantize`; a run folder has some.
    images: how many of them, at least 1.
    batch: images per run of the file; None lets it vary, at some cost in OpenVINO.
    tuned_for: "any", or "onnxruntime" or "openvino" to shape the graph for one.
    force: write it even if it does not match; the numbers are in its metadata either way.
    """
    folder = None if isinstance(model, nn.Module) else Path(model)
    exporter, options = exporter_named(to), Options(batch, tuned_for)
    loaded = copy.deepcopy(model).cpu().eval() if isinstance(model, nn.Module) else load(model)
    path = _target(out, folder, exporter.suffix)
    seen = parity_images(loaded, data, folder, images)
    draft = exporter.draft(loaded, seen, options)
    parity = _compare(loaded, draft, seen)
    if not parity.passed and not force:
        raise ExportError(
            f"the export to {to} does not compute what the quantized model does, so it is not written "
            f"({_failures(parity)} on {parity.images} images); force it to look into it"
        )
    metadata = describe(loaded, draft.options)
    files = draft.write(path, {**metadata, f"{PREFIX}parity": json.dumps(parity.to_dict())})
    return Exported(path, tuple(files), parity, forced=not parity.passed)


@torch.no_grad()
def _compare(model: nn.Module, draft: Draft, images: Tensor) -> Parity:
    matches: dict[str, Match] = {}
    if draft.parts is not None:
        units = architecture_behind(model).units(model)
        matches |= compare_units(model, units, images[:UNIT_IMAGES], draft.parts)
    parts = images.split(UNIT_IMAGES)
    expected = torch.cat([predict(model, part) for part in parts])
    own = compare_float64(model, parts, expected)
    if own is not None:
        matches["in float64"] = own
    allowed = allowed_beside(own)
    for name, fused in draft.fused.items():
        matches[name] = compare_whole(expected, fused(images), allowed)
    return Parity(len(images), matches)


def parity_images(model: nn.Module, data: Any, folder: Path | None, count: int) -> Tensor:
    """Normalised images from `data`, or those that the run kept."""
    preprocessing = classifier_input(model)
    if count < 1:
        raise ExportError(f"an export is compared on at least 1 image; got {count}")
    if data is not None:
        info = info_of(model)
        assert info is not None
        return load_calibration(data, preprocessing, count=count, seed=info.recipe.seed).batch(slice(None))
    kept = None if folder is None else RunFolder.sample_in(folder)
    if kept is None:
        raise ExportError(
            "an export is compared with the quantized model on real images, and there are none: "
            "pass a folder of images (--data, or `data`)"
        )
    return preprocessing.normalise(kept[:count])


def _target(out: str | Path | None, folder: Path | None, suffix: str) -> Path:
    if out is not None:
        path = Path(out)
        return path if path.suffix == suffix else path.with_name(path.name + suffix)
    if folder is None:
        raise ExportError("say where to write the export: pass `out`")
    return folder / f"model{suffix}"


def _failures(parity: Parity) -> str:
    failed = {name: match for name, match in parity.matches.items() if not match.passed}
    return "; ".join(f"{name}: {match.text()}" for name, match in failed.items())
