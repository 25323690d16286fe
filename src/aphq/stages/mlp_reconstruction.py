"""MLP reconstruction: GELU becomes ReLU, and each MLP is retrained alone to say what it said (paper Sec. 3.3).

Input and target are the teacher's, so the MLPs are independent of each other. The loss is the importance-weighted
error of the plain output (Eq. 9) plus alpha times that of the output with activations clamped at a percentile
(Eq. 10-12), which lets the range shrink without losing the gradient of what is clipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aphq import recipe as settings
from aphq.engine.hooks import change_outputs, watch_inputs
from aphq.engine.loop import Group, Loop, Now, cosine, draw_samples
from aphq.engine.seeds import generator_for
from aphq.engine.store import Activations, Rows
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import Unit
from aphq.models.student import swap_activation
from aphq.stages.importance import ImportanceMap, Importances
from aphq.stages.percentile import positive_percentile


def reconstruct_mlps(work: Workspace, config: settings.MlpReconstruction) -> None:
    """The stage: every unit with an MLP, in order."""
    stage, units = config.NAME, [unit for unit in work.units if unit.mlp is not None]
    for unit in units:
        swap_activation(work.student, _mlp(unit))
    todo = [unit for unit in units if not work.restore_unit(stage, unit)]
    if not todo:
        return
    importances = Importances(work, config.importance, stage, [_mlp(unit) for unit in todo])
    work.progress.start(stage, config.steps * len(todo))
    for unit, rows in work.walk_one(work.teacher):
        if unit in todo:
            losses, bound = _reconstruct(work, config, importances, unit, rows)
            work.save_unit(stage, unit)
            work.folder.event("unit", stage=stage, unit=unit.name, clamp=bound, losses=thin(losses))
        if unit is todo[-1]:
            break
    work.progress.finish()


def _mlp(unit: Unit) -> str:
    assert unit.mlp is not None
    return unit.mlp


def _reconstruct(
    work: Workspace, config: settings.MlpReconstruction, importances: Importances, unit: Unit, rows: Rows
) -> tuple[Tensor, float]:
    name = _mlp(unit)
    inputs, targets = _teacher_pairs(work, unit, rows)
    importance = _importance(work, config, importances, unit, rows)
    bound = positive_percentile(lambda: _hidden(work, name, inputs), config.percentile)
    mlp: Any = work.student.get_submodule(name)
    parameters = [p for layer in (mlp.fc1, mlp.fc2) for p in (layer.weight, layer.bias) if p is not None]

    def distance(out: Tensor, target: Tensor, index: Tensor) -> Tensor:
        """Sum over the tokens, mean over images and channels."""
        weighted = importance.weigh((out - target).square(), index)
        return weighted.flatten(1, -2).sum(1).mean()

    def loss_of(index: Tensor, now: Now) -> Tensor:
        target = targets[index]
        hidden = mlp.act(mlp.fc1(inputs[index]))
        direct = mlp.fc2(mlp.norm(hidden))
        clamped = mlp.fc2(mlp.norm(hidden.clamp_max(bound)))
        return config.loss_scale * (distance(direct, target, index) + config.alpha * distance(clamped, target, index))

    generator = generator_for(work.recipe.seed, config.NAME, unit.name)
    loop = Loop(
        loss_of=loss_of,
        groups=[Group(parameters, cosine(config.learning_rate, config.steps))],
        samples=draw_samples(len(inputs), config.batch, config.steps, generator),
        device=work.device,
    )
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        return loop.run(lambda n: work.progress.advance(n, unit.name)), bound
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None


@torch.no_grad()
def _teacher_pairs(work: Workspace, unit: Unit, rows: Rows) -> tuple[Activations, Activations]:
    """What the teacher's MLP got and gave, for every image."""
    mlp = work.teacher.get_submodule(_mlp(unit))
    kept: dict[str, Activations] = {}
    start = 0

    def keep(key: str, x: Tensor) -> None:
        if key not in kept:
            kept[key] = work.store.allocate((len(rows), *x.shape[1:]))
        kept[key].data[start : start + len(x)].copy_(x)

    def keep_output(_: str, x: Tensor) -> Tensor:
        keep("output", x)
        return x

    with watch_inputs({"mlp": mlp}, lambda _, x: keep("input", x[0])), change_outputs({"mlp": mlp}, keep_output):
        for start in range(0, len(rows), work.batch):
            unit.run(work.teacher, rows[slice(start, start + work.batch)])
    return kept["input"], kept["output"]


@torch.no_grad()
def _hidden(work: Workspace, name: str, inputs: Activations) -> Iterator[Tensor]:
    """The teacher's post-GELU activations, batch by batch."""
    mlp: Any = work.teacher.get_submodule(name)
    for start in range(0, len(inputs), work.batch):
        yield mlp.act(mlp.fc1(inputs[slice(start, start + work.batch)]))


def _importance(
    work: Workspace, config: settings.MlpReconstruction, importances: Importances, unit: Unit, rows: Rows
) -> ImportanceMap:
    """The map at the MLP's output; here the student sees what the teacher sees."""
    needs_visit = config.importance.kind in ("ph", "aph", "brecq")
    outputs = work.forward(work.teacher, unit.run, rows) if needs_visit else rows
    return importances.at(_mlp(unit), Visit(unit, rows, outputs, rows))


def thin(losses: Tensor, points: int = 200) -> list[float]:
    """A loss curve short enough for a log: means over equal stretches."""
    chunks = losses.double().tensor_split(min(points, max(1, len(losses)))) if len(losses) else ()
    return [float(f"{chunk.mean().item():.5g}") for chunk in chunks]
