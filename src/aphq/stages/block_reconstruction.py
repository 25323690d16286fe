"""Block reconstruction: weights and activation scales learned unit by unit (QDrop + AdaRound, paper Sec. 3.2).

Each unit is trained to give the float teacher's output from a mix of the teacher's and the quantized prefix's input,
with every activation inside it quantized or not at random, under the importance-weighted error (Eq. 9); the head is
trained on the distillation loss itself. Weights learn their rounding, or, given a rate of their own, straight through
it. Then they are rounded for good and the walk moves on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.loop import Curve, Group, Loop, LossOf, Now, by_magnitude, constant, cosine, draw_samples
from aphq.engine.ragged import StateRows
from aphq.engine.seeds import generator_for, seed_for, seeded
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import State, Unit, made
from aphq.models.distillation import LogitDistillation
from aphq.models.student import enable
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding
from aphq.quant.straight_through import StraightThrough
from aphq.stages.batches import map_error, mixed_rows, recordable, weighted_error
from aphq.stages.importance import ImportanceMap, Importances
from aphq.stages.learnable import Learnable, Rounding, unit_modules

log = logging.getLogger(__name__)
FIRST_SCENES = 32  # the error to start from is a mean over these: they come one by one, and one may hold no object
ErrorOf = Callable[[Any, Tensor], Tensor]  # (outputs, their indices) -> scalar


def reconstruct_blocks(work: Workspace, config: settings.BlockReconstruction) -> None:
    """The stage: every unit, in order, each on what the quantized units before it give."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    if todo:
        importances = Importances(work, config.importance)
        work.progress.start(config.NAME, config.steps * len(todo))
        for visit in work.walk(work.pool(config.views, config.NAME)):
            unit = visit.unit
            for module in unit_modules(work, unit):
                enable(module)
            if unit in todo:
                if unit.kind == "head" and isinstance(work.distillation, LogitDistillation):
                    logits = made(unit, visit.teacher_out[slice(0, len(work.images))])
                    assert isinstance(logits, Tensor)  # of which that distillation is
                    note_classes(work, config.NAME, logits)
                curve = _reconstruct(work, config, importances, visit)
                work.save_unit(config.NAME, unit)
                work.folder.event("unit", stage=config.NAME, unit=unit.name, **curve.to_dict())
            del visit  # its rows go while the walk makes the next ones
        work.progress.finish()


def note_classes(work: Workspace, stage: str, logits: Tensor) -> None:
    """How many classes the float model sees in the images: what they do not show is learned worst."""
    shown, classes = len(logits.argmax(1).unique()), logits.shape[1]
    log.info("the float model sees %d of its %d classes in the calibration images", shown, classes)
    work.folder.event("note", stage=stage, classes_shown=shown, classes=classes)


def _reconstruct(
    work: Workspace, config: settings.BlockReconstruction, importances: Importances, visit: Visit
) -> Curve:
    unit, steps, device = visit.unit, config.steps, work.device
    samples = draw_samples(
        len(visit.teacher_in), config.batch, steps, generator_for(work.recipe.seed, config.NAME, unit.name)
    )
    importance = ImportanceMap() if unit.kind == "head" else importances.at(unit.name, visit)
    error_of = _error(work, importance, visit, samples.shape[1])
    seed = seed_for(work.recipe.seed, config.NAME, unit.name)
    learned = Learnable.of(work, (unit,), config.quantized_share, seed)
    parameters = [*learned.scales, *(learned.rest if config.float_lr else ())]
    with (
        seeded(work.recipe.seed, config.NAME, unit.name, device=device),
        learned.rounded_by(_rounding(config), parameters),
    ):
        roundings = learned.up_or_down
        if steps == 0 or not (learned.roundings or parameters):
            return Curve(torch.empty(0), None)
        mixing = learned.drop(config.input_quantized_share, 0)

        def forward(index: Tensor) -> Tensor:
            if mixing is None:
                x = visit.student_in[index]
            else:
                x = mixed_rows(visit.teacher_in, visit.student_in, index, mixing)
            return error_of(unit.run(work.student, x), index)

        def loss_of(index: Tensor, now: Now) -> tuple[Tensor, Tensor]:
            undecided = [rounding.soften(now["beta"]) for rounding in roundings]
            error = forward(index) * scale
            if not undecided:
                return error, error
            # every process adds its share of the one regulariser
            return error + now["regulariser"] * torch.cat(undecided).sum() / work.ranks.count, error

        with torch.no_grad():
            for rounding in roundings:
                rounding.soften(torch.tensor(config.beta_start, device=device))
            looked_at = FIRST_SCENES if work.images.ragged else 1
            drawn = samples[:looked_at, work.ranks.share_of(samples.shape[1])].to(device)
            (first,) = work.ranks.add([torch.stack([forward(index) for index in drawn]).mean()])
            scale = config.first_loss / first.clamp_min(1e-30)
        loop = _loop(work, config, learned, samples, loss_of)
        reads = (visit.teacher_in, visit.teacher_out, visit.student_in, importance.each)
        loop.capture = work.ranks.agree_that(recordable(*reads))
        if config.views.every:
            loop.refresh_every = config.views.every
            loop.refresh = lambda step: work.refresh(visit, work.views(config.views, config.NAME, unit.name, str(step)))
        curve = loop.run(lambda n: work.progress.advance(n, unit.name))
    if config.views.every:
        work.refresh(visit, work.image_rows())  # the walk goes on as it would after a stop
    return curve


