"""Layer inputs with massive outliers: shrunk where that is free, then clipped by what the prediction loses.

In some ViTs one channel of a few tokens is a hundred times larger than everything else. The next LayerNorm divides by
it, so the prediction hardly depends on its size, but the squared error of the layer is all about it: judged by that,
the quantizer spends its whole range on it and rounds everything else to zero. For such inputs the candidates are
judged by the distillation loss itself, with only this one quantizer on.

Where the outlier is a hidden channel of an MLP there is more to gain: c * act(u / c) equals act(u) for ReLU, and for
GELU as long as |u| is several times c, as it is for a channel that is either far below zero or huge. So u is divided by
c in fc1 and the output multiplied by c in fc2, with the largest c that leaves the prediction alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from aphq import recipe as settings
from aphq.engine.hooks import watch_inputs
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, run_units
from aphq.quant.layers import QuantizedLayer
from aphq.quant.search import FEWEST_OF_RANGE, Range, group_quantile
from aphq.stages.distillation import distillation_loss
from aphq.stages.samples import Sample

log = logging.getLogger(__name__)
TYPICAL = 0.999  # the quantile that outliers are compared with


SHRINKING = (8.0, 4.0, 2.0)  # factors c to try, the largest first; powers of two are undone exactly
HARMLESS = 1e-3  # KL at the logits that a shrunk channel may cost


@torch.no_grad()
def shrink_outliers(work: Workspace, unit: Unit, rows: Rows, config: settings.ScaleSearch) -> bool:
    """Divide the outlying hidden channels of the unit's MLP by as much as the prediction allows, in place; whether
    there were any."""
    if unit.mlp is None or not _wanted(config):
        return False
    mlp: Any = work.student.get_submodule(unit.mlp)
    hidden: list[Tensor] = []
    with watch_inputs({"fc2": mlp.fc2}, lambda _, inputs: hidden.append(inputs[0].flatten(0, -2))):
        target = _logits(work, unit, rows, config)
    size = hidden[0].abs()
    typical = group_quantile(size, (1,), TYPICAL)
    channels = (size.amax(0) > config.outlier_ratio * typical).nonzero().flatten()
    if len(channels) == 0:
        return False
    if type(mlp.norm) is not torch.nn.Identity:
        return True
    for factor in SHRINKING:
        _scale_channels(mlp, channels, factor)
        loss = float(distillation_loss(_logits(work, unit, rows, config), target))
        if loss <= HARMLESS:
            log.info("%s: %d hidden channels divided by %g (KL %.1e)", unit.name, len(channels), factor, loss)
            return True
        _scale_channels(mlp, channels, 1 / factor)
    return True


def _scale_channels(mlp: Any, channels: Tensor, factor: float) -> None:
    """act(u) becomes factor * act(u / factor)."""
    mlp.fc1.weight.data[channels] /= factor
    if mlp.fc1.bias is not None:
        mlp.fc1.bias.data[channels] /= factor
    mlp.fc2.weight.data[:, channels] *= factor


def _wanted(config: settings.ScaleSearch) -> bool:
    return config.outlier_candidates > 0 and config.method == "output_mse"


def _logits(work: Workspace, unit: Unit, rows: Rows, config: settings.ScaleSearch) -> Tensor:
    """The student's prediction for the first images, from the unit's input on."""
    rest = work.units[work.units.index(unit) + 1 :]
    out = unit.run(work.student, rows[slice(0, config.outlier_images)])
    return run_units(work.student, rest, unit.bridge(work.student, out))


def has_outliers(sample: Sample, config: settings.ScaleSearch) -> bool:
    """Whether a layer's input is so much wider than nearly all of it."""
    widest = torch.maximum(sample.range.upper, -sample.range.lower)
    typical = group_quantile(sample.values.abs(), sample.groups, TYPICAL)
    return _wanted(config) and bool((widest > config.outlier_ratio * typical).any())


@torch.no_grad()
def outlier_range(
    work: Workspace, unit: Unit, rows: Rows, layer: QuantizedLayer, sample: Sample, config: settings.ScaleSearch
) -> Range | None:
    """The input range of a layer inside `unit` that keeps the prediction best; None if its input stays in float."""
    quantizer = layer.input_quantizer
    if quantizer is None:
        return None
    full = sample.range
    widest = torch.maximum(full.upper, -full.lower)
    target = _logits(work, unit, rows, config)
    tried = []
    for factor in torch.logspace(0, torch.log10(torch.tensor(FEWEST_OF_RANGE)).item(), config.outlier_candidates):
        # the small end of a one-sided input stays whole: shrinking it gains nothing
        limit = widest * factor.to(widest)
        candidate = Range(torch.maximum(full.lower, -limit), torch.minimum(full.upper, limit))
        quantizer.set_range(candidate.lower, candidate.upper)
        quantizer.enabled = True
        tried.append((float(distillation_loss(_logits(work, unit, rows, config), target)), candidate))
        quantizer.enabled = False
    loss, best = min(tried, key=lambda pair: pair[0])
    log.info("%s: outliers up to %.3g clipped at %.3g (KL %.4f)", unit.name, widest.max(), best.upper.max(), loss)
    return best
