"""The calibration set: about a thousand unlabelled images, drawn once with a seed and kept in memory as pixels."""

import hashlib
import logging
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from aphq.data.augment import train_view
from aphq.data.images import CorruptImage, ImageFiles, open_images
from aphq.data.pool import in_order
from aphq.data.preprocessing import Preprocessing
from aphq.data.skipping import MAX_CORRUPT, Skipped, Skipping
from aphq.data.tensors import as_batch, check_shape, split_item
from aphq.data.views import source_of
from aphq.errors import DataError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # images done, images wanted


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Images of the size the model wants: uint8 pixels, or float32 that is normalised already."""

    images: Tensor  # uint8 or float32 [N, channels, height, width], on the CPU
    preprocessing: Preprocessing
    names: tuple[str, ...] = ()  # one per image, empty for data that came from memory
    skipped: Skipped = ()
    whole: Tensor | None = None  # uint8 [N, channels, side, side], the pictures that `images` are crops of
    aspects: Tensor | None = None  # [N], their width / height
    files: ImageFiles | None = None  # what they were read from, in the same order
    ragged: ClassVar[bool] = False  # all of one size

    def __post_init__(self) -> None:
        check_shape(self.images, self.preprocessing)
        if self.images.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"calibration images must be uint8 or float32, got {self.images.dtype}")

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, index: slice | Tensor, device: torch.device | str = "cpu") -> Tensor:
        """The images at `index`, normalised float32 [batch, channels, height, width] on `device`."""
        picked = self.images[index.cpu() if isinstance(index, Tensor) else index]
        return self.preprocessing.normalise(picked.to(device))  # uint8 travels, the normalisation runs over there

    def first(self, n: int) -> "CalibrationSet":
        """The first `n` images, sharing memory with these."""
        whole, aspects = (None if t is None else t[:n] for t in (self.whole, self.aspects))
        return replace(self, images=self.images[:n], names=self.names[:n], whole=whole, aspects=aspects)

    def sources(self) -> tuple[Tensor, Tensor]:
        """(pictures, width / height) to draw fresh views from: the whole pictures, or the images where there are no
        others."""
        if self.whole is not None and self.aspects is not None:
            return self.whole, self.aspects
        height, width = self.preprocessing.size
        return self.images, torch.full((len(self.images),), width / height)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all that the model gets to see, so that a run continues only on the data it was started with."""
        p = self.preprocessing
        digest = hashlib.sha256(f"{self.images.dtype} {tuple(self.images.shape)} {p.mean} {p.std}".encode())
        for tensor in (self.images, self.whole):
            if tensor is not None:
                digest.update(tensor.contiguous().numpy().data)
        return digest.hexdigest()


def load_calibration(
    data: str | os.PathLike[str] | Tensor | CalibrationSet | Iterable[Any],
    preprocessing: Preprocessing,
    *,
    count: int = 1024,
    seed: int = 3407,
    augment: bool = False,
    whole: bool = False,
    max_corrupt: float = MAX_CORRUPT,
    threads: int | None = None,
    progress: Progress | None = None,
) -> CalibrationSet:
    """Load `count` calibration images, or all where there are fewer; with `whole`, the pictures that they are crops of
    too, to draw fresh views from.

    `data` is a folder, list or zip of images (see `open_images`), of which a seeded draw is taken, alike from all
    folders in it; or images in memory, of which the first are taken: a tensor [N, C, H, W], a DataLoader, or any
    iterable of images or batches, with labels ignored. uint8 tensors are pixels; float tensors are taken as normalised
    already.
    """
    if count < 1:
        raise DataError(f"the number of calibration images must be at least 1, got {count}")
    if isinstance(data, (str, os.PathLike)):
        loaded = _draw(open_images(data), preprocessing, count, seed, augment, whole, max_corrupt, threads, progress)
    else:
        if augment:
            logger.warning("augmentation needs image files: the images in memory are used as they are")
        if isinstance(data, CalibrationSet):
            check_shape(data.images, preprocessing)
            loaded = data if len(data) <= count else data.first(count)
        elif isinstance(data, Tensor):
            loaded = CalibrationSet(as_batch(data[:count], preprocessing), preprocessing)
        else:
            loaded = CalibrationSet(_collect(data, preprocessing, count, progress), preprocessing)
    if len(loaded) == 0:
        raise DataError(f"no usable calibration image ({len(loaded.skipped)} could not be decoded)")
    if len(loaded) < count:
        logger.warning("%d calibration images instead of the %d asked for", len(loaded), count)
    return loaded


