"""The coverage table: for every linear layer, convolution and attention product, what was quantized or why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from aphq.quant.layers import QuantizedLayer, QuantizedLinear, QuantizedProduct
from aphq.quant.quantizer import Quantizer

MULTIPLYING = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.MultiheadAttention,
)
BY_RECIPE = "float by the recipe"


@dataclass(frozen=True)
class Coverage:
    """One row: a `None` for bits means float, and `note` says why."""

    name: str
    kind: str
    weight_bits: int | None
    weight_granularity: str
    input_bits: int | None
    input_granularity: str
    parameters: int
    note: str = ""


def coverage(model: nn.Module) -> list[Coverage]:
    """Rows in forward order; a layer that multiplies and is not ours shows up as float, never silently."""
    return list(_rows(model))


def _rows(model: nn.Module) -> Iterator[Coverage]:
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            weights, inputs = module.weight_quantizer, module.input_quantizer
            kind = "linear" if isinstance(module, QuantizedLinear) else "convolution"
            yield Coverage(
                name,
                kind,
                weights.bits if weights else None,
                _granularity(weights, "channel"),
                inputs.bits if inputs else None,
                _granularity(inputs, "head"),
                module.weight.numel(),
                _note(weights, inputs),
            )
        elif isinstance(module, QuantizedProduct):
            left = module.left
            granularity = _granularity(left, "head")
            bits = left.bits if left else None
            yield Coverage(name, "product", None, "", bits, granularity, 0, "" if left else BY_RECIPE)
        elif isinstance(module, MULTIPLYING):
            parameters = sum(p.numel() for p in module.parameters())
            note = f"{type(module).__name__} is not supported"
            yield Coverage(name, type(module).__name__, None, "", None, "", parameters, note)


def operands(site: QuantizedLayer | QuantizedProduct) -> dict[str, Quantizer | None]:
    """The quantizers of what a site multiplies, by name: the weight first, then what comes in, in order."""
    if isinstance(site, QuantizedLayer):
        return {"weight": site.weight_quantizer, "input": site.input_quantizer}
    return {"left": site.left, "right": site.right}


def _granularity(quantizer: Quantizer | None, finer: str) -> str:
    if quantizer is None:
        return ""
    return "tensor" if quantizer.scale.numel() == 1 and all(s == 1 for s in quantizer.scale.shape) else finer


def _note(weights: Quantizer | None, inputs: Quantizer | None) -> str:
    missing = [what for what, q in (("weights", weights), ("input", inputs)) if q is None]
    return f"{' and '.join(missing)} {BY_RECIPE}" if missing else ""
