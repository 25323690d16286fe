"""A run folder as plain values: what the report is made from, and what a reader of reports may want in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from aphq.artifact.loading import info_from, load, read_config
from aphq.artifact.saving import CONFIG
from aphq.engine.files import UnreadableError, read_json
from aphq.errors import RunError
from aphq.models.coverage import Coverage, coverage
from aphq.recipe import Recipe
from aphq.report.observe import MEASUREMENTS, VERSION

EVENTS, IDENTITY, RESULT = "events.jsonl", "run.json", "result.json"


@dataclass(frozen=True)
class StageRun:
    """One stage: its time over all sessions of the run, and its peak memory in bytes."""

    name: str
    seconds: float
    memory: dict[str, int]


@dataclass(frozen=True)
class LossCurve:
    """The losses of a unit, thinned to means over equal stretches of steps."""

    stage: str
    unit: str
    losses: tuple[float, ...]
    errors: tuple[float, ...] = ()  # the losses less the term that decides the rounding; empty if there is none
    put_back: bool = False  # what was learned did harm and was not kept

    @property
    def shown(self) -> tuple[float, ...]:
        """What tells of learning: the reconstruction error alone where it is known."""
        return self.errors or self.losses

    @property
    def fluctuation(self) -> float:
        """How much neighbouring points differ, relative to their mean: the median, which a single jump leaves alone."""
        pairs = zip(self.shown, self.shown[1:], strict=False)
        return median([abs(b - a) / max(abs(a + b) / 2, 1e-30) for a, b in pairs] or [0.0])


@dataclass(frozen=True)
class RunData:
    """A finished run."""

    path: Path
    recipe: Recipe
    config: Mapping[str, Any]  # of the artifact
    result: Mapping[str, Any]
    measurements: Mapping[str, Any]  # see `aphq.report.observe`; empty if the run has none
    stages: tuple[StageRun, ...]
    curves: tuple[LossCurve, ...]
    images: int | None  # of the calibration set
    layers: tuple[Coverage, ...]
    classes: tuple[int, int] | None = None  # how many the float model saw in those images, of how many

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def model(self) -> str:
        return str(self.measurements.get("model") or self.config["architecture"]["family"])

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.config["sizes"]

    @property
    def accuracy(self) -> dict[str, float]:
        """ "float" and "quantized" in per cent: top-1, or the box AP of a detector; empty if nothing was measured."""
        found = self.result.get("accuracy") or {}
        return {name: value["top1"] if "top1" in value else value["box"]["ap"] for name, value in found.items()}

    @property
    def accuracy_name(self) -> str:
        found = (self.result.get("accuracy") or {}).get("quantized", {})
        return "box AP" if "box" in found else "top-1"

    @property
    def accuracy_images(self) -> int:
        return int((self.result.get("accuracy") or {}).get("quantized", {}).get("images", 0))

    @property
    def agreement(self) -> tuple[float, str] | None:
        """Per cent of equal predictions, and on what."""
        if self.result.get("agreement") is not None:
            return float(self.result["agreement"]), f"{self.accuracy_images} labelled images"
        seen = self.measurements.get("agreement")
        return (float(seen["same"]), f"{seen['images']} calibration images") if seen else None

    @cached_property
    def average_bits(self) -> float:
        """Of the weights of all layers, those in float at 32."""
        count = sum(row.parameters for row in self.layers)
        return sum((row.weight_bits or 32) * row.parameters for row in self.layers) / max(1, count)


def read_run(path: str | Path) -> RunData:
    """A finished run; RunError says what is wrong with anything else."""
    folder = Path(path)
    if not folder.is_dir():
        raise RunError(f"there is no folder {folder}")
    if not (folder / IDENTITY).is_file():
        raise RunError(f"{folder} is not a run folder (it has no {IDENTITY})")
    if not (folder / CONFIG).is_file() or not (folder / RESULT).is_file():
        raise RunError(f"the run in {folder} is not finished: repeat its command to go on, then ask for the report")
    config = read_config(folder)
    model = load(folder)
    events = read_events(folder / EVENTS)
    started = next((event for event in events if event.get("event") == "started"), {})
    return RunData(
        path=folder,
        recipe=info_from(config).recipe,
        config=config,
        result=_read_object(folder / RESULT),
        measurements=_read_measurements(folder / MEASUREMENTS),
        stages=stage_runs(events),
        curves=loss_curves(events),
        images=started.get("images"),
        layers=tuple(coverage(model)),
        classes=classes_shown(events),
    )


def read_events(file: Path) -> list[dict[str, Any]]:
    """What happened, in order; a folder without the file has nothing to tell."""
    if not file.is_file():
        return []
    events = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise RunError(f"{file} cannot be read: {problem}") from None
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError("not a JSON object")
        except (ValueError, RecursionError) as problem:
            raise RunError(f"{file}, line {number} is damaged ({problem}): remove that line to go on") from None
        events.append(event)
    return events


def stage_runs(events: list[dict[str, Any]]) -> tuple[StageRun, ...]:
    """Every stage with its time; of one that was interrupted, up to the last sign of life."""
    seconds: dict[str, float] = {}
    memory: dict[str, dict[str, int]] = {}
    running: tuple[str, float] | None = None
    last = 0.0
    for event in events:
        kind, now = event.get("event"), float(event.get("time", last))
        if kind == "resumed" and running is not None:
            seconds[running[0]] = seconds.get(running[0], 0.0) + max(0.0, last - running[1])
            running = None
        elif kind == "stage_started":
            running = str(event["stage"]), now
        elif kind == "stage_finished":
            name = str(event["stage"])
            seconds[name] = seconds.get(name, 0.0) + float(event["seconds"])
            memory[name] = event.get("memory") or {}
            running = None
        last = now
    return tuple(StageRun(name, value, memory.get(name, {})) for name, value in seconds.items())


def loss_curves(events: list[dict[str, Any]]) -> tuple[LossCurve, ...]:
    """One per stage and unit that learned something; of a unit that was done twice, the later."""
    found = {}
    for event in events:
        if event.get("event") == "unit" and event.get("losses"):
            stage, unit = str(event["stage"]), str(event.get("unit", ""))
            losses, errors = (tuple(float(value) for value in event.get(what) or ()) for what in ("losses", "errors"))
            found[stage, unit] = LossCurve(stage, unit, losses, errors, bool(event.get("put_back")))
    return tuple(found.values())


def classes_shown(events: list[dict[str, Any]]) -> tuple[int, int] | None:
    """(classes in the calibration images, classes of the model), if a stage counted them."""
    notes = (event for event in events if event.get("event") == "note" and "classes_shown" in event)
    return next(((int(note["classes_shown"]), int(note["classes"])) for note in notes), None)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file)
    except UnreadableError as problem:
        raise RunError(f"{file} is damaged: {problem}") from None
    if not isinstance(found, dict):
        raise RunError(f"{file} is damaged: not a JSON object")
    return found


def _read_measurements(file: Path) -> dict[str, Any]:
    """Empty where a run has none, or those of another version."""
    found = _read_object(file) if file.is_file() else {}
    return found if found.get("version") == VERSION else {}
