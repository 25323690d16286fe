"""Layer inputs with massive outliers: shrunk where that is free, then clipped by what the prediction loses.

In some ViTs one channel of a few tokens is a hundred times larger than everything else. The next LayerNorm divides by
it, so the prediction hardly depends on its size, but the squared error of the layer is all about it: judged by that,
the quantizer spends its whole range on it and rounds everything else to zero. For such inputs the candidates are
judged by the distillation loss itself, with only this one quantizer on.

Where the outlier is a hidden channel of an MLP there is more to gain: c * act(u / c) equals act(u) for ReLU, and GELU
comes close for a channel that is either far below zero or huge, if u is shifted so that most of it stays where GELU is
silent. So u is divided by c in fc1 and the output multiplied by as much in fc2, for the c that costs least. That takes
from the weights of fc2 what it gives to its inputs, unless the channel is held by several: the hidden channels that say
least become constants in the bias of fc2, and copies of the massive one take their places, each with its share of the
weight.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

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
LARGEST_SHARE = 0.02  # of the hidden channels, that may give way to copies of massive ones
WORTH_COPIES = 2 / 3  # of the loss without: a channel that gives way may tell what no image at hand shows
SILENT = -3.0  # GELU of anything below is nearly 0


@torch.no_grad()
def shrink_outliers(
    work: Workspace,
    unit: Unit,
    rows: Rows,
    config: settings.ScaleSearch,
    judge: Callable[[list[Value], list[int]], float],
) -> list[int]:
    """Shrink the massive hidden channels of the unit's MLP in place by the factor that costs least, as `judge` tells
    from the logits before; these channels and their copies.

    A large factor takes the range from the other channels' weights instead of from their activations, so it is the
    quantized layer that has to be judged."""
    if unit.mlp is None or not _wanted(config):
        return []
    mlp = MlpModules.of(work.student, unit.mlp)
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}
    layers = {"before": mlp.act, "after": mlp.fc2}
    with watch_inputs(layers, lambda name, inputs: seen[name].append(inputs[0].flatten(0, -2))):
        target = logits_from(work, unit, rows, config)
    size = seen["after"][0].abs()
    massive = size.amax(0) > config.outlier_ratio * group_quantile(size, (1,), TYPICAL)
    channels: list[int] = massive.nonzero().flatten().tolist()
    if not channels or mlp.norm is not None:
        return channels
    before, after = seen["before"][0], seen["after"][0]
    alone: list[list[int]] = [[] for _ in channels]
    shared = _spares(mlp, after, channels, config.outlier_copies)
    original = {name: p.data.clone() for name, p in _parameters(mlp)}
    losses: dict[tuple[float, bool], float] = {}

    def change(factor: float, copied: bool) -> list[int]:
        spares = shared if copied else alone
        _shrink(mlp, channels, before, factor)
        _share(mlp, channels, spares, after)
        return channels + [spare for own in spares for spare in own]

    def attempt(factor: float, copied: bool) -> None:
        losses[factor, copied] = judge(target, change(factor, copied))
        for name, p in _parameters(mlp):
            p.data.copy_(original[name]) if name in original else p.data.zero_()

    def cheapest(copied: bool) -> float:
        return min((factor for factor, as_copies in losses if as_copies == copied), key=lambda f: losses[f, copied])

    for factor in SHRINKING:
        attempt(factor, False)
    best, copied = cheapest(False), False
    if any(shared):
        for factor in sorted({best, min(2 * best, SHRINKING[-1])}):
            attempt(factor, True)
        if losses[cheapest(True), True] < WORTH_COPIES * losses[best, False]:
            best, copied = cheapest(True), True
    held = change(best, copied)
    log.info("%s: %d massive hidden channels divided by %g, in %d", unit.name, len(channels), best, len(held))
    return held


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


def _spares(mlp: MlpModules, hidden: Tensor, channels: list[int], copies: int) -> list[list[int]]:
    """For each massive channel the others that give way to its copies: those whose variation fc2 hears least."""
    each = min(copies - 1, int(LARGEST_SHARE * hidden.shape[1]) // len(channels))
    heard = hidden.var(0) * mlp.fc2.weight.data.flatten(1).square().sum(0)
    heard[channels] = torch.inf
    quietest: list[int] = heard.argsort()[: each * len(channels)].tolist()
    return [quietest[i * each : (i + 1) * each] for i in range(len(channels))]


def _share(mlp: MlpModules, channels: list[int], spares: list[list[int]], hidden: Tensor) -> None:
    """Every massive channel in the places of its spares as well, each with its share of the weight behind it; what the
    spares gave becomes a constant, their mean over the rows `hidden`."""
    fc1, fc2 = mlp.fc1, mlp.fc2
    for channel, own in zip(channels, spares, strict=True):
        if not own:
            continue
        fc2.add_to_bias(fc2.weight.data[:, own].flatten(1) @ hidden[:, own].mean(0))
        fc1.weight.data[own] = fc1.weight.data[channel].clone()
        if fc1.bias is not None:
            fc1.bias.data[own] = fc1.bias.data[channel].clone()
        fc2.weight.data[:, channel] /= len(own) + 1
        fc2.weight.data[:, own] = fc2.weight.data[:, channel, None].clone()


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
    further: Sequence[Range] = (),
) -> tuple[Range, float] | None:
    """The input range of a layer inside `unit` that keeps the prediction best, its weight as it is, and what it loses;
    None if the input stays in float. Tried are shares of the full range, and `further` ones."""
    quantizer = layer.input_quantizer
    if quantizer is None:
        return None
    full = sample.range
    widest = torch.maximum(full.upper, -full.lower)
    candidates = []
    for factor in torch.logspace(0, torch.log10(torch.tensor(FEWEST_OF_RANGE)).item(), config.outlier_candidates):
        # the small end of a one-sided input stays whole: shrinking it gains nothing
        limit = widest * factor.to(widest)
        candidates.append(Range(torch.maximum(full.lower, -limit), torch.minimum(full.upper, limit)))
    tried = []
    for candidate in (*candidates, *further):
        quantizer.set_range(candidate.lower, candidate.upper)
        quantizer.enabled = True
        tried.append((lost(work, logits_from(work, unit, rows, config), target), candidate))
        quantizer.enabled = False
    loss, best = min(tried, key=lambda pair: pair[0])
    log.info("%s: outliers up to %.3g clipped at %.3g (KL %.4f)", unit.name, widest.max(), best.upper.max(), loss)
    return best, loss
