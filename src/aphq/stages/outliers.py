"""Layer inputs with massive outliers: shrunk where that is free, then clipped by what the prediction loses.

In some ViTs one channel of a few tokens is a hundred times larger than everything else. The next LayerNorm divides by
it, so the prediction hardly depends on its size, but the squared error of the layer is all about it: judged by that,
the quantizer spends its whole range on it and rounds everything else to zero. For such inputs the candidates are
judged by the distillation loss itself, with only this one quantizer on.

Where the outlier is a hidden channel of an MLP there is more to gain: c * act(u / c) equals act(u) for ReLU, and GELU
comes close for a channel that is either far below zero or huge, if u is shifted so that most of it stays where GELU is
silent. So u is divided by c in fc1 and the output multiplied by as much in fc2, for the c that costs least.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.hooks import watch_inputs
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, Value, run_units
from aphq.models.mlp import MlpModules
from aphq.quant.layers import QuantizedLayer
from aphq.quant.search import FEWEST_OF_RANGE, Range, group_quantile
from aphq.stages.samples import Sample

log = logging.getLogger(__name__)
TYPICAL = 0.999  # the quantile that outliers are compared with


SHRINKING = (1.0, 2.0, 4.0, 8.0, 16.0)  # factors c to try
SILENT = -3.0  # GELU of anything below is nearly 0


@torch.no_grad()
def shrink_outliers(
    work: Workspace, unit: Unit, rows: Rows, config: settings.ScaleSearch, judge: Callable[[list[Value]], float]
) -> bool:
    """Shrink the massive hidden channels of the unit's MLP in place by the factor that costs least, as `judge` tells
    from the logits before; whether there were any.

    A large factor takes the range from the other channels' weights instead of from their activations, so it is the
    quantized layer that has to be judged."""
    if unit.mlp is None or not _wanted(config):
        return False
    mlp = MlpModules.of(work.student, unit.mlp)
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}
    layers = {"before": mlp.act, "after": mlp.fc2}
    with watch_inputs(layers, lambda name, inputs: seen[name].append(inputs[0].flatten(0, -2))):
        target = logits_from(work, unit, rows, config)
    size = seen["after"][0].abs()
    massive = size.amax(0) > config.outlier_ratio * group_quantile(size, (1,), TYPICAL)
    if not massive.any():
        return False
    if mlp.norm is None:
        channels = massive.nonzero().flatten().tolist()
        original = {name: p.data.clone() for name, p in _parameters(mlp)}
        losses = {}
        for factor in SHRINKING:
            _shrink(mlp, channels, seen["before"][0], factor)
            losses[factor] = judge(target)
            for name, p in _parameters(mlp):
                p.data.copy_(original[name]) if name in original else p.data.zero_()
        best = min(losses, key=lambda factor: losses[factor])
        _shrink(mlp, channels, seen["before"][0], best)
        log.info("%s: %d massive hidden channels divided by %g", unit.name, len(channels), best)
    return True


def _parameters(mlp: MlpModules) -> list[tuple[str, Tensor]]:
    layers = {"fc1": mlp.fc1, "fc2": mlp.fc2}
    return [(f"{layer}.{name}", p) for layer, module in layers.items() for name, p in module.named_parameters()]


def _shrink(mlp: MlpModules, channels: list[int], before: Tensor, factor: float) -> None:
    """act(u) of some channels becomes gain * act((u - shift) / factor)."""
    if factor == 1:
        return
    if mlp.fc1.bias is None:
        mlp.fc1.add_to_bias(torch.zeros_like(mlp.fc1.weight[:, 0]))
    for channel in channels:
        u = before[:, channel]
        huge = u > u.max() / 2
        if u.max() <= 0:
            continue  # large, but nothing that the activation lets through
        shift = torch.zeros(1, device=u.device)
        if type(mlp.act) is not torch.nn.ReLU and not huge.all():
            # what is not huge must stay where GELU is silent; what is huge is on its linear branch
            shift = (group_quantile(u[~huge], (1,), 0.99) - SILENT * factor).clamp_min(0)
        small = mlp.act((u[huge] - shift) / factor)
        gain = (u[huge] * small).sum() / small.square().sum().clamp_min(1e-12)
        mlp.fc1.weight.data[channel] /= factor
        mlp.fc1.bias.data[channel] = ((mlp.fc1.bias.data[channel] - shift) / factor).squeeze()
        mlp.fc2.weight.data[:, channel] *= gain


def _wanted(config: settings.ScaleSearch) -> bool:
    return config.outlier_candidates > 0 and config.method == "output_mse"


def logits_from(work: Workspace, unit: Unit, rows: Rows, config: settings.ScaleSearch) -> list[Value]:
    """The student's prediction for the first images, from the unit's input on, pass by pass."""
    rest = work.units[work.units.index(unit) :]
    return [run_units(work.student, rest, x) for x in work.passes(rows, config.outlier_images)]


def lost(work: Workspace, predictions: list[Value], targets: list[Value]) -> float:
    """The mean distillation loss of predictions that were made in equal passes."""
    losses = [work.distillation.loss(x, target) for x, target in zip(predictions, targets, strict=True)]
    return float(torch.stack(losses).mean())


def has_outliers(sample: Sample, config: settings.ScaleSearch) -> bool:
    """Whether a layer's input is so much wider than nearly all of it."""
    if not _wanted(config):
        return False
    widest = torch.maximum(sample.range.upper, -sample.range.lower)
    typical = group_quantile(sample.values.abs(), sample.groups, TYPICAL)
    return bool((widest > config.outlier_ratio * typical).any())


@torch.no_grad()
def outlier_range(
    work: Workspace,
    unit: Unit,
    rows: Rows,
    layer: QuantizedLayer,
    sample: Sample,
    target: list[Value],
    config: settings.ScaleSearch,
) -> tuple[Range, float] | None:
    """The input range of a layer inside `unit` that keeps the prediction best, its weight as it is, and what it loses;
    None if the input stays in float."""
    quantizer = layer.input_quantizer
    if quantizer is None:
        return None
    full = sample.range
    widest = torch.maximum(full.upper, -full.lower)
    tried = []
    for factor in torch.logspace(0, torch.log10(torch.tensor(FEWEST_OF_RANGE)).item(), config.outlier_candidates):
        # the small end of a one-sided input stays whole: shrinking it gains nothing
        limit = widest * factor.to(widest)
        candidate = Range(torch.maximum(full.lower, -limit), torch.minimum(full.upper, limit))
        quantizer.set_range(candidate.lower, candidate.upper)
        quantizer.enabled = True
        tried.append((lost(work, logits_from(work, unit, rows, config), target), candidate))
        quantizer.enabled = False
    loss, best = min(tried, key=lambda pair: pair[0])
    log.info("%s: outliers up to %.3g clipped at %.3g (KL %.4f)", unit.name, widest.max(), best.upper.max(), loss)
    return best, loss
