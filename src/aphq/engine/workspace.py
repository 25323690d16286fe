"""What a stage works on: teacher, student, their units, the images, and where results and progress go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aphq.data.calibration import CalibrationSet
from aphq.data.views import draw_views
from aphq.engine.folder import RunFolder
from aphq.engine.progress import Progress
from aphq.engine.ragged import push_ragged
from aphq.engine.ranks import Ranks
from aphq.engine.seeds import generator_for
from aphq.engine.store import Activations, Rows, Store, push
from aphq.errors import RunError
from aphq.models.architecture import Step, Stream, Unit, Value, run_units, unchanged
from aphq.models.distillation import LOGITS, Distillation
from aphq.quant.layers import QuantizedLayer
from aphq.recipe import Calibration, Recipe, Views

log = logging.getLogger(__name__)
ELEMENTS_PER_PASS = 10_000_000  # of a unit's output
VIEWS_PER_PASS = 256


class Images(Protocol):
    """Calibration images, as tensors that share a size or as states that do not (`ragged`)."""

    @property
    def ragged(self) -> bool: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def batch(self, index: slice | Tensor, device: torch.device | str = "cpu") -> Any: ...


class ImageRows:
    """The calibration images as rows of the store."""

    def __init__(self, images: Images, count: int, device: torch.device) -> None:
        self.images, self.device = images, device
        self.count = min(count, len(images))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice | Tensor) -> Any:
        if isinstance(index, slice):
            index = slice(*index.indices(self.count))
        return self.images.batch(index, self.device)


@dataclass(frozen=True)
class Visit:
    """One unit on a walk: what the teacher saw and said there, and what the student sees."""

    unit: Unit
    teacher_in: Rows
    teacher_out: Rows
    student_in: Rows


@dataclass
class Workspace:
    """Everything a run holds in memory."""

    teacher: nn.Module  # float; rotation turns it together with the student
    student: nn.Module
    units: tuple[Unit, ...]
    images: Images
    recipe: Recipe
    device: torch.device
    store: Store
    folder: RunFolder
    progress: Progress
    ranks: Ranks = field(default_factory=Ranks)
    streams: tuple[Stream, ...] = ()  # residual streams that may be rotated
    distillation: Distillation = LOGITS
    shared: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # what one stage found and another can use

    def image_rows(self, count: int | None = None) -> Rows:
        return ImageRows(self.images, count or len(self.images), self.device)

    @cached_property
    def view_sources(self) -> tuple[Tensor, Tensor]:
        """What views are drawn from, on the device: they are drawn hundreds of times."""
        assert isinstance(self.images, CalibrationSet), "scenes are seen whole"
        sources, aspects = self.images.sources()
        return sources.to(self.device), aspects

    def views(self, config: Views, *purpose: str, into: Activations | None = None) -> Activations:
        """A fresh view of every image, in the place of `into` if given; `purpose` names the draw."""
        into = into or self.store.allocate((len(self.images), *self.images.batch(slice(0, 1)).shape[1:]))
        self._draw(config, into.data, *purpose)
        return into

    def _draw(self, config: Views, into: Tensor, *purpose: str) -> None:
        assert isinstance(self.images, CalibrationSet), "scenes are seen whole"
        sources, aspects = self.view_sources
        generator = generator_for(self.recipe.seed, "views", *purpose)
        for start in range(0, len(sources), VIEWS_PER_PASS):
            rows = slice(start, start + VIEWS_PER_PASS)
            into[rows].copy_(draw_views(sources[rows], aspects[rows], self.images.preprocessing, config, generator))

    def pool(self, config: Views, stage: str) -> Rows:
        """The images, and behind them as many views of each as the stage asks for and fit."""
        copies = self._copies_that_fit(config, stage) if config.copies else 0
        if not copies:
            return self.image_rows()
        count = len(self.images)
        held = self.store.allocate((count * (1 + copies), *self.images.batch(slice(0, 1)).shape[1:]))
        for start in range(0, count, VIEWS_PER_PASS):
            rows = slice(start, min(count, start + VIEWS_PER_PASS))
            held.data[rows].copy_(self.images.batch(rows, self.device))
        for copy in range(1, 1 + copies):
            self._draw(config, held.data[copy * count : (copy + 1) * count], stage, str(copy))
        return held

    def _copies_that_fit(self, config: Views, stage: str) -> int:
        """As many views of each image as are asked for, or as the model's widest activations leave room for. That
        follows from model and recipe alone: the same run on another machine holds the same views."""
        gigabytes = len(self.images) * self.largest_row * 4 / 1e9
        copies = min(config.copies, max(0, int(config.gigabytes / gigabytes) - 1))
        if copies < config.copies:
            text = "%s: %d views of each image instead of %d, for activations of at most %g GB (views.gigabytes)"
            log.info(text, stage, copies, config.copies, config.gigabytes)
            self.folder.event("note", stage=stage, views=copies, asked_for=config.copies)
        return copies

    @cached_property
    def largest_row(self) -> int:
        """Elements of the largest tensor that is held of one image: itself, or what a unit makes of it."""
        x = self.images.batch(slice(0, 1), self.device)
        largest = x.numel()
        with torch.no_grad():
            for unit in self.units:
                x = unit.run(self.teacher, x)
                largest = max(largest, x.numel())
                x = unit.bridge(self.teacher, x)
        return largest

    @torch.no_grad()
    def refresh(self, visit: Visit, images: Rows) -> None:
        """Put what the unit sees of other images into the rows of a visit, in place."""
        before = self.units[: self.units.index(visit.unit)]
        for start in range(0, len(images), self.pass_batch):
            rows = slice(start, start + self.pass_batch)
            x = run_units(self.teacher, before, images[rows])
            _overwrite(visit.teacher_in, rows, x)
            _overwrite(visit.teacher_out, rows, visit.unit.run(self.teacher, x))
            if visit.student_in is not visit.teacher_in:
                _overwrite(visit.student_in, rows, run_units(self.student, before, images[rows]))

    @property
    def batch(self) -> int:
        """Images per pass in which something is drawn at random: part of what a run is."""
        return self.recipe.calibration.batch

    @cached_property
    def pass_batch(self) -> int:
        """Images per pass otherwise: enough of a small model to keep a GPU busy, unless a small batch was asked for."""
        if self.device.type != "cuda" or self.batch < Calibration().batch:
            return self.batch
        with torch.no_grad():
            elements = self.units[0].run(self.teacher, self.image_rows()[slice(0, 1)]).numel()
        return max(self.batch, ELEMENTS_PER_PASS // elements)

    @cached_property
    def teacher_logits(self) -> Rows:
        return self.forward(self.teacher, lambda model, x: run_units(model, self.units, x), self.image_rows())

    def walk(self, images: Rows | None = None) -> Iterator[Visit]:
        """Teacher and student side by side, unit by unit; after each visit the student's unit, as it is by then,
        takes the student's activations forward. One pass over the images for each, three activations in memory."""
        teacher_in = self.image_rows() if images is None else images
        del images  # a pool of views is large, and nobody needs it after the first unit
        if isinstance(teacher_in, ImageRows) and not self.images.ragged:  # whole scenes are large: they stay bytes
            teacher_in = push(lambda x: x, teacher_in, self.store, self.pass_batch)
        student_in = teacher_in
        for unit in self.units:
            teacher_out = self.forward(self.teacher, unit.run, teacher_in, unit.name)
            yield Visit(unit, teacher_in, teacher_out, student_in)
            if unit is self.units[-1]:
                return
            student_in = self.forward(self.student, whole(unit), student_in, f"{unit.name}, quantized")
            teacher_in = self.forward(self.teacher, unit.bridge, teacher_out, unit.name)

    def walk_one(self, model: nn.Module, images: Rows | None = None) -> Iterator[tuple[Unit, Rows]]:
        """(unit, its input) along one model."""
        rows = self.image_rows() if images is None else images
        del images
        for unit in self.units:
            yield unit, rows
            if unit is not self.units[-1]:
                rows = self.forward(model, whole(unit), rows, unit.name)

    def forward(self, model: nn.Module, step: Step, rows: Rows, name: str = "") -> Rows:
        if step is unchanged:
            return rows
        if self.images.ragged:
            return push_ragged(lambda x: step(model, x), rows, self.store)
        return push(lambda x: step(model, x), rows, self.store, self.pass_batch, self.ranks, name)

    def passes(self, rows: Rows, count: int) -> Iterator[Value]:
        """The first `count` rows: all at once, or one by one where their sizes differ."""
        count = min(count, len(rows))
        for start in range(0, count, 1 if self.images.ragged else count):
            yield rows[slice(start, start + 1 if self.images.ragged else count)]

    # -- checkpoints of units ----------------------------------------------------------------------------------------

    def save_unit(self, stage: str, unit: Unit) -> None:
        for name in unit.modules:
            self.ranks.agree(self.student.get_submodule(name))
        tensors = {
            f"{name}.{key}": tensor
            for name in unit.modules
            for key, tensor in self.student.get_submodule(name).state_dict().items()
        }
        # a unit without modules (the end of a model without a head) is done too; a file of no tensors cannot be read
        self.folder.save(stage, unit.name, tensors or {"nothing": torch.zeros(1)})

    def recall(self, stage: str, name: str) -> dict[str, Tensor] | None:
        """A checkpoint, or None if the first process has none."""
        if not self.ranks.decide(self.folder.has(stage, name)):
            return None
        tensors = self.folder.load(stage, name)
        if tensors is None:
            raise RunError(f"this process cannot read the checkpoint of {name}: all need the same run folder")
        return tensors

    def restore_unit(self, stage: str, unit: Unit) -> bool:
        """Put a finished unit back into the student; False if it was not finished."""
        tensors = self.recall(stage, unit.name)
        if tensors is None:
            return False
        for name in unit.modules:
            module = self.student.get_submodule(name)
            prefix = f"{name}."
            own = {k.removeprefix(prefix): t.to(self.device) for k, t in tensors.items() if k.startswith(prefix)}
            add_missing_biases(module, own)
            try:
                module.load_state_dict(own)
            except RuntimeError as problem:
                raise RunError(f"the checkpoint of {unit.name} ({stage}) does not fit the model: {problem}") from None
        return True


def _overwrite(rows: Rows, where: slice, values: Tensor) -> None:
    assert isinstance(rows, Activations), "only cached rows can change"
    rows.data[where].copy_(values)


def whole(unit: Unit) -> Step:
    """From a unit's input to the next unit's."""
    return lambda model, x: unit.bridge(model, unit.run(model, x))


def add_missing_biases(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Layers that gained a bias (LayerNorm reparameterisation) need one before the state can be loaded."""
    for name, layer in module.named_modules():
        bias = state.get(f"{name}.bias" if name else "bias")
        if isinstance(layer, QuantizedLayer) and layer.bias is None and bias is not None:
            layer.bias = nn.Parameter(torch.zeros_like(bias), requires_grad=False)
