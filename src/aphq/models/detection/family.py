"""What every family of detectors says besides its units: how it looks at a scene, and which regions a teacher has."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from aphq.data.scenes import ScenePreprocessing
from aphq.errors import ModelError
from aphq.models.architecture import Architecture, State, find_architecture
from aphq.models.detection.detector import Detections, Size


class DetectionArchitecture(Architecture):
    """The adapter of a family of detectors. Its chain starts from `image` and the regions that `regions_of` gives, and
    ends with what `DetectionDistillation` compares."""

    task = "detection"
    numbered_by_id: ClassVar[bool] = False  # class i is the category with id i + 1, where there are gaps between ids

    @abstractmethod
    def scenes(self, model: nn.Module) -> ScenePreprocessing:
        """How the model wants its images."""

    @abstractmethod
    def stages(self, model: nn.Module) -> int:
        """Box heads in a row, each with its own regions."""

    def has_masks(self, model: nn.Module) -> bool:
        """Whether it outlines what it finds."""
        return True

    @abstractmethod
    def regions_of(self, teacher: nn.Module, image: Tensor, size: Size) -> State:
        """`regions.s` [n, 4] for each box head s; where there are masks, `regions.mask` [k, 4] and `labels` [k], as the
        mask heads count classes."""

    @abstractmethod
    def detect(self, model: nn.Module, image: Tensor, size: Size, original: Size) -> Detections:
        """What is found in a normalised image [1, 3, h, w], whose part of `size` was resized from `original`; labels
        count from 0, without the background."""

    @abstractmethod
    def from_file(self, description: dict[str, Any], weights: Path) -> nn.Module:
        """The model of a description with the weights of a file."""


def family_of(model: nn.Module) -> DetectionArchitecture:
    """The adapter of a detector, float or quantized."""
    found = find_architecture(model)
    if not isinstance(found, DetectionArchitecture):
        raise ModelError(f"a {type(model).__name__} is not a detector")
    return found
