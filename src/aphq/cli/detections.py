"""Writing detections to a file while they are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aphq.engine.files import write_json


@contextmanager
def write_detections(path: Path | None) -> Iterator[dict[str, Any]]:
    """Options for `aphq.evaluate`; with a path, what it finds is there at the end, in COCO's format for results."""
    if path is None:
        yield {}
        return
    results: list[dict[str, Any]] = []
    yield {"keep": results.append}
    write_json(path, results)
