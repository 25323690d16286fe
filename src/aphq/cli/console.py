"""Progress on the terminal, or as lines where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from aphq.engine.launch import is_first_process
from aphq.engine.progress import PlainProgress, Progress, RichProgress


@contextmanager
def open_progress() -> Iterator[Progress]:
    """A live bar, lines, or, for a process that only helps, nothing."""
    progress = Progress()
    if is_first_process():
        progress = RichProgress() if sys.stderr.isatty() else PlainProgress()
    try:
        yield progress
    finally:
        progress.close()
