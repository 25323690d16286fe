"""What an exported file says about itself: how to prepare images, what it was made from, and how well it matches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from aphq.artifact.info import classifier_input, info_of
from aphq.data.preprocessing import Preprocessing
from aphq.errors import ExportError
from aphq.export.registry import Options
from aphq.models.architecture import TaskName, architecture_named
from aphq.tasks.classification import class_count
from aphq.typed import shown

PREFIX = "aphq."
FORMAT = "1"
TASKS: tuple[TaskName, ...] = ("classification", "embedding")  # of what can be exported


def describe(model: nn.Module, options: Options) -> dict[str, str]:
    """Plain strings by name; structured ones are JSON."""
    from aphq import __version__

    preprocessing, info = classifier_input(model), info_of(model)
    assert info is not None
    return {
        f"{PREFIX}format": FORMAT,
        f"{PREFIX}version": __version__,
        f"{PREFIX}recipe": info.recipe.name,
        f"{PREFIX}family": info.family,
        f"{PREFIX}task": architecture_named(info.family).task_of(model),
        f"{PREFIX}classes": str(class_count(model)),
        f"{PREFIX}float_sha256": info.float_sha256,
        f"{PREFIX}preprocessing": json.dumps(preprocessing.to_dict()),
        f"{PREFIX}batch": "any" if options.batch is None else str(options.batch),
        f"{PREFIX}tuned_for": options.tuned_for,
    }


def preprocessing_from(metadata: Mapping[str, str], where: str) -> Preprocessing:
    """How the file wants its images."""
    return Preprocessing.from_dict(_json(metadata, "preprocessing", where))


def classes_from(metadata: Mapping[str, str], where: str) -> int:
    return int(_json(metadata, "classes", where))


def task_from(metadata: Mapping[str, str], where: str) -> str:
    """What the file is for; those of earlier versions do not say, and count as classifiers."""
    found = metadata.get(f"{PREFIX}task", TASKS[0])
    if found not in TASKS:
        raise ExportError(f"{where} is for {shown(found)}, which this version does not know; known: {', '.join(TASKS)}")
    return found


def batch_from(metadata: Mapping[str, str], where: str) -> int | None:
    """The number of images of a run; None if it may vary."""
    found = metadata.get(f"{PREFIX}batch")
    return None if found == "any" else int(_json(metadata, "batch", where))


def _json(metadata: Mapping[str, str], key: str, where: str) -> Any:
    try:
        return json.loads(metadata[f"{PREFIX}{key}"])
    except (KeyError, ValueError):
        raise ExportError(f"{where} was not exported by aphq, or its metadata is damaged: no usable {key!r}") from None
