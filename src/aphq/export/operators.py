"""The float operations between quantized sites, from aten to ONNX: one small function for each.

Arguments arrive translated: a `Value` is a tensor of the graph, a torch tensor is a constant, `Symbol` is a size that
depends on the batch. Shapes need no arithmetic, for the recorded program says the shape of every result, with -1 for
the one dimension that may vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aphq.errors import ExportError
from aphq.export.graph import Graph, Value
from aphq.export.plan import Plan

aten = torch.ops.aten
SAME = 1e-6  # a factor this close to 1 was meant to be 1, before float rounding
Operand = Value | Tensor | float | int


class Symbol:
    """A size that depends on the batch."""


class Context:
    """The graph, and what is known of its tensors that saves work.

    `rows` has the matrix [rows, channels] that a tensor [..., channels] is a view of; `sources` the tensor and the
    order of dimensions that a transposed one came from; `factors` the tensor and the constant that a product came
    from. `plan` says what is folded from one site into another.
    """

    def __init__(self, images: str, plan: Plan) -> None:
        self.graph = Graph()
        self.images, self.plan = images, plan
        self.rows: dict[str, str] = {}
        self.sources: dict[str, tuple[Value, tuple[int, ...]]] = {}
        self.factors: dict[str, tuple[Value, Tensor]] = {}

    def name(self, x: Operand) -> str:
        """The tensor's name in the graph; constants move in when first used."""
        if isinstance(x, Value):
            return x.name
        array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.array(x)
        return self.graph.constant(array.astype(np.float32))

    def value(self, x: Value | Tensor) -> Value:
        """A site may read a constant: the token that pools by attention asks the same of every image."""
        return x if isinstance(x, Value) else Value(self.name(x), tuple(x.shape))

    def as_rows(self, x: Value) -> str:
        if x.name not in self.rows:
            self.rows[x.name] = x.name if len(x.shape) == 2 else self.graph.reshape(x.name, (-1, x.shape[-1]))
        return self.rows[x.name]

    def from_rows(self, rows: str, shape: tuple[int, ...], hint: str = "") -> Value:
        """[rows, channels] as a tensor of `shape`."""
        value = Value(rows if len(shape) == 2 else self.graph.reshape(rows, shape, hint), shape)
        self.rows[value.name] = rows
        return value

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        source, before = self.sources.get(x.name, (x, tuple(range(len(x.shape)))))
        whole = tuple(before[axis] for axis in order)
        shape = tuple(source.shape[axis] for axis in whole)
        if whole == tuple(range(len(whole))):
            return source
        result = Value(self.graph.node("Transpose", [source.name], perm=list(whole)), shape)
        self.sources[result.name] = (source, whole)
        return result

    def multiply(self, x: Value, factor: Tensor, hint: str = "") -> Value:
        """`x` times a constant that does not change its shape; two in a row become one."""
        source, before = self.factors.get(x.name, (x, torch.ones(())))
        whole = before * factor
        if torch.allclose(whole, torch.ones(()), rtol=0, atol=SAME):
            return source
        result = Value(self.graph.node("Mul", [source.name, self.name(whole)], hint), x.shape)
        self.factors[result.name] = (source, whole)
        return result


Translate = Callable[..., Any]  # (context, shape of the result, *arguments) -> Value, or a list of them
OPERATORS: dict[Any, Translate] = {}


def translates(*targets: Any) -> Callable[[Translate], Translate]:
    def keep(function: Translate) -> Translate:
        OPERATORS.update(dict.fromkeys(targets, function))
        return function

    return keep


@translates(
    aten.dropout.default,
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.detach_.default,
    aten.lift_fresh_copy.default,
    aten.to.dtype,
    aten.type_as.default,
)
def identity(context: Context, shape: tuple[int, ...], x: Value, *_: Any, **__: Any) -> Value:
    """What changes nothing at inference, in float32."""
    return x


@translates(
    aten.reshape.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
)
def reshape(context: Context, shape: tuple[int, ...], x: Value, *_: Any) -> Value:
    if shape == x.shape:
        return x
    rows = context.rows.get(x.name)
    if rows is not None and shape[-1] == x.shape[-1]:
        return context.from_rows(rows, shape)
    return Value(context.graph.reshape(x.name, shape), shape)


