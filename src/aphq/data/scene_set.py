"""Calibration scenes: unlabelled images of any size, drawn once with a seed and kept in memory as resized pixels."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor

from aphq.data.images import CorruptImage, open_images
from aphq.data.pool import in_order
from aphq.data.scenes import Scene, ScenePreprocessing
from aphq.data.skipping import Skipping
from aphq.errors import DataError

logger = logging.getLogger(__name__)
State = dict[str, Tensor]
Progress = Callable[[int, int], None]  # images done, images wanted


@dataclass(frozen=True, eq=False)
class SceneSet:
    """Images that each keep their own size; what is known about one besides its pixels travels with it."""

    scenes: tuple[Scene, ...]
    preprocessing: ScenePreprocessing
    names: tuple[str, ...] = ()
    known: list[State] = field(default_factory=list)  # one per image, or none
    ragged: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.scenes)

    def batch(self, index: slice | Tensor, device: torch.device | str = "cpu") -> State:
        """The one image at `index`: `image` [1, 3, height, width], normalised and padded, and what is known of it."""
        (number,) = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        image = self.preprocessing.normalise(self.scenes[number].pixels.to(device))
        known = self.known[number] if self.known else {}
        return {"image": image, **{name: x.to(device) for name, x in known.items()}}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the model gets to see."""
        digest = hashlib.sha256(repr(self.preprocessing).encode())
        for scene in self.scenes:
            digest.update(f"{tuple(scene.pixels.shape)}".encode())
            digest.update(scene.pixels.numpy().data)
        return digest.hexdigest()


def load_scenes(
    data: str | os.PathLike[str] | SceneSet | Iterable[Any],
    preprocessing: ScenePreprocessing,
    *,
    count: int,
    seed: int,
    threads: int | None = None,
    progress: Progress | None = None,
) -> SceneSet:
    """`count` images, or all where there are fewer: a seeded draw from a folder, list or zip, or the first of an
    iterable of PIL images or uint8 tensors [3, height, width]."""
    if isinstance(data, SceneSet):
        return data
    loaded = (
        _draw(data, preprocessing, count, seed, threads, progress)
        if isinstance(data, (str, os.PathLike))
        else _collect(data, preprocessing, count, progress)
    )
    if len(loaded) == 0:
        raise DataError("no usable calibration image")
    if len(loaded) < count:
        logger.warning("%d calibration images instead of the %d asked for", len(loaded), count)
    return loaded


def _draw(
    data: str | os.PathLike[str],
    preprocessing: ScenePreprocessing,
    count: int,
    seed: int,
    threads: int | None,
    progress: Progress | None,
) -> SceneSet:
    files = open_images(data)
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    count = min(count, len(files))

    def view(rank: int) -> Scene | CorruptImage:
        try:
            return preprocessing.scene(files.open(order[rank]))
        except CorruptImage as error:
            return error

    scenes: list[Scene] = []
    names: list[str] = []
    skipping = Skipping(count)
    for rank, result in enumerate(in_order(view, range(len(files)), threads=threads)):
        if isinstance(result, CorruptImage):
            skipping.add(result, rank + 1)
            continue
        scenes.append(result)
        names.append(files.names[order[rank]])
        if progress:
            progress(len(scenes), count)
        if len(scenes) == count:
            break
    skipping.close()
    return SceneSet(tuple(scenes), preprocessing, tuple(names))


def _collect(data: Any, preprocessing: ScenePreprocessing, count: int, progress: Progress | None) -> SceneSet:
    try:
        items = iter(data)
    except TypeError:
        raise DataError(
            f"cannot take calibration images from {type(data).__name__}: give a folder, a list, a zip or an iterable"
        ) from None
    scenes: list[Scene] = []
    for item in items:
        scenes.append(preprocessing.scene(_as_image(item)))
        if progress:
            progress(len(scenes), count)
        if len(scenes) == count:
            break
    return SceneSet(tuple(scenes), preprocessing)


def _as_image(item: Any) -> Image.Image:
    if isinstance(item, Image.Image):
        return item
    if isinstance(item, Tensor) and item.dtype == torch.uint8 and item.ndim == 3 and len(item) == 3:
        return Image.fromarray(item.permute(1, 2, 0).cpu().contiguous().numpy())
    kind = f"{item.dtype} {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__
    raise DataError(f"calibration images for a detector are PIL images or uint8 tensors [3, height, width], got {kind}")
