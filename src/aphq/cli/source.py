"""Where a run's float weights came from, so that `aphq predict` can show them beside the quantized ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from aphq.artifact.info import QuantizationInfo
from aphq.engine.files import write_json
from aphq.errors import ModelError
from aphq.models.architecture import architecture_named, find_architecture
from aphq.models.detection.family import DetectionArchitecture
from aphq.models.loading import load_model, model_fingerprint

SOURCE = "source.json"


def remember_source(run: Path, name: str, model: nn.Module, weights: Path | None, arguments: dict[str, Any]) -> None:
    """For a detector whose weights come from a file and whose predictions can be drawn."""
    if weights is not None and isinstance(find_architecture(model), DetectionArchitecture):
        write_json(run / SOURCE, {"model": name, "weights": str(weights.resolve()), "arguments": arguments})


def float_model(run: Path, info: QuantizationInfo, weights: Path | None) -> nn.Module | None:
    """The detector that the run started from: from `weights`, or from where it was, None if it is gone or changed."""
    family = architecture_named(info.family)
    if weights is not None:
        assert isinstance(family, DetectionArchitecture)
        model = family.from_file(info.arguments, weights)
        if not _is_that(model, info):
            raise ModelError(f"{weights} does not hold the weights that {run} was quantized from")
        return model
    try:
        source = json.loads((run / SOURCE).read_text(encoding="utf-8"))
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in source["arguments"].items()}
        model = load_model(source["model"], source["weights"], **arguments)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ModelError):
        return None
    return model if _is_that(model, info) else None


def _is_that(model: nn.Module, info: QuantizationInfo) -> bool:
    return model_fingerprint(model, architecture_named(info.family)) == info.float_sha256
