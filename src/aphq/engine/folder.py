"""The run folder: what was asked, what happened, and every finished unit, so that a stopped run goes on.

run.json                        identity: recipe, model, images; a run only continues under the same identity
events.jsonl                    one JSON object per line, with a time
checkpoints/STAGE/UNIT.safetensors
measurements.json               teacher and student side by side, for the report
sample.safetensors              a few calibration images, as the model sees them, to compare exports on
recipe.yaml, config.json, model.safetensors, result.json, report.html     written at the end
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from aphq.engine.files import (
    UnreadableError,
    discard_leftovers,
    read_json,
    read_sealed,
    write_json,
    write_sealed,
    write_text,
)
from aphq.errors import RunError
from aphq.recipe import Recipe, differences

EVENTS = "events.jsonl"
SAMPLE, SAMPLE_IMAGES = "sample.safetensors", 16
LONGEST = 1000  # characters of what differs
NOT_IDENTITY = ("aphq",)  # may differ between the start and the continuation


class RunFolder:
    """A folder held by one process; `path=None` keeps nothing, for runs that live in memory. A process that only helps
    with a run (`writes=False`) reads the other's checkpoints."""

    def __init__(self, path: Path | None, writes: bool = True) -> None:
        self.path, self.writes = path, writes and path is not None
        self._lock: IO[str] | None = None
        if path is not None and writes:
            try:
                os.fspath(path).encode()  # the library that writes tensors knows no other names
                path.mkdir(parents=True, exist_ok=True)
                if not (path / "run.json").exists():
                    _refuse_foreign(path)
                self._lock = open(path / ".lock", "w")  # noqa: SIM115
            except (OSError, ValueError) as problem:
                raise RunError(f"cannot use {path} as a run folder: {problem}") from None
            _hold(self._lock, path)
            try:
                discard_leftovers(path)
                _end_last_line(path / EVENTS)
            except OSError as problem:
                self.close()
                raise RunError(f"cannot use {path} as a run folder: {problem}") from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def claim(self, identity: dict[str, Any]) -> bool:
        """Bind the folder to what this run is, or check that it already is; True if an earlier run goes on."""
        if self.path is None or not self.writes:
            return False
        record = self.path / "run.json"
        if not record.exists():
            write_text(self.path / "recipe.yaml", Recipe.from_dict(identity["recipe"]).to_yaml())
            write_json(record, identity)
            return False
        try:
            earlier = read_json(record)
            if not isinstance(earlier, dict):
                raise UnreadableError("not a JSON object")
        except UnreadableError as problem:
            raise RunError(f"{record} is damaged ({problem}); remove the folder or choose another") from None
        before, now = ({k: v for k, v in i.items() if k not in NOT_IDENTITY} for i in (earlier, identity))
        changed = differences(before, now)
        if changed:
            raise RunError(
                f"{self.path} holds a run with other settings; changed: {'; '.join(changed)[:LONGEST]}. "
                "Repeat the earlier settings to go on, or choose another folder"
            )
        return True

    def event(self, kind: str, **values: Any) -> None:
        if self.path is not None and self.writes:
            line = json.dumps({"time": round(time.time(), 3), "event": kind, **values})
            file = self.path / EVENTS
            try:
                with open(file, "a", encoding="utf-8") as handle:
                    handle.write(line + "\n")
            except OSError as problem:
                with suppress(OSError):
                    _end_last_line(file)  # a full disk takes half a line
                raise RunError(f"cannot write to {self.path}: {problem}; finished units are intact") from None

    def save(self, stage: str, unit: str, tensors: Mapping[str, Tensor]) -> None:
        if self.writes:
            write_sealed(self._checkpoint(stage, unit), tensors)

    def has(self, stage: str, unit: str) -> bool:
        return self.path is not None and self._checkpoint(stage, unit).exists()

    def load(self, stage: str, unit: str) -> dict[str, Tensor] | None:
        """What `save` kept, or None."""
        if not self.has(stage, unit):
            return None
        path = self._checkpoint(stage, unit)
        try:
            return read_sealed(path)
        except UnreadableError as problem:
            raise RunError(f"the checkpoint {path} is damaged ({problem}); remove it to redo that unit") from None

    def earlier_result(self) -> dict[str, Any]:
        """What `write_result` kept when the run was finished before; empty if it was not, or cannot be read."""
        try:
            found = read_json(self.path / "result.json") if self.path else {}
        except UnreadableError:
            return {}
        return found if isinstance(found, dict) else {}

    def write_result(self, result: Mapping[str, Any]) -> None:
        if self.path is not None and self.writes:
            write_json(self.path / "result.json", result)

    def keep_sample(self, images: Tensor) -> None:
        """Keep the first calibration images."""
        if self.path is not None and self.writes:
            write_sealed(self.path / SAMPLE, {"images": images[:SAMPLE_IMAGES]})

    @staticmethod
    def sample_in(path: Path) -> Tensor | None:
        """What `keep_sample` kept: uint8 pixels, or floats that are normalised already."""
        file = path / SAMPLE
        if not file.is_file():
            return None
        try:
            return read_sealed(file)["images"]
        except (UnreadableError, KeyError) as problem:
            raise RunError(f"{file} is damaged ({problem}); remove it and pass images with --data") from None

    def drop_checkpoints(self) -> None:
        """The artifact holds all they held."""
        if self.path is not None and self.writes:
            shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    def _checkpoint(self, stage: str, unit: str) -> Path:
        assert self.path is not None
        return self.path / "checkpoints" / stage / f"{unit}.safetensors"


def _hold(lock: IO[str], path: Path) -> None:
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RunError(f"another process is working in {path}; wait for it or choose another folder") from None


def _end_last_line(file: Path) -> None:
    """Drop what a process that died, or a full disk, left of a line."""
    if not file.exists():
        return
    with open(file, "rb+") as handle:
        content = handle.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            handle.truncate(whole)


def _refuse_foreign(path: Path) -> None:
    ours = {"recipe.yaml"}  # written just before run.json: a run may have been killed in between
    strangers = [p.name for p in path.iterdir() if not p.name.startswith(".") and p.name not in ours]
    if strangers:
        names = ", ".join(sorted(strangers)[:3])
        raise RunError(f"{path} is not empty and holds no run ({names} ...); choose another folder")
