"""MLP reconstruction: GELU becomes ReLU, and each MLP is retrained alone to say what it said (paper Sec. 3.3).

Input and target are the teacher's, so the MLPs are independent of each other. The loss is the importance-weighted
error of the plain output (Eq. 11) plus alpha times that of the output with activations clamped at a percentile
(Eq. 12-14), which lets the range shrink without losing the gradient of what is clipped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aphq import kernels, settings
from aphq.engine.hooks import change_outputs, watch_inputs
from aphq.engine.loop import Group, Loop, Now, cosine, draw_samples, run_together
from aphq.engine.ragged import RaggedRows, TokenRows
from aphq.engine.seeds import generator_for
from aphq.engine.store import Activations, Rows
from aphq.engine.workspace import Visit, Workspace
from aphq.kernels import compiled
from aphq.models.architecture import Mlp, Unit, run_units
from aphq.models.mlp import MlpModules, may_become_relu
from aphq.models.student import swap_activation
from aphq.stages.batches import recordable, weighted_error
from aphq.stages.importance import ImportanceMap, Importances
from aphq.stages.percentile import positive_percentile

log = logging.getLogger(__name__)
CachedRows = Activations | TokenRows
HIDDEN_TENSORS = 7  # as large as the hidden activations that a step holds: plain and clamped, and gradients
MOST_TOGETHER = 6  # MLPs trained side by side on a GPU; a checkpoint comes after each lot


def reconstruct_mlps(work: Workspace, config: settings.MlpReconstruction) -> None:
    """The stage: every unit with an MLP, in order; on a GPU as many at a time as its memory holds."""
    stage, units = config.NAME, _units(work)
    for unit in units:
        swap_activation(work.student, _mlp(unit))
    todo = [unit for unit in units if not work.restore_unit(stage, unit)]
    if not todo:
        return
    importances = Importances(work, config.importance)
    work.progress.start(stage, config.steps * len(todo))
    jobs: list[Job] = []
    for unit, rows in work.walk_one(work.teacher, work.pool(config.views, stage)):
        if unit in todo:
            jobs.append(_prepare(work, config, importances, unit, rows))
            if unit is todo[-1] or len(jobs) == MOST_TOGETHER or not _room_for_another(work, jobs):
                _train(work, config, jobs)
                jobs = []
        if unit is todo[-1]:
            break
    work.progress.finish()


def _units(work: Workspace) -> list[Unit]:
    """Those whose MLP can be taught to do with ReLU; the others are noted."""
    fitting = [u for u in work.units if u.mlp and may_become_relu(work.teacher.get_submodule(u.mlp.act))]
    left = [u.name for u in work.units if u.kind == "block" and u not in fitting]
    if left:
        text = "without an MLP of two layers and GELU, so left as they are: %d blocks (%s ...)"
        log.info(text, len(left), left[0])
        work.folder.event("note", stage=settings.MlpReconstruction.NAME, left_as_they_are=left)
    return fitting


def _mlp(unit: Unit) -> Mlp:
    assert unit.mlp is not None
    return unit.mlp


@dataclass
class Job:
    """One MLP on its way: its loop, and what the loop reads."""

    unit: Unit
    loop: Loop
    inputs: CachedRows
    targets: CachedRows
    bound: float
    bytes: int  # of cached activations
    working_bytes: int  # of a step


def _room_for_another(work: Workspace, jobs: list[Job]) -> bool:
    """Whether the GPU holds the activations of one more MLP like these, and the steps of all. On the CPU side by side
    gains nothing."""
    needed = 2 * jobs[-1].bytes + sum(job.working_bytes for job in jobs)
    return work.ranks.decide(work.device.type == "cuda" and work.store.room("gpu") > needed)


def _train(work: Workspace, config: settings.MlpReconstruction, jobs: list[Job]) -> None:
    note = jobs[0].unit.name if len(jobs) == 1 else f"{jobs[0].unit.name} ... {jobs[-1].unit.name}"
    parameters = [p for job in jobs for group in job.loop.groups for p in group.parameters]
    for parameter in parameters:
        parameter.requires_grad_(True)
    if config.views.every:
        first = jobs[0].loop
        first.refresh_every = config.views.every
        first.refresh = lambda step: _refresh(work, jobs, work.views(config.views, config.NAME, str(step)))
    try:
        curves = run_together([job.loop for job in jobs], lambda n: work.progress.advance(n, note))
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
    for job, curve in zip(jobs, curves, strict=True):
        work.save_unit(config.NAME, job.unit)
        work.folder.event("unit", stage=config.NAME, unit=job.unit.name, clamp=job.bound, **curve.to_dict())


def _prepare(
    work: Workspace, config: settings.MlpReconstruction, importances: Importances, unit: Unit, rows: Rows
) -> Job:
    names = _mlp(unit)
    inputs, targets = _teacher_pairs(work, unit, rows)
    importance = importances.at(names.fc2, Visit(unit, rows, targets, rows))  # the student sees what the teacher sees
    if work.images.ragged and importance.each is not None:
        importance = ImportanceMap(each=TokenRows(importance.each))
    bound = positive_percentile(lambda: _hidden(work, names, inputs), config.percentile)
    mlp = MlpModules.of(work.student, names)
    parameters = [p for layer in (mlp.fc1, mlp.fc2) for p in (layer.weight, layer.bias) if p is not None]
    samples = draw_samples(
        len(inputs), config.batch, config.steps, generator_for(work.recipe.seed, config.NAME, unit.name)
    )
    batch, channels = samples.shape[1], len(mlp.fc2.weight)
    # the sum over the tokens, the mean over images and channels, of the plain output and of the clamped one
    both = torch.tensor([1.0, config.alpha], device=work.device) * (config.loss_scale / (batch * channels))
    # a row is an image, or of scenes a token, of which every step has another number
    of_images = None if work.images.ragged else both.repeat_interleave(batch // work.ranks.count)

    def loss_of(index: Tensor, now: Now) -> Tensor:
        hidden = relu_and_clamped(_learning(mlp.fc1, inputs[index]), bound)
        out = _learning(mlp.fc2, mlp.second(hidden)).flatten(0, 1)
        factors = both.repeat_interleave(hidden.shape[1]) if of_images is None else of_images
        return weighted_error(out, targets, index.repeat(2), importance, factors)

    loop = Loop(
        loss_of=loss_of,
        groups=[Group(parameters, cosine(config.learning_rate, config.steps))],
        samples=samples,
        device=work.device,
        capture=work.ranks.agree_that(recordable(inputs, targets, importance.each)),
        ranks=work.ranks,
    )
    cached = sum(getattr(rows, "nbytes", 0) for rows in (inputs, targets, importance.each))
    hidden = batch * inputs[slice(0, 1)].numel() // mlp.fc1.weight.shape[1] * len(mlp.fc1.weight)
    return Job(unit, loop, inputs, targets, bound, cached, 4 * HIDDEN_TENSORS * hidden)


def _learning(layer: Any, x: Tensor) -> Tensor:
    """A linear layer that is being trained."""
    if kernels.usable(x):
        from aphq.kernels.linear import linear

        return linear(x, layer.weight, layer.bias)
    out: Tensor = layer(x)
    return out


def relu_and_clamped(x: Tensor, bound: float) -> Tensor:
    """[2, *x.shape]: relu(x), and the same clamped at `bound`."""
    if kernels.usable(x):
        from aphq.kernels.relu import relu_and_clamped as fused

        return fused(x, bound)
    if compiled.usable(x):
        return compiled.relu_and_clamped(x, bound)
    hidden = x.relu()
    return torch.stack([hidden, hidden.clamp_max(bound)])


@torch.no_grad()
def _teacher_pairs(work: Workspace, unit: Unit, rows: Rows) -> tuple[CachedRows, CachedRows]:
    """What the teacher's MLP got and gave, for every image."""
    kept: dict[str, Any] = {}

    def keep(mlp: str, side: str, start: int, x: Tensor) -> None:
        if work.images.ragged:
            kept.setdefault(side, TokenRows(RaggedRows(work.store))).maps.append(x)
            return
        if side not in kept:
            kept[side] = work.store.allocate((len(rows), *x.shape[1:]))
        kept[side].data[start : start + len(x)].copy_(x)

    _watch(work, [unit], rows, [_mlp(unit)], keep)
    return kept["input"], kept["output"]