def draw_order(names: Sequence[str], seed: int) -> list[int]:
    """A seeded permutation that goes round the folders: one image of each, then a second, and so on.

    Folders often hold a class each, and what the images do not show a network of few bits forgets: of images drawn at
    random, as many as there are classes, more than a third of the classes have none."""
    shuffled = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    taken: Counter[str] = Counter()
    rounds: dict[int, int] = {}
    for index in shuffled:
        folder = os.path.dirname(names[index])
        rounds[index] = taken[folder]
        taken[folder] += 1
    return sorted(shuffled, key=rounds.__getitem__)


def _draw(
    files: ImageFiles,
    preprocessing: Preprocessing,
    count: int,
    seed: int,
    augment: bool,
    whole: bool,
    max_corrupt: float,
    threads: int | None,
    progress: Progress | None,
) -> CalibrationSet:
    """Decode the first `count` images of a seeded draw that can be decoded."""
    order = draw_order(files.names, seed)
    count = min(count, len(files))
    skipping = Skipping(count, max_corrupt)

    def view(rank: int) -> tuple[Tensor, tuple[Tensor, float] | None] | CorruptImage:
        try:
            image = files.open(order[rank], preprocessing.channels)
        except CorruptImage as error:
            return error
        source = source_of(image, preprocessing) if whole else None
        if augment:
            return train_view(image, preprocessing, random.Random(f"{seed}/{rank}")), source
        return preprocessing.eval_transform(image), source

    images = torch.empty(count, *preprocessing.shape, dtype=torch.uint8)
    sources: list[tuple[Tensor, float]] = []
    taken: list[int] = []
    for rank, result in enumerate(in_order(view, range(len(files)), threads=threads)):
        if isinstance(result, CorruptImage):
            skipping.add(result, rank + 1)
            continue
        images[len(taken)], source = result
        if source is not None:
            sources.append(source)
        taken.append(order[rank])
        if progress:
            progress(len(taken), count)
        if len(taken) == count:
            break
    skipping.close()
    used = files.take(taken)
    found = CalibrationSet(images[: len(taken)], preprocessing, used.names, skipping.skipped, files=used)
    if not sources:
        return found
    pictures, aspects = zip(*sources, strict=True)
    return replace(found, whole=torch.stack(pictures), aspects=torch.tensor(aspects))


def _collect(data: Iterable[Any], preprocessing: Preprocessing, count: int, progress: Progress | None) -> Tensor:
    """Read an iterable of images [C, H, W] or batches [B, C, H, W] until `count` images are there."""
    try:
        items = iter(data)
    except TypeError as error:
        raise DataError(
            f"cannot take calibration images from {type(data).__name__}: "
            "give a folder, a list, a zip, a tensor or an iterable of tensors"
        ) from error
    batches: list[Tensor] = []
    have = 0
    for item in items:
        images, _ = split_item(item)
        if isinstance(images, Tensor) and images.ndim == 3:
            images = images[None]
        batches.append(as_batch(images, preprocessing)[: count - have])
        if batches[-1].dtype != batches[0].dtype:
            raise DataError("calibration images mix uint8 pixels and normalised floats: give one kind")
        have += len(batches[-1])
        if progress:
            progress(have, count)
        if have >= count:
            break
    return torch.cat(batches) if batches else torch.empty(0, *preprocessing.shape)
