"""The range of a layer input with massive outliers, chosen by what the prediction loses.

In some ViTs one channel of a few tokens is a hundred times larger than everything else. The next LayerNorm divides by
it, so the prediction hardly depends on its size, but the squared error of the layer is all about it: judged by that,
the quantizer spends its whole range on it and rounds everything else to zero. For such inputs the candidates are
judged by the distillation loss itself, with only this one quantizer on.
"""

from __future__ import annotations

import logging

import torch

from aphq import recipe as settings
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, run_units
from aphq.quant.layers import QuantizedLayer
from aphq.quant.search import FEWEST_OF_RANGE, Range, group_quantile
from aphq.stages.distillation import distillation_loss
from aphq.stages.samples import Sample

log = logging.getLogger(__name__)
TYPICAL = 0.999  # the quantile that outliers are compared with


@torch.no_grad()
def outlier_range(
    work: Workspace, unit: Unit, rows: Rows, layer: QuantizedLayer, sample: Sample, config: settings.ScaleSearch
) -> Range | None:
    """The best input range of a layer inside `unit`, whose inputs are `rows`; None if it has no outliers."""
    quantizer = layer.input_quantizer
    if quantizer is None or config.outlier_candidates == 0 or config.method != "output_mse":
        return None
    full = sample.range
    widest = torch.maximum(full.upper, -full.lower)
    typical = group_quantile(sample.values.abs(), sample.groups, TYPICAL)
    if bool((widest <= config.outlier_ratio * typical).all()):
        return None

    images = rows[slice(0, config.outlier_images)]
    rest = work.units[work.units.index(unit) + 1 :]

    def logits() -> torch.Tensor:
        return run_units(work.student, rest, unit.bridge(work.student, unit.run(work.student, images)))

    target = logits()
    tried = []
    for factor in torch.logspace(0, torch.log10(torch.tensor(FEWEST_OF_RANGE)).item(), config.outlier_candidates):
        # the small end of a one-sided input stays whole: shrinking it gains nothing
        limit = widest * factor.to(widest)
        candidate = Range(torch.maximum(full.lower, -limit), torch.minimum(full.upper, limit))
        quantizer.set_range(candidate.lower, candidate.upper)
        quantizer.enabled = True
        tried.append((float(distillation_loss(logits(), target)), candidate))
        quantizer.enabled = False
    loss, best = min(tried, key=lambda pair: pair[0])
    log.info("%s: outliers up to %.3g clipped at %.3g (KL %.4f)", unit.name, widest.max(), best.upper.max(), loss)
    return best