def _rounding(config: settings.BlockReconstruction) -> Callable[[Tensor, Quantizer], Rounding]:
    if config.weight_lr:
        return StraightThrough
    return lambda weight, quantizer: LearnedRounding(weight, quantizer, config.zeta, config.gamma)


def _error(work: Workspace, importance: ImportanceMap, visit: Visit, batch: int) -> ErrorOf:
    """The reconstruction error of `batch` outputs."""
    unit, loss = visit.unit, work.distillation.loss
    if unit.kind == "head":  # a mean over my rows; the processes' losses add up to one over all
        return lambda out, index: loss(made(unit, out), made(unit, visit.teacher_out[index])) * (len(index) / batch)
    if isinstance(visit.teacher_out, StateRows):
        return _state_error(importance, unit, visit.teacher_out)
    elements = visit.teacher_out[slice(0, 1)].numel()
    mine = batch // work.ranks.count
    factors = torch.full((mine,), 1 / (batch * elements), device=work.device)  # the mean over everything
    return lambda out, index: weighted_error(out, visit.teacher_out, index, importance, factors)


def _state_error(importance: ImportanceMap, unit: Unit, targets: StateRows) -> ErrorOf:
    """Of one image: the weighted mean of its one map, or that of several maps."""
    if len(unit.makes) > 1:
        return lambda out, index: map_error(out, made(unit, targets[index]))
    rows = targets.fields[unit.makes[0]]

    def error(out: State, index: Tensor) -> Tensor:
        x = out[unit.makes[0]]
        return weighted_error(x, rows, index, importance, x.new_full((1,), 1 / x.numel()))

    return error


def _loop(
    work: Workspace, config: settings.BlockReconstruction, learned: Learnable, samples: Tensor, loss_of: LossOf
) -> Loop:
    steps = config.steps
    warm = int(config.warmup * steps)
    regulariser = constant(config.regulariser, steps)
    regulariser[:warm] = 0
    beta = torch.full((steps,), config.beta_start)
    beta[warm:] = torch.linspace(config.beta_start, config.beta_end, steps - warm)
    settling = config.settling * torch.linspace(-1, 1, steps, device=work.device).clamp_min(0)

    def after_step() -> None:
        learned.keep_scales_positive()
        if config.settling:
            learned.settle(settling)

    return Loop(
        loss_of=loss_of,
        groups=[
            Group([rounding.alpha for rounding in learned.up_or_down], constant(config.rounding_lr, steps)),
            *by_magnitude(learned.masters, config.weight_lr, steps),
            Group(learned.scales, cosine(config.scale_lr, steps)),
            Group(learned.rest if config.float_lr else [], cosine(config.float_lr, steps)),
        ],
        samples=samples,
        device=work.device,
        schedules={"regulariser": regulariser, "beta": beta},
        after_step=after_step,
        clock=learned.clock,
        ranks=work.ranks,
        apart=True,
    )
