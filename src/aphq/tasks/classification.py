"""Classifiers: images of one size in batches, logits, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from aphq.data import CalibrationSet, Labelled, Preprocessing, as_labelled, load_calibration
from aphq.data.labelled import LabelledImages
from aphq.errors import DataError
from aphq.evaluation import classification
from aphq.evaluation.classification import Accuracy
from aphq.models.architecture import Unit, architecture_of, check_units, find_architecture, predict
from aphq.models.distillation import LOGITS, Distillation
from aphq.recipe import Recipe
from aphq.tasks.task import Measured, Task


class Classification(Task):
    distillation: ClassVar[Distillation] = LOGITS

    def adapt(self, recipe: Recipe) -> Recipe:
        return recipe

    def preprocessing_of(self, model: nn.Module) -> Preprocessing:
        return architecture_of(model).preprocessing(model)

    def preprocessing_from(self, data: Mapping[str, Any]) -> Preprocessing:
        return Preprocessing.from_dict(data)

    def check(
        self, teacher: nn.Module, units: Sequence[Unit], preprocessing: Preprocessing, device: torch.device
    ) -> None:
        check_units(teacher, units, probe_images(preprocessing, device))

    def labelled(self, val: Any, model: nn.Module) -> Labelled:
        return as_labelled(val, class_count(model))

    def images(
        self, data: Any, preprocessing: Preprocessing, recipe: Recipe, report: Callable[[int, int], None]
    ) -> CalibrationSet:
        settings = recipe.calibration
        return load_calibration(
            data,
            preprocessing,
            count=settings.images,
            seed=recipe.seed,
            augment=settings.augment,
            whole=recipe.wants_views,
            progress=report,
        )

    def keep_apart(self, images: Any, labelled: Labelled) -> None:
        """Files of the same name are compared by their bytes."""
        if images.files is None or not isinstance(labelled, LabelledImages):
            return
        ours, theirs = ([PurePath(name).name for name in files.names] for files in (images.files, labelled.files))
        common = set(ours) & set(theirs)
        measured = {labelled.files.digest(i) for i, name in enumerate(theirs) if name in common} - {None}
        for i, name in enumerate(ours):
            if name in common and images.files.digest(i) in measured:
                raise DataError(
                    f"the calibration image '{images.files.names[i]}' is one that is measured on: calibrate on others"
                )

    @torch.no_grad()
    def outputs(
        self, model: nn.Module, units: Sequence[Unit], preprocessing: Preprocessing, device: torch.device
    ) -> dict[str, Tensor]:
        return {"logits": predict(model, probe_images(preprocessing, device))}

    def measure(
        self,
        models: Mapping[str, nn.Module],
        data: Labelled,
        preprocessing: Preprocessing,
        *,
        device: torch.device,
        limit: int | None,
        progress: Callable[[int], None] | None,
        batch: int = 50,
        keep: Callable[[Any], None] | None = None,
    ) -> Measured:
        found = classification.compare(
            models, data, preprocessing, device=device, limit=limit, progress=progress, batch=batch
        )
        return Measured(dict(found.accuracy), found.agreement.get("quantized"))

    def recall(self, accuracy: Mapping[str, Any]) -> Accuracy:
        return Accuracy(**accuracy)


def class_count(model: nn.Module) -> int:
    """Of a model of any library, or an exported file."""
    said = getattr(model, "num_classes", None)
    if said:
        return int(said)
    family = find_architecture(model) or architecture_of(model)  # a quantized one's ReLUs would not pass the check
    return family.num_classes(model)


def probe_images(preprocessing: Preprocessing, device: torch.device) -> Tensor:
    return torch.randn(2, *preprocessing.shape, generator=torch.Generator().manual_seed(0)).to(device)
