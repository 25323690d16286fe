"""What an artifact says about its model besides the tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from aphq.data.preprocessing import Preprocessing
from aphq.data.scenes import ScenePreprocessing
from aphq.errors import ExportError
from aphq.models.architecture import Architecture, architecture_named, architecture_of
from aphq.recipe import Recipe

ATTRIBUTE = "quantization"


@dataclass(frozen=True)
class QuantizationInfo:
    """Enough to build the model again and to feed it."""

    family: str  # of the architecture
    arguments: dict[str, Any]  # of the float model's constructor
    relu: tuple[str, ...]  # MLPs whose activation became ReLU
    recipe: Recipe
    preprocessing: Preprocessing | ScenePreprocessing
    float_sha256: str
    float_parameters: int


def attach(model: nn.Module, info: QuantizationInfo) -> None:
    setattr(model, ATTRIBUTE, info)


def info_of(model: nn.Module) -> QuantizationInfo | None:
    """The info of a quantized model, None for any other module."""
    return getattr(model, ATTRIBUTE, None)


def architecture_behind(model: nn.Module) -> Architecture:
    """The adapter of a float model, which is checked, or of a quantized one, whose ReLUs would not pass that check."""
    info = info_of(model)
    return architecture_of(model) if info is None else architecture_named(info.family)


def classifier_input(model: nn.Module) -> Preprocessing:
    """The images that a quantized classifier takes; detectors cannot leave PyTorch yet."""
    info = info_of(model)
    if info is None:
        raise ExportError(f"this {type(model).__name__} was not quantized by aphq; export what aphq.quantize gave")
    if not isinstance(info.preprocessing, Preprocessing):
        raise ExportError(f"only classifiers can be exported and timed; this is a {info.family}")
    return info.preprocessing
