"""Block reconstruction: rounding and activation scales learned unit by unit (QDrop + AdaRound, paper Sec. 3.2).

Each unit is trained to give the float teacher's output from a mix of the teacher's and the quantized prefix's input,
with every activation inside it quantized or not at random, under the importance-weighted error (Eq. 8); the head is
trained on the distillation loss itself. Then its weights are rounded for good and the walk moves on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aphq import recipe as settings
from aphq.engine.loop import Curve, Group, Loop, LossOf, Now, constant, cosine, draw_samples
from aphq.engine.ragged import StateRows
from aphq.engine.ranks import Ranks
from aphq.engine.seeds import generator_for, seed_for, seeded
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import State, Unit, made
from aphq.models.student import enable
from aphq.quant.affine import SMALLEST_SCALE
from aphq.quant.drop import Drop
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding
from aphq.stages.batches import map_error, mixed_rows, recordable, weighted_error
from aphq.stages.importance import ImportanceMap, Importances

ErrorOf = Callable[[Any, Tensor], Tensor]  # (outputs, their indices) -> scalar


def reconstruct_blocks(work: Workspace, config: settings.BlockReconstruction) -> None:
    """The stage: every unit, in order, each on what the quantized units before it give."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    if todo:
        importances = Importances(work, config.importance)
        work.progress.start(config.NAME, config.steps * len(todo))
        for visit in work.walk():
            unit = visit.unit
            for module in unit_modules(work, unit):
                enable(module)
            if unit in todo:
                curve = _reconstruct(work, config, importances, visit)
                work.save_unit(config.NAME, unit)
                work.folder.event("unit", stage=config.NAME, unit=unit.name, **curve.to_dict())
        work.progress.finish()


def unit_modules(work: Workspace, unit: Unit) -> list[nn.Module]:
    return [work.student.get_submodule(name) for name in unit.modules]


@contextmanager
def relu_in_quantizer(work: Workspace, unit: Unit) -> Iterator[None]:
    """Inside the block the unit's ReLU is part of the quantizer after it, which saves passes over the widest tensor."""
    mlp: Any = None if unit.mlp is None else work.student.get_submodule(unit.mlp)
    quantizer = None if mlp is None else mlp.fc2.input_quantizer
    if quantizer is None or type(mlp.act) is not nn.ReLU or type(mlp.norm) is not nn.Identity:
        yield
        return
    act, mlp.act, quantizer.relu = mlp.act, nn.Identity(), True
    try:
        yield
    finally:
        mlp.act, quantizer.relu = act, False


@dataclass
class Learnable:
    """What is learned in one unit; entering the block prepares it, leaving it makes the rounding final."""

    layers: list[QuantizedLayer]
    inputs: list[Quantizer]
    config: settings.BlockReconstruction
    seed: int
    clock: Tensor  # [1], the number of the step
    ranks: Ranks

    @classmethod
    def of(cls, modules: list[nn.Module], config: settings.BlockReconstruction, seed: int, ranks: Ranks) -> Learnable:
        inside = [m for module in modules for m in module.modules()]
        layers = [m for m in inside if isinstance(m, QuantizedLayer)]
        weights = {id(layer.weight_quantizer) for layer in layers}
        inputs = [m for m in inside if isinstance(m, Quantizer) and id(m) not in weights]
        return cls(layers, inputs, config, seed, torch.zeros(1, dtype=torch.long, device=ranks.device), ranks)

    def __enter__(self) -> Learnable:
        for layer in self.layers:
            if layer.weight_quantizer is not None:
                rounding = LearnedRounding(layer.weight, layer.weight_quantizer, self.config.zeta, self.config.gamma)
                layer.rounding = rounding
        for number, quantizer in enumerate(self.inputs):
            quantizer.drop = self.drop(self.config.quantized_share, number + 1)
            quantizer.scale.requires_grad_(True)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.bake()
        for quantizer in self.inputs:
            quantizer.drop = None
            quantizer.scale.requires_grad_(False)
            quantizer.scale.grad = None

    def drop(self, share: float, number: int) -> Drop | None:
        """The drops of the `number`-th place where something is dropped; None if nothing ever is."""
        if share >= 1:
            return None
        return Drop(share, (self.seed + number) & 0x7FFFFFFF, self.clock, self.ranks.rank, self.ranks.count)

    @property
    def roundings(self) -> list[LearnedRounding]:
        return [layer.rounding for layer in self.layers if layer.rounding is not None]

    @property
    def scales(self) -> list[Tensor]:
        return [quantizer.scale for quantizer in self.inputs]

    def keep_scales_positive(self) -> None:
        if self.scales:
            torch._foreach_clamp_min_(self.scales, SMALLEST_SCALE)


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
    with (
        seeded(work.recipe.seed, config.NAME, unit.name, device=device),
        Learnable.of(unit_modules(work, unit), config, seed, work.ranks) as learned,
        relu_in_quantizer(work, unit),
    ):
        roundings = learned.roundings
        if steps == 0 or not (roundings or learned.scales):
            return Curve(torch.empty(0), None)
        mixing = learned.drop(config.input_quantized_share, 0)

        def forward(index: Tensor) -> Tensor:
            if mixing is None:
                x = visit.student_in[index]
            else:
                x = mixed_rows(visit.teacher_in, visit.student_in, index, mixing)
            return error_of(unit.run(work.student, x), index)

        def loss_of(index: Tensor, now: Now) -> Tensor:
            undecided = [rounding.soften(now["beta"]) for rounding in roundings]
            loss = forward(index) * scale
            # every process adds its share of the one regulariser
            return loss + now["regulariser"] * torch.cat(undecided).sum() / work.ranks.count if undecided else loss

        with torch.no_grad():
            for rounding in roundings:
                rounding.soften(torch.tensor(config.beta_start, device=device))
            (first,) = work.ranks.add([forward(samples[0, work.ranks.share_of(samples.shape[1])].to(device))])
            scale = config.first_loss / first.clamp_min(1e-30)
        loop = _loop(work, config, learned, samples, loss_of)
        reads = (visit.teacher_in, visit.teacher_out, visit.student_in, importance.each)
        loop.capture = work.ranks.agree_that(recordable(*reads))
        return loop.run(lambda n: work.progress.advance(n, unit.name))


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
    return Loop(
        loss_of=loss_of,
        groups=[
            Group([rounding.alpha for rounding in learned.roundings], constant(config.rounding_lr, steps)),
            Group(learned.scales, cosine(config.scale_lr, steps)),
        ],
        samples=samples,
        device=work.device,
        schedules={"regulariser": regulariser, "beta": beta},
        after_step=learned.keep_scales_positive,
        clock=learned.clock,
        ranks=work.ranks,
    )
