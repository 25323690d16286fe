"""Labelled images to measure accuracy on: a folder of class folders, tensors in memory, or anybody's loader.

All three have one face, `Labelled`; evaluation knows no other.
"""

import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from aphq.data.classes import MAPPING, class_indices
from aphq.data.images import CorruptImage, ImageFiles, open_images
from aphq.data.pool import in_order
from aphq.data.preprocessing import Preprocessing
from aphq.data.skipping import Skipped, Skipping
from aphq.data.tensors import as_batch, split_item
from aphq.errors import DataError

logger = logging.getLogger(__name__)

Batches = Iterator[tuple[Tensor, Tensor]]  # float32 [batch, channels, height, width], int64 [batch], both on the CPU


class Labelled(Protocol):
    """Images with labels, read batch by batch as often as one likes."""

    @property
    def labels(self) -> Tensor:
        """int64 [N]"""

    @property
    def skipped(self) -> Skipped:
        """The images that the last call of `batches` had to leave out."""

    def __len__(self) -> int: ...

    def batches(
        self, preprocessing: Preprocessing, batch_size: int, threads: int | None = None, limit: int | None = None
    ) -> Batches:
        """Normalised images and their labels; at most `limit` of them, spread evenly over the classes."""


@dataclass
class LabelledImages:
    """Image files with labels, decoded while the model works on the batches before."""

    files: ImageFiles
    labels: Tensor  # int64 [N]
    class_names: tuple[str, ...]  # the name of each class index
    _skipping: Skipping = field(default_factory=lambda: Skipping(0), init=False, repr=False)

    @property
    def skipped(self) -> Skipped:
        return self._skipping.skipped

    @property
    def names(self) -> tuple[str, ...]:
        return self.files.names

    def __len__(self) -> int:
        return len(self.files)

    def batches(
        self, preprocessing: Preprocessing, batch_size: int, threads: int | None = None, limit: int | None = None
    ) -> Batches:
        chosen = spread(self.labels, limit)
        self._skipping = skipping = Skipping(len(chosen), what="labelled images", instead="left out")

        def view(index: int) -> Tensor | CorruptImage:
            try:
                return preprocessing.eval_transform(self.files.open(index, preprocessing.channels))
            except CorruptImage as error:
                return error

        images: list[Tensor] = []
        labels: list[Tensor] = []
        views = in_order(view, chosen, threads=threads, ahead=2 * batch_size)
        for seen, (index, result) in enumerate(zip(chosen, views, strict=True), start=1):
            if isinstance(result, CorruptImage):
                skipping.add(result, seen)
                continue
            images.append(result)
            labels.append(self.labels[index])
            if len(images) == batch_size:
                yield preprocessing.normalise(torch.stack(images)), torch.stack(labels)
                images, labels = [], []
        if images:
            yield preprocessing.normalise(torch.stack(images)), torch.stack(labels)
        skipping.close()


@dataclass(frozen=True, eq=False)
class LabelledTensors:
    """Images and labels in memory; uint8 images are pixels, float ones normalised already."""

    images: Tensor  # uint8 or float [N, channels, height, width]
    labels: Tensor  # int64 [N]
    preprocessing: Preprocessing  # what the images were made for

    def __post_init__(self) -> None:
        object.__setattr__(self, "images", as_batch(self.images, self.preprocessing))
        object.__setattr__(self, "labels", _as_labels(self.labels, len(self.images)))

    @property
    def skipped(self) -> Skipped:
        return ()

    def __len__(self) -> int:
        return len(self.images)

    def batches(
        self, preprocessing: Preprocessing, batch_size: int, threads: int | None = None, limit: int | None = None
    ) -> Batches:
        for index in torch.tensor(spread(self.labels, limit)).split(batch_size):
            yield preprocessing.normalise(as_batch(self.images[index], preprocessing)), self.labels[index]


@dataclass(frozen=True, eq=False)
class LabelledLoader:
    """A DataLoader, or another iterable that can be read again and again, of (images, labels) batches.

    Its order is unknown before it has been read, so `limit` takes the first images; batches larger than `batch_size`
    are split, smaller ones stay.
    """

    source: Iterable[Any]
    num_classes: int

    @property
    def skipped(self) -> Skipped:
        return ()

    @cached_property
    def labels(self) -> Tensor:
        """Costs one reading of the whole source."""
        labels = [_as_labels(split_item(item)[1], None, self.num_classes) for item in self.source]
        return torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        try:
            return len(self.source.dataset)  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            return len(self.labels)

    def batches(
        self, preprocessing: Preprocessing, batch_size: int, threads: int | None = None, limit: int | None = None
    ) -> Batches:
        room = limit
        for item in self.source:
            images, labels = split_item(item)
            images = as_batch(images, preprocessing)[:room]
            labels = _as_labels(labels, None, self.num_classes)[:room]
            if len(images) != len(labels):
                raise DataError(f"a batch has {len(images)} images but {len(labels)} labels")
            for some, theirs in zip(images.split(batch_size), labels.split(batch_size), strict=True):
                yield preprocessing.normalise(some), theirs
            if room is not None:
                room -= len(images)
                if room <= 0:
                    return


