"""Building an ONNX graph node by node: names, constants kept once, and nothing left that no output needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aphq.extras import require

BATCH = "batch"  # the name of the dimension that may take any size
OPSET = 21  # the first with 4-bit integers; Gelu (20) and LayerNormalization (17) are single operators


@dataclass(frozen=True)
class Value:
    """A tensor of the graph; a dimension that depends on the batch is -1."""

    name: str
    shape: tuple[int, ...]


@dataclass
class Graph:
    """An ONNX graph in the making."""

    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)  # name -> TensorProto
    _known: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)

    def unique(self, hint: str) -> str:
        count = self._names.get(hint, 0)
        self._names[hint] = count + 1
        return hint if count == 0 else f"{hint}_{count}"

    def node(self, operator: str, inputs: Sequence[str], hint: str = "", **attributes: Any) -> str:
        """Append a node with one output; its name."""
        return self.nodes_out(operator, inputs, 1, hint, **attributes)[0]

    def nodes_out(
        self, operator: str, inputs: Sequence[str], outputs: int, hint: str = "", **attributes: Any
    ) -> list[str]:
        helper = require("onnx").helper
        names = [self.unique(f"{hint}/{operator}" if hint else operator) for _ in range(outputs)]
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=names[0], **attributes))
        return names

    def constant(self, array: NDArray[Any], hint: str = "constant") -> str:
        """The name of an initializer with these values; equal ones are stored once."""
        array = np.asarray(array, order="C")
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.unique(hint)
            proto = require("onnx").numpy_helper.from_array(array, self._known[key])
            self.constants[self._known[key]] = proto
        return self._known[key]

    def four_bit_constant(self, codes: NDArray[Any], hint: str) -> str:
        """An initializer of UINT4, two codes to a byte."""
        onnx = require("onnx")
        flat = codes.astype(np.uint8).reshape(-1)
        flat = np.append(flat, np.zeros(len(flat) % 2, np.uint8))
        packed = (flat[0::2] | (flat[1::2] << 4)).tobytes()  # the first of a pair in the low half
        name = self.unique(hint)
        self.constants[name] = onnx.helper.make_tensor(name, onnx.TensorProto.UINT4, codes.shape, packed, raw=True)
        return name

    def ints(self, values: Iterable[int]) -> str:
        return self.constant(np.array(list(values), np.int64), "ints")

    def reshape(self, name: str, shape: Sequence[int], hint: str = "") -> str:
        return self.node("Reshape", [name, self.ints(shape)], hint)

    def finish(self, name: str, inputs: dict[str, Sequence[int]], outputs: dict[str, Sequence[int]]) -> Any:
        """The ModelProto; -1 stands for the dimension `batch`."""
        onnx = require("onnx")
        self._drop_unused(outputs)

        def infos(tensors: dict[str, Sequence[int]]) -> list[Any]:
            kind = onnx.TensorProto.FLOAT
            shapes = {key: [BATCH if side == -1 else side for side in shape] for key, shape in tensors.items()}
            return [onnx.helper.make_tensor_value_info(key, kind, shape) for key, shape in shapes.items()]

        graph = onnx.helper.make_graph(
            self.nodes, name, infos(inputs), infos(outputs), initializer=list(self.constants.values())
        )
        opset = onnx.helper.make_opsetid("", OPSET)
        # the oldest format that knows 4-bit integers: newer ones shut out runtimes for nothing
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10, producer_name="aphq")

    def _drop_unused(self, outputs: Iterable[str]) -> None:
        needed = set(outputs)
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(node.input)
        self.nodes = kept[::-1]
        self.constants = {name: proto for name, proto in self.constants.items() if name in needed}
