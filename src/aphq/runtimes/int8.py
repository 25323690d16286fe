"""The artifact run as integers in PyTorch: layers and attentions multiply int8 by int8 into int32.

On GPUs that Triton knows, one kernel does all of a layer and one all of an attention, and bytes flow between them.
Elsewhere, and in what is compiled or exported, `torch._int_mm` multiplies, and attention products are simulated in
float. Convolutions that cut no patches stay simulated.
"""

from __future__ import annotations

import logging

from torch import nn

from aphq.artifact.info import info_of
from aphq.models.architecture import Mlp, architecture_named, find_architecture, mlps_of, replace_module
from aphq.models.attention import open_attentions
from aphq.quant.layers import QuantizedConv2d, QuantizedLinear, QuantizedProduct, quantized_sites
from aphq.runtimes.fusing import fuse
from aphq.runtimes.int8_attention import AttentionInBytes
from aphq.runtimes.int8_layers import Int8Linear, Int8Patches

__all__ = ["AttentionInBytes", "Int8Linear", "Int8Patches", "to_int8"]

log = logging.getLogger(__name__)


def to_int8(model: nn.Module) -> nn.Module:
    """Replace, in place, every layer that has integers for both its weight and its input; the rest is noted."""
    mlps = _mlps(model)
    float_by_choice: list[str] = []
    without_kernel: list[str] = []
    for name, site in list(quantized_sites(model)):
        if isinstance(site, QuantizedProduct):
            continue
        if site.weight_quantizer is None or site.input_quantizer is None:
            float_by_choice.append(name)
        elif isinstance(site, QuantizedLinear):
            replace_module(model, name, Int8Linear(site))
        elif isinstance(site, QuantizedConv2d) and site.cuts_patches:
            replace_module(model, name, Int8Patches(site))
        else:
            without_kernel.append(name)
    for _, attention in open_attentions(model):
        if attention.usual_core and all(one is not None and one.settled for one in attention.operand_quantizers):
            attention.in_bytes = AttentionInBytes(attention)
    fuse(model, mlps)
    if float_by_choice:
        log.warning("not integers on both sides by the recipe, so still in float: %s", ", ".join(float_by_choice))
    if without_kernel:
        log.warning(
            "still simulated in float, for only linear layers and patch embeddings have an integer kernel here: %s",
            ", ".join(without_kernel),
        )
    return model.eval()


def _mlps(model: nn.Module) -> tuple[Mlp, ...]:
    """None of a model that no adapter knows."""
    info = info_of(model)
    architecture = find_architecture(model) if info is None else architecture_named(info.family)
    return () if architecture is None else tuple(mlps_of(architecture.units(model)).values())