def open_labelled(path: str | os.PathLike[str], num_classes: int) -> LabelledImages:
    """Open a folder with one folder per class, images anywhere below; `class_indices` says which class is which."""
    root = Path(path).expanduser()
    if not root.is_dir():
        raise DataError(f"no labelled images at '{root}': give a folder with one folder per class")
    files = open_images(root)
    inside = [i for i, name in enumerate(files.names) if "/" in name]
    if not inside:
        raise DataError(f"the images of '{root}' lie in no class folders: give a folder with one folder per class")
    if len(inside) < len(files):
        logger.warning("%s: %d images outside the class folders are left out", root, len(files) - len(inside))
        files = files.take(inside)
    folders = [name.split("/", 1)[0] for name in files.names]
    index, class_names = class_indices(root, set(folders), num_classes)
    return LabelledImages(files, torch.tensor([index[folder] for folder in folders]), class_names)


def as_labelled(data: str | os.PathLike[str] | Labelled | Iterable[Any], num_classes: int) -> Labelled:
    """Whatever holds labelled images, with one face; checks that the labels fit a model of `num_classes` classes.

    `data` is a path, one of the classes above, a DataLoader or another iterable of (images, labels) batches, or one
    such pair of tensors. An iterator that can be read only once is kept in memory.
    """
    if isinstance(data, (str, os.PathLike)):
        return open_labelled(data, num_classes)
    if isinstance(data, (LabelledImages, LabelledTensors)):
        _as_labels(data.labels, len(data), num_classes)
        return data
    if isinstance(data, LabelledLoader):
        return LabelledLoader(data.source, num_classes)
    if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor):
        return LabelledLoader([data], num_classes)
    if not isinstance(data, Iterable):
        raise DataError(
            f"cannot take labelled images from {type(data).__name__}: "
            "give a folder with one folder per class, or an iterable of (images, labels) batches"
        )
    return LabelledLoader(list(data) if isinstance(data, Iterator) else data, num_classes)


def spread(labels: Tensor, limit: int | None) -> list[int]:
    """Indices of at most `limit` images, as even over the classes as can be, always the same ones.

    Round by round: the first image of every class, then the second, ...; the last round, where the limit cuts, takes
    classes at even distances rather than the lowest ones.
    """
    if limit is not None and limit < 1:
        raise DataError(f"the limit must be at least 1 image, got {limit}")
    if limit is None or limit >= len(labels):
        return list(range(len(labels)))
    rounds: defaultdict[int, list[int]] = defaultdict(list)  # round -> index of one image of each class
    seen: Counter[int] = Counter()
    classes = labels.tolist()
    for index, label in enumerate(classes):
        rounds[seen[label]].append(index)
        seen[label] += 1
    chosen: list[int] = []
    for members in rounds.values():
        room = limit - len(chosen)
        members.sort(key=classes.__getitem__)
        if room < len(members):
            members = [members[k * len(members) // room] for k in range(room)]
        chosen += members
    return sorted(chosen)


def _as_labels(labels: Any, count: int | None, num_classes: int | None = None) -> Tensor:
    """Check labels and make them int64 [count] on the CPU."""
    try:
        found: Tensor = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"labels must be class indices, got {type(labels).__name__}: give (images, labels) batches"
        ) from error
    if found.ndim != 1 or found.is_floating_point() or found.dtype == torch.bool:
        raise DataError(f"labels must be class indices [N], got {found.dtype} {list(found.shape)}")
    if count is not None and len(found) != count:
        raise DataError(f"there are {count} images but {len(found)} labels")
    if num_classes is not None and len(found) and not 0 <= int(found.min()) <= int(found.max()) < num_classes:
        raise DataError(
            f"labels run from {int(found.min())} to {int(found.max())}, but the model has {num_classes} classes: "
            f"for a folder, a {MAPPING} can say which class is which"
        )
    return found.long()
