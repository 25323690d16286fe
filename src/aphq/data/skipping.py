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
    """What one reading of a set of images has to leave out."""

    def __init__(
        self,
        wanted: int,
        max_corrupt: float = MAX_CORRUPT,
        what: str = "images",
        instead: str = "another image takes its place",
    ) -> None:
        self.skipped: Skipped = ()
        self._wanted, self._allowed = wanted, max(1.0, max_corrupt * wanted)
        self._what, self._instead = what, instead

    def add(self, image: CorruptImage, seen: int) -> None:
        """Pass over one image, of `seen` so far; raises DataError when that is one too many."""
        self.skipped += ((image.name, image.reason),)
        if len(self.skipped) <= WARNINGS:
            logger.warning("%s; %s", image, self._instead)
        if len(self.skipped) > self._allowed:
            raise DataError(
                f"{len(self.skipped)} of the first {seen} {self._what} cannot be decoded, the last is {image.name!r}, "
                f"{image.reason}; repair such files, or take them out (of {self._wanted} at most "
                f"{int(self._allowed)} may be corrupt)"
            )

    def close(self) -> None:
        """Say how many there were, where not all were named."""
        if len(self.skipped) > WARNINGS:
            logger.warning("%d %s cannot be decoded in all", len(self.skipped), self._what)
