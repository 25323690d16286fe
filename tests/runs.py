"""Whole runs small enough for a test: short recipes, a handful of images, a workspace without a run folder."""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.data import CalibrationSet
from aphq.engine.folder import RunFolder
from aphq.engine.progress import Progress
from aphq.engine.store import Store
from aphq.engine.workspace import Workspace
from aphq.models.architecture import architecture_of
from aphq.models.student import make_student, opened_copy
from aphq.presets import preset
from aphq.recipe import STAGES, Recipe

SHORT: dict[str, Any] = {
    "calibration.images": 16,
    "calibration.batch": 8,
    "steps": 5,
    "mlp_reconstruction.batch": 8,
    "block_reconstruction.batch": 8,
    "joint_tuning.batch": 8,
    "joint_tuning.views.every": 2,
    "layernorm_reparameterisation.candidates": 8,
    "scale_search.candidates": 8,
    "scale_search.rounds": 1,
    "scale_search.tokens": 256,
    "scale_search.outlier_candidates": 4,
}


def short(bits: str = "w4a4", effort: str = "balanced", **changes: Any) -> Recipe:
    """A preset cut down to a second; changes by dotted path with `__` for the dot."""
    return shortened(preset(bits, effort), {name.replace("__", "."): value for name, value in changes.items()})


def shortened(recipe: Recipe, changes: dict[str, Any] | None = None) -> Recipe:
    """A recipe cut down to a second, in the stages it has."""
    for path, value in {**SHORT, **(changes or {})}.items():
        head = path.split(".")[0]
        if head in STAGES and recipe.stage(head) is None:
            continue
        if path == "steps" and not any(hasattr(stage, "steps") for stage in recipe.stages):
            continue
        recipe = recipe.with_value(path, value)
    return recipe


def pixels(count: int = 16, seed: int = 0, size: int = 32, channels: int = 3) -> Tensor:
    """Smooth random pictures, uint8 [count, channels, size, size]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 6, 6, generator=generator)
    return (nn.functional.interpolate(coarse, size=(size, size), mode="bilinear") * 255).round().to(torch.uint8)


def workspace(model: nn.Module, recipe: Recipe | None = None, images: Tensor | None = None) -> Workspace:
    """What `aphq.quantize` hands to the stages, without a run folder."""
    recipe = recipe or short()
    architecture = architecture_of(model)
    teacher = opened_copy(model, architecture)
    units = architecture.units(teacher)
    preprocessing = architecture.preprocessing(teacher)
    if images is None:
        images = pixels(recipe.calibration.images)
    device = torch.device("cpu")
    return Workspace(
        teacher,
        make_student(teacher, architecture, units, recipe),
        units,
        CalibrationSet(images, preprocessing),
        recipe,
        device,
        Store(device, gpu_bytes=None, host_bytes=None, folder=None),
        RunFolder(None),
        Progress(),
        streams=architecture.streams(teacher),
    )


def all_images(work: Workspace) -> Tensor:
    """The calibration images as the model gets them."""
    return work.images.batch(slice(None))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def stopped_after(stage: str, unit: str) -> Iterator[None]:
    """The run inside the block ends in a KeyboardInterrupt as soon as this checkpoint is written."""
    save = RunFolder.save

    def save_and_stop(self: RunFolder, saved: str, name: str, tensors: Any) -> None:
        save(self, saved, name, tensors)
        if (saved, name) == (stage, unit):
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            yield


def forked(work: Callable[[], object]) -> int:
    """The number of a process of its own that does the work and ends, with 0 if nothing was raised."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()  # the only place that will ever tell
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child
