"""Block reconstruction: rounding and activation scales learned unit by unit (QDrop + AdaRound, paper Sec. 3.2).

Each unit is trained to give the float teacher's output from a mix of the teacher's and the quantized prefix's input,
with every activation inside it quantized or not at random, under the importance-weighted error (Eq. 8); the head is
trained on the distillation loss itself. Then its weights are rounded for good and the walk moves on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aphq import recipe as settings
from aphq.engine.loop import Group, Loop, LossOf, Now, constant, cosine, draw_samples
from aphq.engine.seeds import generator_for, seeded
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import Unit
from aphq.models.student import enable
from aphq.quant.affine import SMALLEST_SCALE
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer, random_mask
from aphq.quant.rounding import LearnedRounding
from aphq.stages.distillation import distillation_loss
from aphq.stages.importance import Importances
from aphq.stages.mlp_reconstruction import thin

ErrorOf = Callable[[Tensor, Tensor], Tensor]  # (outputs, their indices) -> scalar


def reconstruct_blocks(work: Workspace, config: settings.BlockReconstruction) -> None:
    """The stage: every unit, in order, each on what the quantized units before it give."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    if todo:
        sites = [unit.name for unit in todo if unit.kind != "head"]
        importances = Importances(work, config.importance, config.NAME, sites)
        work.progress.start(config.NAME, config.steps * len(todo))
        for visit in work.walk():
            unit = visit.unit
            for module in unit_modules(work, unit):
                enable(module)
            if unit in todo:
                losses = _reconstruct(work, config, importances, visit)
                work.save_unit(config.NAME, unit)
                work.folder.event("unit", stage=config.NAME, unit=unit.name, losses=thin(losses))
        work.progress.finish()


def unit_modules(work: Workspace, unit: Unit) -> list[nn.Module]:
    return [work.student.get_submodule(name) for name in unit.modules]


@dataclass
class Learnable:
    """What is learned in one unit; entering the block prepares it, leaving it makes the rounding final."""

    layers: list[QuantizedLayer]
    inputs: list[Quantizer]
    config: settings.BlockReconstruction

    @classmethod
    def of(cls, modules: list[nn.Module], config: settings.BlockReconstruction) -> Learnable:
        inside = [m for module in modules for m in module.modules()]
        layers = [m for m in inside if isinstance(m, QuantizedLayer)]
        weights = {id(layer.weight_quantizer) for layer in layers}
        inputs = [m for m in inside if isinstance(m, Quantizer) and id(m) not in weights]
        return cls(layers, inputs, config)

    def __enter__(self) -> Learnable:
        for layer in self.layers:
            if layer.weight_quantizer is not None:
                rounding = LearnedRounding(layer.weight, layer.weight_quantizer, self.config.zeta, self.config.gamma)
                layer.rounding = rounding
        for quantizer in self.inputs:
            quantizer.share = self.config.quantized_share
            quantizer.scale.requires_grad_(True)
        return self

    def __exit__(self, *_: object) -> None:
        for layer in self.layers:
            layer.bake()
        for quantizer in self.inputs:
            quantizer.share = 1.0
            quantizer.scale.requires_grad_(False)
            quantizer.scale.grad = None

    @property
    def roundings(self) -> list[LearnedRounding]:
        return [layer.rounding for layer in self.layers if layer.rounding is not None]

    @property
    def scales(self) -> list[Tensor]:
        return [quantizer.scale for quantizer in self.inputs]

    def keep_scales_positive(self) -> None:
        for scale in self.scales:
            scale.clamp_(min=SMALLEST_SCALE)


def _reconstruct(
    work: Workspace, config: settings.BlockReconstruction, importances: Importances, visit: Visit
) -> Tensor:
    unit, steps, device = visit.unit, config.steps, work.device
    error_of = _error(work, importances, visit)
    samples = draw_samples(
        len(visit.teacher_in), config.batch, steps, generator_for(work.recipe.seed, config.NAME, unit.name)
    )
    with (
        seeded(work.recipe.seed, config.NAME, unit.name, device=device),
        Learnable.of(unit_modules(work, unit), config) as learned,
    ):
        roundings = learned.roundings
        if steps == 0 or not (roundings or learned.scales):
            return torch.empty(0)

        def forward(index: Tensor) -> Tensor:
            teacher = visit.teacher_in[index]
            quantized = visit.student_in[index] if visit.student_in is not visit.teacher_in else teacher
            mix = random_mask(teacher, config.input_quantized_share)
            return error_of(unit.run(work.student, torch.where(mix, quantized, teacher)), index)

        with torch.no_grad():
            first = forward(samples[0].to(device))
            scale = config.first_loss / first.clamp_min(1e-30)

        def loss_of(index: Tensor, now: Now) -> Tensor:
            loss = forward(index) * scale
            for rounding in roundings:
                loss = loss + now["regulariser"] * rounding.penalty(now["beta"])
            return loss

        return _loop(work, config, learned, samples, loss_of).run(lambda n: work.progress.advance(n, unit.name))


def _error(work: Workspace, importances: Importances, visit: Visit) -> ErrorOf:
    """The reconstruction error of a batch of outputs."""
    if visit.unit.kind == "head":
        return lambda out, index: distillation_loss(out, visit.teacher_out[index])
    importance = importances.at(visit.unit.name, visit)
    return lambda out, index: importance.weigh((out - visit.teacher_out[index]).square(), index).mean()


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
    )
