"""Opening what is to be used: a finished run or an exported file, its task and preprocessing, and the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aphq.artifact.info import architecture_behind
from aphq.artifact.loading import load
from aphq.errors import RecipeError
from aphq.runtimes.session import SUFFIXES, ExportedModel, open_exported
from aphq.tasks import TASKS, Task, task_of


def open_model(path: str | Path, runtime: str | None = None) -> nn.Module:
    """A run folder or an exported file as a module that takes images and gives logits."""
    suffix = Path(path).suffix
    if suffix in SUFFIXES:
        return open_exported(path, runtime or SUFFIXES[suffix])
    return load(path, runtime=runtime or "simulated")


def task_for(model: nn.Module) -> Task:
    """What a model is for."""
    if isinstance(model, ExportedModel):
        return TASKS[model.task]
    return task_of(architecture_behind(model), model)


def preprocessing_of(model: nn.Module) -> Any:
    """What a model that is not quantized, or was exported, expects of its input."""
    return model.preprocessing if isinstance(model, ExportedModel) else task_for(model).preprocessing_of(model)


def resolve_device(device: str | torch.device) -> torch.device:
    """A device that works, with its index; "auto" is the first GPU, or the CPU."""
    wanted = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if str(wanted) == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun: a GPU for each process
        wanted = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        return torch.empty(0, device=wanted).device
    except (RuntimeError, AssertionError) as problem:
        raise RecipeError(f"cannot use the device {str(wanted)!r}: {str(problem).splitlines()[0]}") from None
