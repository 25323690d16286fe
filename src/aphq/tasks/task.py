"""All that differs between classification and detection outside the models; the stages are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aphq.engine.progress import Progress
from aphq.engine.workspace import Images
from aphq.models.architecture import Unit
from aphq.models.distillation import Distillation
from aphq.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """Accuracies by the models' names, and the share of equal predictions in per cent where that means something."""

    accuracy: dict[str, Any]
    agreement: float | None = None


class Task(ABC):
    """The methods in the order in which a run needs them."""

    distillation: ClassVar[Distillation]

    @abstractmethod
    def adapt(self, recipe: Recipe) -> Recipe:
        """The recipe as this task can run it."""

    @abstractmethod
    def preprocessing_of(self, model: nn.Module) -> Any:
        """What the model expects of its input."""

    @abstractmethod
    def preprocessing_from(self, data: Mapping[str, Any]) -> Any:
        """The same, from an artifact."""

    @abstractmethod
    def check(self, teacher: nn.Module, units: Sequence[Unit], preprocessing: Any, device: torch.device) -> None:
        """ModelError unless the chain of units is the model and its output is finite."""

    @abstractmethod
    def labelled(self, val: Any, model: nn.Module) -> Any:
        """Annotated images to measure on, checked against the model."""

    @abstractmethod
    def images(self, data: Any, preprocessing: Any, recipe: Recipe, report: Callable[[int, int], None]) -> Images:
        """The calibration images."""

    def keep_apart(self, images: Images, labelled: Any) -> None:
        """DataError if the calibration images are known to be among those that are measured on."""
        return

    def prepare(self, images: Images, teacher: nn.Module, device: torch.device, progress: Progress) -> Images:
        """The images with what the teacher alone can tell about them."""
        return images

    @abstractmethod
    def outputs(
        self, model: nn.Module, units: Sequence[Unit], preprocessing: Any, device: torch.device
    ) -> dict[str, Tensor]:
        """What a model says about a fixed random image, to tell whether two models are the same."""

    @abstractmethod
    def measure(
        self,
        models: Mapping[str, nn.Module],
        data: Any,
        preprocessing: Any,
        *,
        device: torch.device,
        limit: int | None,
        progress: Callable[[int], None] | None,
        batch: int = 50,
        keep: Callable[[Any], None] | None = None,
    ) -> Measured:
        """Accuracy on annotated images; `keep` gets what is found in them, where that is more than a class."""

    @abstractmethod
    def recall(self, accuracy: Mapping[str, Any]) -> Any:
        """An accuracy, from its plain values."""
