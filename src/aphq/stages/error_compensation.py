"""Error compensation: every weight rounded so that the layer's output, on its quantized inputs, changes least.

For recipes without gradients: after the scale search, layer by layer along the quantized network, columns are rounded
one by one (`aphq.quant.compensation`), and the bias takes up what is left in the mean. Weights are on their grid
afterwards, so rounding that is learned has nothing left to do: a recipe has this stage or block reconstruction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from aphq import settings
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit
from aphq.models.student import enable
from aphq.quant.compensation import compensated_for
from aphq.quant.layers import QuantizedLayer, quantized_sites
from aphq.stages.learnable import unit_modules
from aphq.stages.samples import sample_inputs


def compensate_errors(work: Workspace, config: settings.ErrorCompensation) -> None:
    """The stage: every layer with a quantized weight, on what the quantized units before its own give."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    work.progress.start(config.NAME, len(todo))
    for unit, rows in work.walk_one(work.student, work.image_rows(config.images)) if todo else ():
        for module in unit_modules(work, unit):
            enable(module)
        if unit in todo:
            _compensate(work, unit, rows, config)
            work.save_unit(config.NAME, unit)
            work.folder.event("unit", stage=config.NAME, unit=unit.name)
            work.progress.advance(1, unit.name)
    work.progress.finish()


@torch.no_grad()
def _compensate(work: Workspace, unit: Unit, rows: Rows, config: settings.ErrorCompensation) -> None:
    sites = {name: site for prefix in unit.modules for name, site in quantized_sites(work.student, prefix)}
    layers: dict[str, Any] = {name: site for name, site in sites.items() if can_be_compensated(site)}
    groups: dict[str, tuple[int, ...]] = dict.fromkeys(layers, (1,))
    samples = sample_inputs(work, unit, rows, layers, groups, config.tokens)
    for name, layer in layers.items():
        seen = samples[name][0].values  # [tokens, in]
        if layer.input_quantizer is not None:
            seen = layer.input_quantizer(seen)
        weight = layer.weight_rows()
        rounded = compensated_for(weight, seen, layer.weight_quantizer)
        # the mean of what the weight's rounding changed; not that of the input's: where outliers are clipped, on
        # purpose, a bias that made up for them would disturb every other token
        layer.add_to_bias((weight - rounded) @ seen.mean(0))
        layer.weight.data = rounded.view(layer.weight.shape)


def can_be_compensated(site: nn.Module) -> bool:
    """A layer with a weight to round, whose every input is multiplied by one row of it."""
    return isinstance(site, QuantizedLayer) and site.weight_quantizer is not None and site.weight_rows().ndim == 2
