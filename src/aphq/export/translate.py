"""A recorded model to an ONNX graph: node by node, constants computed on the way."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from aphq.errors import ExportError
from aphq.export.graph import Value
from aphq.export.operators import OPERATORS, Context, Symbol
from aphq.export.plan import make_plan
from aphq.export.sites import Style, layer, product
from aphq.export.trace import Trace
from aphq.quant.layers import QuantizedLayer, QuantizedProduct

INPUT, OUTPUT = "images", "logits"
aten = torch.ops.aten


def translate(model: nn.Module, trace: Trace, style: Style) -> Any:
    """The ModelProto of `model`, of which `trace` is the record."""
    context = Context(INPUT, make_plan(model, trace))
    constants = trace.constants()
    known: dict[fx.Node, Any] = {}
    images, logits = Value(INPUT, ()), Value(OUTPUT, ())
    for node in trace.program.graph.nodes:
        if node.op == "placeholder":
            if node.name not in constants:
                images = Value(INPUT, _shape(node))
            known[node] = constants.get(node.name, images)
        elif node.op == "output":
            (logits,) = fx.map_arg(node.args[0], known.__getitem__)
        else:
            known[node] = _translate_node(context, node, known, trace, style)
    context.graph.node("Identity", [logits.name], OUTPUT)
    context.graph.nodes[-1].output[0] = OUTPUT
    return context.graph.finish(type(model).__name__, {INPUT: images.shape}, {OUTPUT: logits.shape})


def _translate_node(
    context: Context, node: fx.Node, known: dict[fx.Node, Any], trace: Trace, style: Style
) -> Any:  # a Value, a list of them, a constant tensor, or a Symbol
    args: Any = fx.map_arg(node.args, known.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, known.__getitem__)
    target: Any = node.target
    if target is aten._assert_tensor_metadata.default:
        return None  # a check of the recorder's, which nothing reads
    if isinstance(node.meta.get("val"), (torch.SymInt, int)):
        return Symbol()
    if target is operator.getitem:
        return args[0][args[1]]
    if target in (torch.ops.aphq.layer.default, torch.ops.aphq.product.default):
        *arguments, site = (arg for arg in args if not isinstance(arg, list))
        module, operands = trace.sites[site], [context.value(x) for x in arguments]
        if isinstance(module, QuantizedLayer):
            return layer(context, _shape(node), operands[0], module, site, style)
        assert isinstance(module, QuantizedProduct)
        return product(context, _shape(node), operands[0], operands[1], module, site, style)
    if not _varies(args) and not _varies(tuple(kwargs.values())):
        constant = target(*args, **kwargs)
        if target is not aten.add.Tensor or not _grows(constant, args):
            return constant
        # a window's mask plus its position bias: far smaller apart, and every runtime adds them when it loads the file
    if target not in OPERATORS:
        raise ExportError(f"the operation {target} has no translation to ONNX; please report the model's definition")
    if target is aten.layer_norm.default:
        kwargs = {**kwargs, "shift": context.plan.shifted_norms.get(node.name)}
    shape = () if isinstance(node.meta["val"], (tuple, list)) else _shape(node)
    return OPERATORS[target](context, shape, *args, **kwargs)


def _grows(total: Any, parts: Any) -> bool:
    """Whether a sum of float constants is larger than they are together."""
    sizes = [part.numel() for part in parts if isinstance(part, torch.Tensor)]
    return bool(total.is_floating_point()) and len(sizes) == len(parts) and total.numel() > sum(sizes)


def _varies(args: Any) -> bool:
    """Whether anything among the arguments is not a constant."""
    return any(isinstance(a, (Value, Symbol)) or (isinstance(a, (list, tuple)) and _varies(a)) for a in args)


def _shape(node: fx.Node) -> tuple[int, ...]:
    shape = node.meta["val"].shape
    sides = tuple(-1 if isinstance(side, torch.SymInt) else int(side) for side in shape)
    if sides.count(-1) > 1:
        raise ExportError(f"the shape {tuple(shape)} of {node.name} depends on the batch twice; export a fixed batch")
    return sides
