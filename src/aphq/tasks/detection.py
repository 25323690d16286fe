"""Detectors: images of any size one by one, regions of the teacher, box and mask AP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.data.coco import CocoData, open_coco
from aphq.data.scene_set import SceneSet, load_scenes
from aphq.data.scenes import ScenePreprocessing
from aphq.engine.progress import Progress
from aphq.errors import DataError, ModelError
from aphq.evaluation import coco
from aphq.models.architecture import Unit, run_units
from aphq.models.detection.distillation import DETECTIONS
from aphq.models.detection.family import family_of
from aphq.recipe import BlockReconstruction, JointTuning, MlpReconstruction, Recipe, ScaleSearch, Stage, Views
from aphq.tasks.task import Measured, Task

log = logging.getLogger(__name__)
MOST_IMAGES = 256  # a scene holds as many pixels as twenty crops for a classifier
MLP_IMAGES = 8  # per step
OUTLIER_IMAGES = 4
PROBE = (96, 128)  # height and width of the image that checks are made with, or the next multiples of the divisor


class Detection(Task):
    distillation = DETECTIONS

    def adapt(self, recipe: Recipe) -> Recipe:
        """One image at a time wherever places matter, because sizes differ, and whole, because objects must stay in the
        picture."""
        calibration = replace(
            recipe.calibration, images=min(recipe.calibration.images, MOST_IMAGES), batch=1, augment=False
        )
        adapted = replace(recipe, calibration=calibration, stages=tuple(_one_by_one(stage) for stage in recipe.stages))
        if adapted != recipe:
            log.info("detectors take whole images one by one: %d of them, batches of 1", calibration.images)
        return adapted

    def preprocessing_of(self, model: nn.Module) -> ScenePreprocessing:
        return family_of(model).scenes(model)

    def preprocessing_from(self, data: Mapping[str, Any]) -> ScenePreprocessing:
        return ScenePreprocessing.from_dict(data)

    def check(self, teacher: nn.Module, units: Sequence[Unit], preprocessing: Any, device: torch.device) -> None:
        if not isinstance(preprocessing, ScenePreprocessing):
            raise DataError(
                f"a detector's images are prepared by ScenePreprocessing, not {type(preprocessing).__name__}"
            )
        for name, x in self.outputs(teacher, units, preprocessing, device).items():
            if not torch.isfinite(x).all():
                raise ModelError(f"the float model's output {name} is not finite (NaN or Inf): check its weights")

    def labelled(self, val: Any, model: nn.Module) -> CocoData:
        if isinstance(val, (tuple, list)) and len(val) == 2:
            val = open_coco(*val)
        if not isinstance(val, CocoData):
            raise DataError("a detector is measured on COCO annotations: give (instances.json, folder of images)")
        coco.class_ids(model, val)  # refused here unless they fit
        return val

    def images(
        self, data: Any, preprocessing: ScenePreprocessing, recipe: Recipe, report: Callable[[int, int], None]
    ) -> SceneSet:
        return load_scenes(data, preprocessing, count=recipe.calibration.images, seed=recipe.seed, progress=report)

    def keep_apart(self, images: Any, labelled: CocoData) -> None:
        """Files of the same name are compared by their pixels."""
        measured = {image.file.name: image for image in labelled.images}
        pairs = [(Path(name).name, scene) for name, scene in zip(images.names, images.scenes, strict=False)]
        for name, scene in pairs:
            if name in measured:
                other = images.preprocessing.scene(measured[name].open())
                if torch.equal(other.pixels, scene.pixels):
                    raise DataError(f"the calibration image '{name}' is one that is measured on: calibrate on others")

    def prepare(self, images: Any, teacher: nn.Module, device: torch.device, progress: Progress) -> SceneSet:
        """Each image with the regions that the teacher looks at in it."""
        assert isinstance(images, SceneSet)
        family = family_of(teacher)
        progress.start("regions", len(images))
        known = []
        for number, scene in enumerate(images.scenes):
            image = images.batch(slice(number, number + 1), device)["image"]
            known.append({name: x.cpu() for name, x in family.regions_of(teacher, image, scene.size).items()})
            progress.advance(1)
        progress.finish()
        return replace(images, known=known)

    @torch.no_grad()
    def outputs(
        self, model: nn.Module, units: Sequence[Unit], preprocessing: ScenePreprocessing, device: torch.device
    ) -> dict[str, Tensor]:
        """On regions of a fixed grid, which no rounding can move."""
        height, width = (side + -side % preprocessing.divisor for side in PROBE)
        image = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0)).to(device)
        corners = torch.tensor([[0.1, 0.1, 0.6, 0.5], [0.3, 0.2, 0.9, 0.9], [0.0, 0.5, 0.4, 1.0]])
        regions = (corners * torch.tensor([width, height, width, height])).to(device)
        family = family_of(model)
        state = {"image": image, **{f"regions.{stage}": regions for stage in range(family.stages(model))}}
        if family.has_masks(model):
            state |= {"regions.mask": regions, "labels": torch.zeros(len(regions), device=device)}
        found: dict[str, Tensor] = run_units(model, units, state)
        return found

    def measure(
        self,
        models: Mapping[str, nn.Module],
        data: CocoData,
        preprocessing: ScenePreprocessing,
        *,
        device: torch.device,
        limit: int | None,
        progress: Callable[[int], None] | None,
        batch: int = 1,
        keep: Callable[[Any], None] | None = None,
    ) -> Measured:
        options: dict[str, Any] = {"device": device, "limit": limit, "progress": progress, "keep": keep}
        return Measured(dict(coco.evaluate(models, data, preprocessing, **options)))

    def recall(self, accuracy: Mapping[str, Any]) -> coco.DetectionAccuracy:
        return coco.DetectionAccuracy.from_dict(accuracy)


def _one_by_one(stage: Stage) -> Stage:
    if isinstance(stage, MlpReconstruction):  # tokens of several images learn together
        return replace(stage, batch=min(stage.batch, MLP_IMAGES), views=Views())
    if isinstance(stage, (BlockReconstruction, JointTuning)):
        return replace(stage, batch=1, views=Views())
    if isinstance(stage, ScaleSearch):
        return replace(stage, outlier_images=min(stage.outlier_images, OUTLIER_IMAGES))
    return stage
