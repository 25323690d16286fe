"""Corrupt images that a loader passes over: the first are named in the log, all are counted, too many are refused."""

from __future__ import annotations

import logging

from aphq.data.images import CorruptImage
from aphq.errors import DataError

logger = logging.getLogger(__name__)

MAX_CORRUPT = 0.05  # share of the images asked for
WARNINGS = 10  # images that are named one by one in the log

Skipped = tuple[tuple[str, str], ...]  # name and reason of each corrupt image


class Skipping:
    """What one reading of a set of images had to leave out."""

    def __init__(self, wanted: int, most: float = MAX_CORRUPT, instead: str = "another image takes its place") -> None:
        self.images: Skipped = ()
        self._most, self._allowed, self._instead = most, max(1.0, most * wanted), instead

    def add(self, image: CorruptImage, seen: int) -> None:
        """Pass over one image, of `seen` so far; raises DataError when that is one too many."""
        self.images += ((image.name, image.reason),)
        if len(self.images) <= WARNINGS:
            logger.warning("%s; %s", image, self._instead)
        if len(self.images) > self._allowed:
            raise DataError(
                f"{len(self.images)} of the first {seen} images cannot be decoded, the last is {image.name!r}, "
                f"{image.reason}; repair such files, or take them out (at most {self._most:.0%} are passed over)"
            )

    def close(self) -> None:
        """Say how many there were, where not all were named."""
        if len(self.images) > WARNINGS:
            logger.warning("%d images cannot be decoded in all", len(self.images))
