"""Which class index a folder name stands for."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aphq.errors import DataError

MAPPING = "class_to_idx.json"
WNID = re.compile(r"n\d{8}")  # ImageNet's name for a class, for instance n01440764


def class_indices(root: Path, folders: Iterable[str], num_classes: int) -> tuple[dict[str, int], tuple[str, ...]]:
    """Map class folders to indices; also the name of every index of the model.

    A file `class_to_idx.json` wins; ImageNet ids map by timm's label set of `num_classes` labels, so that a subset of
    the classes is fine; anything else is numbered in sorted order and must be complete.
    """
    folders = sorted(folders)
    if (root / MAPPING).is_file():
        return _by_file(root / MAPPING, folders, num_classes)
    wnids = all(WNID.fullmatch(folder) for folder in folders)
    if wnids and (labels := _imagenet_labels(num_classes)):
        return _by_label(root, folders, labels)
    if len(folders) == num_classes:
        return {folder: rank for rank, folder in enumerate(folders)}, tuple(folders)
    if wnids:
        raise DataError(
            f"'{root}' has {len(folders)} ImageNet class folders, but the model has {num_classes} classes, "
            f"which is no ImageNet label set: add a {MAPPING} that maps each folder to the model's class index"
        )
    raise DataError(
        f"'{root}' has {len(folders)} class folders, but the model has {num_classes} classes: "
        f"give one folder per class, or add a {MAPPING} that maps each folder to the model's class index"
    )


def _imagenet_labels(num_classes: int) -> list[str] | None:
    """The ids of ImageNet-1k, -12k, -21k, ..., whichever has so many classes."""
    import timm.data

    timm_data: Any = timm.data  # its own annotations are partial
    subset = timm_data.infer_imagenet_subset({"num_classes": num_classes})
    return list(timm_data.ImageNetInfo(subset).label_names()) if subset else None


def _by_label(root: Path, folders: list[str], labels: list[str]) -> tuple[dict[str, int], tuple[str, ...]]:
    index = {label: i for i, label in enumerate(labels)}
    unknown = [folder for folder in folders if folder not in index]
    if unknown:
        raise DataError(
            f"'{root}' has class folder '{unknown[0]}', which is none of the {len(labels)} ImageNet classes "
            f"of the model: remove it, or add a {MAPPING} that maps each folder to the model's class index"
        )
    return {folder: index[folder] for folder in folders}, tuple(labels)


def _by_file(path: Path, folders: list[str], num_classes: int) -> tuple[dict[str, int], tuple[str, ...]]:
    try:
        mapping = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read '{path}': {error}") from error
    if not isinstance(mapping, dict):
        raise DataError(f"'{path}' must map folder names to class indices")
    names = [str(index) for index in range(num_classes)]
    for name, index in mapping.items():
        if type(index) is not int or not 0 <= index < num_classes:
            raise DataError(f"'{path}' maps '{name}' to {index!r}: must be an integer in 0-{num_classes - 1}")
        names[index] = name
    missing = [folder for folder in folders if folder not in mapping]
    if missing:
        raise DataError(f"'{path}' has no index for the class folder '{missing[0]}': add it")
    return {folder: mapping[folder] for folder in folders}, tuple(names)
