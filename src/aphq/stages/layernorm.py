"""LayerNorm reparameterisation: one scale for a tensor whose channels differ widely in range.

Each channel c of the LayerNorm output would like its own scale s_c and zero-point z_c. Instead the LayerNorm's affine
is changed so that every channel fits the mean scale s and zero-point z, x' = x / r - b with r = s_c / s, and the next
layer undoes it: W' = W diag(r), bias' = bias + W' b. In float nothing changes, at any combination of bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.workspace import Workspace
from aphq.models.architecture import NormPair
from aphq.quant.layers import QuantizedLayer
from aphq.stages.channels import LARGEST_RATIO, TOKENS, channel_scales
from aphq.stages.samples import Sample, sample_inputs
from aphq.stages.values import reparameterise_values


def reparameterise_norms(work: Workspace, config: settings.LayerNormReparameterisation) -> None:
    """The stage: every LayerNorm whose only reader is a layer with a quantized input, and the attention values."""
    todo = [unit for unit in work.units if unit.norms and not work.restore_unit(config.NAME, unit)]
    work.progress.start(config.NAME, len(todo))
    for unit, rows in work.walk_one(work.student, work.image_rows(config.images)) if todo else ():
        if unit in todo:
            pairs = {pair.linear: pair for pair in unit.norms if _fits(work, pair)}
            layers: dict[str, Any] = {name: work.student.get_submodule(name) for name in pairs}
            channels: dict[str, tuple[int, ...]] = {name: (layer.weight.shape[1],) for name, layer in layers.items()}
            samples = sample_inputs(work, unit, rows, layers, channels, TOKENS)
            for name, pair in pairs.items():
                norm, others = work.student.get_submodule(pair.norm), _layers(work, pair.others)
                reparameterise(norm, layers[name], samples[name][0], pair, config, others)
            if config.values:
                reparameterise_values(work, unit, rows, config.candidates)
            work.save_unit(config.NAME, unit)
            work.folder.event("unit", stage=config.NAME, unit=unit.name)
            work.progress.advance(1, unit.name)
        if unit is todo[-1]:
            break
    work.progress.finish()


def _layers(work: Workspace, names: tuple[str, ...]) -> list[Any]:
    return [work.student.get_submodule(name) for name in names]


def _fits(work: Workspace, pair: NormPair) -> bool:
    layer: Any = work.student.get_submodule(pair.linear)
    norm: Any = work.student.get_submodule(pair.norm)
    return layer.input_quantizer is not None and getattr(norm, "weight", None) is not None


@torch.no_grad()
def reparameterise(
    norm: Any,
    layer: QuantizedLayer,
    sample: Sample,
    pair: NormPair,
    config: settings.LayerNormReparameterisation,
    others: Sequence[QuantizedLayer] = (),
) -> None:
    """Change `norm`, `layer` and the `others` that read it in place; together they compute what they did."""
    quantizer = layer.input_quantizer
    assert quantizer is not None
    scales, zero_points = channel_scales(sample.values, quantizer, config.candidates, sample.range)
    ratio, shift = ratio_and_shift(scales, zero_points)
    if not pair.may_shift or quantizer.symmetric or getattr(norm, "bias", None) is None:
        shift = torch.zeros_like(shift)

    norm.weight.data = norm.weight.data / ratio
    for reader in (layer, *others):  # or a 1 x 1 convolution
        reader.weight.data = reader.weight.data * ratio.view(-1, *(1,) * (reader.weight.ndim - 2))
        if shift.any():
            reader.add_to_bias(reader.weight.data.flatten(1) @ shift)
    if shift.any():
        norm.bias.data = norm.bias.data / ratio - shift
    elif getattr(norm, "bias", None) is not None:
        norm.bias.data = norm.bias.data / ratio


def ratio_and_shift(scales: Tensor, zero_points: Tensor) -> tuple[Tensor, Tensor]:
    """r and b per channel, from the scales and zero-points the channels would like."""
    scale, zero_point = scales.mean(), zero_points.mean().round()
    ratio = (scales / scale).clamp(1 / LARGEST_RATIO, LARGEST_RATIO)
    return ratio, -zero_points * scales / ratio + zero_point * scale
