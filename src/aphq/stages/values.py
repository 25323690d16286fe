"""Value reparameterisation: the attention values are centred, and their channels share one scale.

Attention mixes tokens with weights that add up to 1, and never channels. So a constant m and a factor r per channel can
leave the values, v' = (v - m) / r, and come back in the output projection, W' = W diag(r), bias' = bias + W m, with
nothing changed in float. With m the mean of what attention gives, a quantized row of probabilities that no longer adds
up to 1 pulls the output towards its mean instead of towards 0; with r = s_c / s, the channel's own best scale over the
mean scale, the values and the projection's input fit one scale better.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit
from aphq.models.attention import OpenAttention
from aphq.stages.channels import LARGEST_RATIO, TOKENS, channel_scales
from aphq.stages.samples import sample_inputs


@torch.no_grad()
def reparameterise_values(work: Workspace, unit: Unit, rows: Rows, candidates: int) -> None:
    """Change the unit's attention in place; it computes what it did."""
    for prefix in unit.modules:
        for name, module in work.student.get_submodule(prefix).named_modules(prefix=prefix):
            if isinstance(module, OpenAttention) and _fits(module):
                _reparameterise(work, unit, rows, name, module, candidates)


def _fits(attention: OpenAttention) -> bool:
    """A layer for the values, a projection that sees their averages as they are, and quantizers that would gain."""
    around = attention.projections()
    plain = around is not None and attention.direct_output and attention.averages
    return plain and attention.pv.right is not None and around.output.input_quantizer is not None  # type: ignore[union-attr]


def _reparameterise(work: Workspace, unit: Unit, rows: Rows, name: str, attention: Any, candidates: int) -> None:
    site, quantizer, around = f"{name}.pv", attention.pv.right, attention.projections()
    mixing, sample = sample_inputs(work, unit, rows, {site: attention.pv}, {site: (1,)}, TOKENS)[site]
    given = [_as_tokens(p @ v) for p, v in zip(mixing.parts, sample.parts, strict=True)]
    mean = torch.cat(given).mean(0)
    values = torch.cat([_as_tokens(v) for v in sample.parts]) - mean
    scales, _ = channel_scales(values, quantizer, candidates)
    ratio = (scales / scales.mean()).clamp(1 / LARGEST_RATIO, LARGEST_RATIO)
    proj, layer, of_values = around.output, around.value.layer, around.value.rows
    proj.add_to_bias(proj.weight.data @ mean)
    proj.weight.data *= ratio
    layer.add_to_bias(torch.zeros(len(layer.weight), device=mean.device))  # there may be none
    layer.weight.data[of_values] /= ratio[:, None]
    layer.bias.data[of_values] = (layer.bias.data[of_values] - mean) / ratio


def _as_tokens(x: Tensor) -> Tensor:
    """[samples, heads, tokens, channels] -> [samples * tokens, heads * channels]"""
    return x.transpose(1, 2).flatten(2).flatten(0, 1)