@translates(aten.permute.default)
def permute(context: Context, shape: tuple[int, ...], x: Value, order: list[int]) -> Value:
    return context.transpose(x, [axis % len(order) for axis in order])


@translates(aten.transpose.int)
def transpose(context: Context, shape: tuple[int, ...], x: Value, one: int, other: int) -> Value:
    order = list(range(len(shape)))
    order[one], order[other] = order[other], order[one]
    return context.transpose(x, order)


@translates(aten.unbind.int)
def unbind(context: Context, shape: tuple[int, ...], x: Value, axis: int = 0) -> list[Value]:
    """Cut before transposing: each part is then transposed once, in whatever order it is wanted."""
    source, order = context.sources.get(x.name, (x, tuple(range(len(x.shape)))))
    cut = order[axis % len(x.shape)]
    count = source.shape[cut]
    parts = context.graph.nodes_out("Split", [source.name], count, axis=cut, num_outputs=count)
    rest = tuple(side for i, side in enumerate(source.shape) if i != cut)
    remaining = [i - (i > cut) for i in order if i != cut]
    flat = [Value(context.graph.reshape(part, rest), rest) for part in parts]
    return [context.transpose(part, remaining) for part in flat]


@translates(aten.chunk.default)
def chunk(context: Context, shape: tuple[int, ...], x: Value, count: int, axis: int = 0) -> list[Value]:
    side = x.shape[axis]
    width = -(-side // count)
    return _split(context, x, [min(width, side - start) for start in range(0, side, width)], axis)


def _split(context: Context, x: Value, sizes: list[int], axis: int) -> list[Value]:
    axis %= len(x.shape)
    names = context.graph.nodes_out("Split", [x.name, context.graph.ints(sizes)], len(sizes), axis=axis)
    return [Value(n, (*x.shape[:axis], size, *x.shape[axis + 1 :])) for n, size in zip(names, sizes, strict=True)]


@translates(aten.stack.default)
def stack(context: Context, shape: tuple[int, ...], parts: list[Value], axis: int = 0) -> Value:
    axis %= len(shape)
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    names = [context.graph.reshape(context.name(part), one) for part in parts]
    return Value(context.graph.node("Concat", names, axis=axis), shape)


@translates(aten.repeat.default)
def repeat(context: Context, shape: tuple[int, ...], x: Operand, times: list[Any]) -> Value:
    """A constant repeated over a batch of unknown size; nothing else."""
    return expand(context, shape, x)


@translates(aten.select.int)
def select(context: Context, shape: tuple[int, ...], x: Value, axis: int, index: int) -> Value:
    number = context.graph.constant(np.array(index, np.int64), "index")
    return Value(context.graph.node("Gather", [x.name, number], axis=axis), shape)


@translates(aten.slice.Tensor)
def slice_(
    context: Context,
    shape: tuple[int, ...],
    x: Value,
    axis: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    if shape == x.shape:
        return x
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [context.graph.ints([number]) for number in (start or 0, last, axis, step)]
    return Value(context.graph.node("Slice", [x.name, *bounds]), shape)


@translates(aten.cat.default)
def cat(context: Context, shape: tuple[int, ...], parts: list[Operand], axis: int = 0) -> Value:
    return Value(context.graph.node("Concat", [context.name(part) for part in parts], axis=axis), shape)


@translates(aten.expand.default)
def expand(context: Context, shape: tuple[int, ...], x: Operand, *_: Any, **__: Any) -> Value:
    """A constant repeated over a batch of unknown size."""
    if shape[0] != -1 or -1 in shape[1:]:
        raise ExportError(f"cannot expand a tensor to {shape}: only the first dimension may depend on the batch")
    batch = context.graph.node("Shape", [context.images], start=0, end=1)
    size = context.graph.node("Concat", [batch, context.graph.ints(shape[1:])], axis=0)
    return Value(context.graph.node("Expand", [context.name(x), size]), shape)


@translates(aten.pad.default)
def pad(
    context: Context, shape: tuple[int, ...], x: Value, sides: list[int], mode: str = "constant", value: Any = None
) -> Value:
    if shape == x.shape:
        return x
    if mode != "constant" or value:
        raise ExportError(f"padding of mode {mode!r} with value {value} is not supported; only zeros are")
    empty = len(shape) - len(sides) // 2
    before = [0] * empty + sides[-2::-2]
    after = [0] * empty + sides[-1::-2]
    return Value(context.graph.node("Pad", [x.name, context.graph.ints([*before, *after])]), shape)


@translates(aten.roll.default)
def roll(context: Context, shape: tuple[int, ...], x: Value, shifts: list[int], axes: list[int]) -> Value:
    for shift, axis in zip(shifts, axes, strict=True):
        cut = -shift % shape[axis]
        if cut:
            front = slice_(context, (), x, axis, 0, cut)
            back = slice_(context, (), x, axis, cut, None)
            x = Value(context.graph.node("Concat", [back.name, front.name], axis=axis), shape)
    return x


def _binary(operator: str) -> Translate:
    def apply(context: Context, shape: tuple[int, ...], x: Operand, y: Operand) -> Value:
        return Value(context.graph.node(operator, [context.name(x), context.name(y)]), shape)

    return apply


OPERATORS[aten.add.Tensor] = _binary("Add")
OPERATORS[aten.div.Tensor] = _binary("Div")


@translates(aten.sub.Tensor)
def sub(context: Context, shape: tuple[int, ...], x: Operand, y: Operand) -> Value:
    if isinstance(x, Value) and isinstance(y, Value) and x.shape[0] == -1 and y.shape[-1] == 1:
        # the largest score of a row: OpenVINO takes it off wrongly right behind a product of integers whose batch may
        # vary (2026.4), and rightly if both are reshaped first
        rows = context.graph.reshape(x.name, (-1, x.shape[-1]))
        largest = context.graph.reshape(y.name, (-1, 1))
        return Value(context.graph.reshape(context.graph.node("Sub", [rows, largest]), shape), shape)
    return Value(context.graph.node("Sub", [context.name(x), context.name(y)]), shape)


@translates(aten.mul.Tensor, aten.mul.Scalar)
def mul(context: Context, shape: tuple[int, ...], x: Operand, y: Operand) -> Value:
    if isinstance(x, Value) and isinstance(y, (int, float)):
        return context.multiply(x, torch.tensor(float(y)))
    return Value(context.graph.node("Mul", [context.name(x), context.name(y)]), shape)


def by_rows(context: Context, x: Value, operator: str, **attributes: Any) -> Value:
    """An elementwise operator, on the matrix behind `x` where there is one: no reshape comes between two layers."""
    rows = context.rows.get(x.name)
    if rows is None:
        return Value(context.graph.node(operator, [x.name], **attributes), x.shape)
    return context.from_rows(context.graph.node(operator, [rows], **attributes), x.shape)


@translates(aten.gelu.default)
def gelu(context: Context, shape: tuple[int, ...], x: Value, approximate: str = "none") -> Value:
    return by_rows(context, x, "Gelu", approximate=approximate)


@translates(aten.relu.default, aten.relu_.default)
def relu(context: Context, shape: tuple[int, ...], x: Value) -> Value:
    return by_rows(context, x, "Relu")


def _unary(operator: str) -> Translate:
    def apply(context: Context, shape: tuple[int, ...], x: Value) -> Value:
        return Value(context.graph.node(operator, [x.name]), shape)

    return apply


OPERATORS[aten.neg.default] = _unary("Neg")
OPERATORS[aten.tanh.default] = _unary("Tanh")
OPERATORS[aten.exp.default] = _unary("Exp")


@translates(aten.linalg_vector_norm.default)
def vector_norm(
    context: Context, shape: tuple[int, ...], x: Value, order: float, axes: list[int], keepdim: bool = False, **_: Any
) -> Value:
    if order != 2:
        raise ExportError(f"a vector norm of order {order} is not supported; only 2 is")
    return Value(context.graph.node("ReduceL2", [x.name, context.graph.ints(axes)], keepdims=int(keepdim)), shape)


@translates(aten.clamp_min.default)
def clamp_min(context: Context, shape: tuple[int, ...], x: Value, least: float) -> Value:
    return Value(context.graph.node("Max", [x.name, context.name(least)]), shape)


@translates(aten.sigmoid.default)
def sigmoid(context: Context, shape: tuple[int, ...], x: Value) -> Value:
    return Value(context.graph.node("Sigmoid", [x.name]), shape)


@translates(aten.silu.default, aten.silu_.default)
def silu(context: Context, shape: tuple[int, ...], x: Value) -> Value:
    return Value(context.graph.node("Mul", [x.name, context.graph.node("Sigmoid", [x.name])]), shape)


@translates(aten.softmax.int)
def softmax(context: Context, shape: tuple[int, ...], x: Value, axis: int, *_: Any) -> Value:
    return Value(context.graph.node("Softmax", [x.name], axis=axis), shape)


@translates(aten.layer_norm.default)
def layer_norm(
    context: Context,
    shape: tuple[int, ...],
    x: Value,
    over: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-5,
    *_: Any,
    shift: float | None = None,
) -> Value:
    """`shift` is a constant to add to the result, for a layer that wants it so."""
    scale = torch.ones(over) if weight is None else weight
    if shift is not None:
        bias = torch.full(over, shift) if bias is None else bias + shift
    inputs = [x.name, context.name(scale)] + ([] if bias is None else [context.name(bias)])
    return Value(context.graph.node("LayerNormalization", inputs, axis=-len(over), epsilon=epsilon), shape)


@translates(aten.rms_norm.default)
def rms_norm(
    context: Context,
    shape: tuple[int, ...],
    x: Value,
    over: list[int],
    weight: Tensor | None = None,
    epsilon: float | None = None,
) -> Value:
    axes = context.graph.ints(range(-len(over), 0))
    square = context.graph.node("Mul", [x.name, x.name])
    mean = context.graph.node("ReduceMean", [square, axes], keepdims=1)
    small = torch.finfo(torch.float32).eps if epsilon is None else epsilon
    root = context.graph.node("Sqrt", [context.graph.node("Add", [mean, context.name(small)])])
    normal = Value(context.graph.node("Div", [x.name, root]), shape)
    return normal if weight is None else Value(context.graph.node("Mul", [normal.name, context.name(weight)]), shape)


@translates(aten.mean.dim)
def mean(context: Context, shape: tuple[int, ...], x: Value, axes: list[int], keepdim: bool = False, **_: Any) -> Value:
    return Value(context.graph.node("ReduceMean", [x.name, context.graph.ints(axes)], keepdims=int(keepdim)), shape)


@translates(aten.sum.dim_IntList)
def summed(
    context: Context, shape: tuple[int, ...], x: Value, axes: list[int], keepdim: bool = False, **_: Any
) -> Value:
    return Value(context.graph.node("ReduceSum", [x.name, context.graph.ints(axes)], keepdims=int(keepdim)), shape)


@translates(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def pool_to_one(context: Context, shape: tuple[int, ...], x: Value, size: list[int]) -> Value:
    if any(side != 1 for side in size):
        raise ExportError(f"adaptive pooling to {size} is not supported; only to 1 is")
    return mean(context, shape, x, list(range(-len(size), 0)), keepdim=True)


@translates(aten.amax.default)
def amax(context: Context, shape: tuple[int, ...], x: Value, axes: list[int], keepdim: bool = False) -> Value:
    if x.shape[0] == -1 and keepdim and list(axes) == [-1]:  # see `sub`
        rows = context.graph.reshape(x.name, (-1, x.shape[-1]))
        largest = context.graph.node("ReduceMax", [rows, context.graph.ints([-1])], keepdims=1)
        return Value(context.graph.reshape(largest, shape), shape)
    return Value(context.graph.node("ReduceMax", [x.name, context.graph.ints(axes)], keepdims=int(keepdim)), shape)
