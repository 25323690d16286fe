"""Output correction: what a layer adds to the residual stream gets a factor and a constant per channel, in closed form.

Quantization changes not only the noise of a layer's output but its mean and its spread. For every layer whose output
means the same in teacher and student, t = a s + b is fitted by least squares, channel by channel, on what the quantized
units before it give. The factor goes into the weight's scale, one per output channel already, and the constant into the
bias, so that nothing is added to what runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from aphq import recipe as settings
from aphq.engine.hooks import change_outputs
from aphq.engine.workspace import Visit, Workspace
from aphq.models.student import enable
from aphq.quant.layers import QuantizedLayer
from aphq.stages.learnable import unit_modules

FACTORS = (0.5, 2.0)  # a fit beyond these says that the channel carries nothing worth scaling


def correct_outputs(work: Workspace, config: settings.OutputCorrection) -> None:
    """The stage: every unit, in order, each on what the corrected units before it give."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    work.progress.start(config.NAME, len(todo))
    for visit in work.walk(work.image_rows(config.images)) if todo else ():
        for module in unit_modules(work, visit.unit):
            enable(module)
        if visit.unit in todo:
            for name in visit.unit.writers:
                _correct(work, visit, name, config)
            work.save_unit(config.NAME, visit.unit)
            work.progress.advance(1, visit.unit.name)
    work.progress.finish()


@torch.no_grad()
def _correct(work: Workspace, visit: Visit, name: str, config: settings.OutputCorrection) -> None:
    layer: Any = work.student.get_submodule(name)
    if not isinstance(layer, QuantizedLayer):
        return
    got, expected, spread, together = moments(work, visit, name)
    factor = torch.ones_like(got)
    shape = [-1 if d == layer.out_dim else 1 for d in range(layer.weight.ndim)]
    if config.factors and (layer.weight_quantizer is None or layer.weight_quantizer.scale.numel() == len(factor)):
        factor = (together / spread.clamp_min(1e-12)).clamp(*FACTORS)
        layer.weight.data *= factor.view(shape)
        if layer.weight_quantizer is not None:  # by the same factor: the codes stay
            layer.weight_quantizer.scale.data *= factor.view(layer.weight_quantizer.scale.shape)
    old = torch.zeros_like(got) if layer.bias is None else layer.bias.data
    layer.add_to_bias(expected - factor * got + (factor - 1) * old)


def moments(work: Workspace, visit: Visit, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Per channel of a layer's output: the student's mean, the teacher's, the student's variance, their covariance."""
    layer: Any = work.student.get_submodule(name)
    sums: Tensor | None = None
    count = 0
    for start in range(0, len(visit.teacher_in), work.pass_batch):
        rows = slice(start, start + work.pass_batch)
        s = output_of(work.student, visit, name, visit.student_in[rows])
        t = output_of(work.teacher, visit, name, visit.teacher_in[rows])
        s, t = (layer.channels_last(x).flatten(0, -2).double() for x in (s, t))
        part = torch.stack([s.sum(0), t.sum(0), s.square().sum(0), (s * t).sum(0)])
        sums = part if sums is None else sums + part
        count += len(s)
    assert sums is not None, "a calibration set is never empty"
    got, expected, square, product = sums / count
    found = got, expected, square - got.square(), product - got * expected
    return tuple(x.float() for x in found)


def output_of(model: nn.Module, visit: Visit, name: str, x: Tensor) -> Tensor:
    """What the layer gives while its unit runs on `x`."""
    seen: list[Tensor] = []

    def see(_: str, output: Tensor) -> Tensor:
        seen.append(output)
        return output

    with change_outputs({name: model.get_submodule(name)}, see):
        visit.unit.run(model, x)
    return seen[0]