@torch.no_grad()
def _refresh(work: Workspace, jobs: list[Job], images: Rows) -> None:
    """The same for several MLPs and other images, in place."""
    rows: dict[tuple[str, str], Any] = {
        (_mlp(job.unit).name, side): at for job in jobs for side, at in (("input", job.inputs), ("output", job.targets))
    }

    def replace(mlp: str, side: str, start: int, x: Tensor) -> None:
        rows[mlp, side].data[start : start + len(x)].copy_(x)

    until = work.units.index(jobs[-1].unit) + 1
    _watch(work, work.units[:until], images, [_mlp(job.unit) for job in jobs], replace)


def _watch(
    work: Workspace,
    units: Sequence[Unit],
    rows: Rows,
    mlps: Sequence[Mlp],
    see: Callable[[str, str, int, Tensor], None],
) -> None:
    """The teacher's units over the rows; `see` is told each MLP, "input" or "output", the first row, and the rows."""
    first = {mlp.name: work.teacher.get_submodule(mlp.fc1) for mlp in mlps}
    last = {mlp.name: work.teacher.get_submodule(mlp.fc2) for mlp in mlps}
    start = 0

    def output(mlp: str, x: Tensor) -> Tensor:
        see(mlp, "output", start, x)
        return x

    with watch_inputs(first, lambda mlp, x: see(mlp, "input", start, x[0])), change_outputs(last, output):
        for start in range(0, len(rows), work.pass_batch):
            run_units(work.teacher, units, rows[slice(start, start + work.pass_batch)])


@torch.no_grad()
def _hidden(work: Workspace, names: Mlp, inputs: CachedRows) -> Iterator[Tensor]:
    """The teacher's post-GELU activations, batch by batch."""
    mlp = MlpModules.of(work.teacher, names)
    for start in range(0, len(inputs), work.pass_batch):
        yield mlp.act(mlp.fc1(inputs[slice(start, start + work.pass_batch)]))
