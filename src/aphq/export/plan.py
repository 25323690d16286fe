"""What an exported graph computes elsewhere than the model does: nothing is changed but the order of float operations.

Heads: the scale of every head of q, k and v is divided out of the rows of the qkv layer's weight (its integers stay,
only their scales change) and multiplied back after the attention products, which have a factor to apply anyway. Then
one Quantize stands right behind the layer, the kernel writes bytes, and splitting and transposing moves a quarter of
the data. Where the factors are numbers rather than one per head, the shared scale is chosen so that the factor of the
scores is 1, and the factor of the values moves on into the projection.

Norms: a LayerNorm whose only reader is a layer with zero-point z gets z * scale added to its bias, so that the layer's
codes start at zero and no kernel has to correct for a zero-point; the layer's bias takes it off again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from aphq.export.formats import Array, Format, activation_format
from aphq.export.trace import Trace
from aphq.models.attention import OpenAttention
from aphq.quant.layers import QuantizedLinear

aten = torch.ops.aten
MOVES = {  # operations that carry every element on as it is
    aten.reshape.default,
    aten.view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.contiguous.default,
    aten.dropout.default,
    aten.roll.default,
    aten.flatten.using_ints,
}


@dataclass(frozen=True)
class SharedOutput:
    """How a qkv layer's output becomes integers."""

    divide: Array  # float32 [rows]: what each row is divided by
    form: Format  # one scale, bounds [rows]


@dataclass(frozen=True)
class Plan:
    outputs: dict[str, SharedOutput] = field(default_factory=dict)  # qkv layers by name
    ready: dict[str, Tensor] = field(default_factory=dict)  # operands that come quantized, with the product's factor
    scales: dict[str, float] = field(default_factory=dict)  # their shared scale
    inputs: dict[str, float] = field(default_factory=dict)  # layers whose input is the real one divided by this
    shifted_norms: dict[str, float] = field(default_factory=dict)  # what is added, by the fx node's name
    shifted_layers: set[str] = field(default_factory=set)  # layers that read a shifted norm


def make_plan(model: nn.Module, trace: Trace) -> Plan:
    plan = Plan()
    for name, module in model.named_modules():
        if isinstance(module, OpenAttention):
            forms = _operand_formats(module)
            if forms is not None:
                _share(plan, name, module, forms)
    for node in trace.program.graph.nodes:
        if node.target is torch.ops.aphq.layer.default:
            _shift(plan, node, trace)
    return plan


# -- heads -----------------------------------------------------------------------------------------------------------


def _operand_formats(attention: Any) -> dict[str, Format] | None:
    """Those of q, k and v; None where they cannot be quantized at the layer."""
    qkv = getattr(attention, "qkv", None)
    if not isinstance(qkv, QuantizedLinear) or qkv.weight_quantizer is None or qkv.input_quantizer is None:
        return None
    operands = {"qk.left": attention.qk.left, "qk.right": attention.qk.right, "pv.right": attention.pv.right}
    if not attention.direct or None in operands.values():
        return None
    forms = {side: activation_format(quantizer, signed=True) for side, quantizer in operands.items()}
    return None if any(form.zero_point.any() for form in forms.values()) else forms


def _share(plan: Plan, name: str, attention: Any, forms: dict[str, Format]) -> None:
    heads, rows = attention.num_heads, attention.qkv.weight.shape[0]
    by_number = all(form.per_tensor for form in forms.values())

    def by_row(values: list[Array]) -> Array:
        """Numbers per operand and head, or per operand, to one per row: q of all heads, then k, then v."""
        per_head = np.concatenate([np.broadcast_to(value.reshape(-1), (heads,)) for value in values])
        return np.repeat(per_head, rows // len(per_head))

    scales = by_row([form.scale for form in forms.values()])
    shared = scales.mean(dtype=np.float32).reshape(1)
    if by_number:  # (q / s) (k / s) with s^2 = q k * factor needs no factor
        pair = forms["qk.left"].scale * forms["qk.right"].scale
        shared = np.sqrt(pair * np.float32(attention.scale)).reshape(1)
    low, high = (by_row([getattr(form, end) for form in forms.values()]) for end in ("low", "high"))
    # unsigned: ONNX Runtime's kernels want it, and it cannot rewrite signed ones that pass a reshape; with the smallest
    # zero-point that serves, because OpenVINO adds it before it rounds, and next to 128 the last bits of x are lost
    point = max(0, -int(low.min()))
    form = Format(shared, np.full(1, point, np.uint8), low + point, high + point)
    plan.outputs[f"{name}.qkv"] = SharedOutput((scales / shared).astype(np.float32), form)
    for side, operand in forms.items():
        plan.ready[f"{name}.{side}"] = torch.from_numpy((operand.scale / shared).astype(np.float32))
        plan.scales[f"{name}.{side}"] = float(shared[0])
    left, proj = attention.pv.left, attention.proj
    plain = attention.direct_output
    quantized = proj.input_quantizer is not None and proj.weight_quantizer is not None
    if by_number and plain and quantized and (left is None or left.scale.numel() == 1):
        factor = plan.ready[f"{name}.pv.right"]
        plan.inputs[f"{name}.proj"] = float(factor)
        plan.ready[f"{name}.pv.right"] = torch.ones(())


# -- norms -----------------------------------------------------------------------------------------------------------


def _shift(plan: Plan, node: fx.Node, trace: Trace) -> None:
    site = str(node.args[2])
    layer = trace.sites[site]
    if not isinstance(layer, QuantizedLinear) or layer.weight_quantizer is None or layer.input_quantizer is None:
        return
    source = node.args[0]
    while isinstance(source, fx.Node) and len(source.users) == 1:
        if source.target is aten.layer_norm.default:
            shift = layer.input_quantizer.zero_point * layer.input_quantizer.scale
            plan.shifted_norms[source.name] = float(shift)
            plan.shifted_layers.add(site)
            return
        still = source.target is aten.pad.default and _shape_of(source) == _shape_of(source.args[0])
        if source.target not in MOVES and not still:
            return
        source = source.args[0]


def _shape_of(node: Any) -> Any:
    return node.meta["val"].shape
