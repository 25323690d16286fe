"""Runs of detectors small enough for a test: four smooth pictures of different sizes, short recipes."""

from typing import Any

import torch
from torch import Tensor, nn

from aphq.data.scene_set import SceneSet, load_scenes
from aphq.data.scenes import ScenePreprocessing
from aphq.engine.folder import RunFolder
from aphq.engine.progress import Progress
from aphq.engine.store import Store
from aphq.engine.workspace import Workspace
from aphq.models.architecture import architecture_of
from aphq.models.student import make_student
from aphq.recipe import Recipe
from aphq.tasks import task_of

from .runs import short

RULES = ScenePreprocessing(shortest=48, longest=96)
SIZES = ((50, 70), (80, 60), (64, 64), (30, 90))
COUNT = len(SIZES)
STAGES = ["mlp_reconstruction", "layernorm_reparameterisation", "scale_search", "block_reconstruction"]


def pictures() -> list[Tensor]:
    """uint8 [3, height, width] each."""
    generator = torch.Generator().manual_seed(3)
    coarse = (torch.rand(1, 3, 5, 6, generator=generator) for _ in SIZES)
    smooth = (nn.functional.interpolate(x, size=size, mode="bilinear") for x, size in zip(coarse, SIZES, strict=True))
    return [(x[0] * 255).to(torch.uint8) for x in smooth]


def scenes() -> SceneSet:
    return load_scenes(pictures(), RULES, count=COUNT, seed=0)


def short_recipe(bits: str = "w4a4", effort: str = "balanced", **changes: Any) -> Recipe:
    few = {f"{stage}__images": COUNT for stage in ("calibration", "scale_search", "layernorm_reparameterisation")}
    return short(bits, effort, **{**few, **changes})


def scene_workspace(teacher: nn.Module, recipe: Recipe | None = None) -> Workspace:
    """What `aphq.quantize` hands to the stages, without a run folder."""
    device = torch.device("cpu")
    architecture = architecture_of(teacher)
    task = task_of(architecture, teacher)
    recipe = task.adapt(recipe or short_recipe())
    units = architecture.units(teacher)
    return Workspace(
        teacher,
        make_student(teacher, architecture, units, recipe),
        units,
        task.prepare(scenes(), teacher, device, Progress()),
        recipe,
        device,
        Store(device, gpu_bytes=None, host_bytes=None, folder=None),
        RunFolder(None),
        Progress(),
        distillation=task.distillation,
    )
