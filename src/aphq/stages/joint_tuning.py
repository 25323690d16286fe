"""Joint tuning: the whole quantized network learns to say what the float teacher says, on fresh views.

Reconstruction unit by unit never sees how the units' errors add up. Here all of them learn at once: the scales of
activations, what stays in float, and, if they are given a rate, weights straight through their rounding. The loss is
the distillation loss at the logits plus the mean relative error of the units' outputs, which tells early units more
than the logits alone would.

A network that is nearly lossless has more to lose than to gain by learning from blended views. So calibration images as
they are have the last word: if they come out further from the teacher than they went in, all is put back.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor, nn

from aphq import settings
from aphq.engine.loop import Group, Loop, Now, by_magnitude, cosine, draw_samples
from aphq.engine.seeds import generator_for, seed_for, seeded
from aphq.engine.store import push
from aphq.engine.workspace import Workspace
from aphq.models.architecture import made, run_units
from aphq.models.student import enable
from aphq.quant.straight_through import StraightThrough
from aphq.stages.batches import recordable
from aphq.stages.learnable import Learnable

log = logging.getLogger(__name__)
JUDGES, JUDGING_SCENES = 256, 32  # calibration images; scenes go through a detector one by one


def tune_jointly(work: Workspace, config: settings.JointTuning) -> None:
    """The stage: all units at once, so its checkpoint comes at the end."""
    enable(work.student)
    if work.recall(config.NAME, work.units[-1].name) is not None:  # the last to be written
        for unit in work.units:
            work.restore_unit(config.NAME, unit)
        return
    learned = Learnable.of(work, work.units, config.quantized_share, seed_for(work.recipe.seed, config.NAME))
    weight_scales = learned.weight_scales if config.weight_lr else []
    parameters = [*learned.scales, *weight_scales, *(learned.rest if config.float_lr else ())]
    work.progress.start(config.NAME, config.steps)
    if config.steps and parameters:
        _learn(work, config, learned, parameters)
    for layer in learned.layers:
        layer.bake()  # what did not learn, or was put back
    for unit in work.units:
        work.save_unit(config.NAME, unit)
    work.progress.finish()


def _learn(work: Workspace, config: settings.JointTuning, learned: Learnable, parameters: list[Tensor]) -> None:
    """Tune, and put everything back if that did harm."""
    before, kept = divergence(work), {name: x.to("cpu", copy=True) for name, x in work.student.state_dict().items()}
    with (
        seeded(work.recipe.seed, config.NAME, device=work.device),
        learned.rounded_by(StraightThrough if config.weight_lr else None, parameters),
    ):
        curve = _loop(work, config, learned).run(work.progress.advance)
    after = divergence(work)
    put_back = work.ranks.decide(math.isnan(after) or after > before)
    if put_back:
        work.student.load_state_dict(kept)
        text = "joint tuning took the calibration images further from the float model (%.3g to %.3g): put back"
        log.warning(text, before, after)
    how = {"divergence_before": before, "divergence_after": after, "put_back": put_back}
    work.folder.event("unit", stage=config.NAME, unit="all", **how, **curve.to_dict())


@torch.no_grad()
def divergence(work: Workspace) -> float:
    """How far the student's predictions are from the teacher's, on calibration images as they are, spread evenly. The
    student has learned from them: this tells harm from gain, and not what was learned by heart."""
    together, most = (1, JUDGING_SCENES) if work.images.ragged else (work.pass_batch, JUDGES)
    rows = work.image_rows()
    total, judges = 0.0, torch.linspace(0, len(rows) - 1, min(most, len(rows))).long()
    for index in judges.split(together):
        x = rows[index]
        got, expected = (run_units(model, work.units, x) for model in (work.student, work.teacher))
        total += float(work.distillation.loss(got, expected)) * len(index)
    return total / len(judges)


def _loop(work: Workspace, config: settings.JointTuning, learned: Learnable) -> Loop:
    steps = config.steps
    held: Any = work.image_rows()
    if config.views.every:
        held = work.views(config.views, config.NAME, "0")
    elif not work.images.ragged:
        held = push(lambda x: x, held, work.store, work.pass_batch)  # where a recorded step can read them
    samples = draw_samples(len(held), config.batch, steps, generator_for(work.recipe.seed, config.NAME))
    share = 1 / samples.shape[1]

    def loss_of(index: Tensor, now: Now) -> Tensor:
        x = held[index]
        with torch.no_grad():
            expected = outputs(work, work.teacher, x)
        got = outputs(work, work.student, x)
        errors = [relative_error(a, b) for a, b in zip(got[:-1], expected[:-1], strict=True)]
        loss = config.logit_weight * work.distillation.loss(got[-1], expected[-1], config.temperature)
        loss = loss + config.feature_weight * torch.stack(errors).mean()
        return loss * (len(index) * share)  # a mean over my rows; the processes' losses add up to one over all

    def redraw(step: int) -> None:
        work.views(config.views, config.NAME, str(step), into=held)

    scales = [(p, float(p.data.mean())) for p in (*learned.scales, *learned.weight_scales) if p.requires_grad]
    return Loop(
        loss_of=loss_of,
        groups=[
            *by_magnitude(learned.masters, config.weight_lr, steps),
            *by_magnitude(scales, config.scale_lr, steps),
            Group(learned.rest if config.float_lr else [], cosine(config.float_lr, steps)),
        ],
        samples=samples,
        device=work.device,
        after_step=learned.keep_scales_positive,
        clock=learned.clock,
        ranks=work.ranks,
        capture=work.ranks.agree_that(recordable(held)),
        refresh=redraw if config.views.every else None,
        refresh_every=max(1, config.views.every),
    )


def outputs(work: Workspace, model: nn.Module, x: Any) -> list[Any]:
    """What each unit gives; the last are the logits."""
    found = []
    for unit in work.units:
        x = unit.run(model, x)
        found.append(made(unit, x))
        x = unit.bridge(model, x)
    found[-1] = x
    return found


def relative_error(got: Any, expected: Any) -> Tensor:
    """The squared error, relative to how much the expected output varies; of several tensors the mean."""
    if not isinstance(expected, Tensor):
        return torch.stack([relative_error(got[name], x) for name, x in expected.items()]).mean()
    return (got - expected).square().mean() / expected.var().clamp_min(1e-12)
