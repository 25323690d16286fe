import numpy as np
import pytest

from aphq.export.graph import Graph

onnx = pytest.importorskip("onnx")


def test_equal_constants_are_stored_once() -> None:
    graph = Graph()
    first = graph.constant(np.ones(3, np.float32), "a")
    assert graph.constant(np.ones(3, np.float32), "b") == first
    assert graph.constant(np.ones(3, np.int8), "b") != first
    assert graph.constant(np.ones((3, 1), np.float32), "b") != first


def test_what_no_output_needs_is_left_out() -> None:
    graph = Graph()
    kept = graph.node("Relu", ["x"])
    graph.node("Add", [kept, graph.constant(np.ones(3, np.float32))])
    proto = graph.finish("test", {"x": (-1, 3)}, {kept: (-1, 3)})
    assert [node.op_type for node in proto.graph.node] == ["Relu"]
    assert not proto.graph.initializer
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("count", [6, 7])
def test_half_bytes_come_back(count: int) -> None:
    graph = Graph()
    codes = np.arange(count) % 16
    name = graph.four_bit_constant(codes.reshape(1, count), "codes")
    found = onnx.numpy_helper.to_array(graph.constants[name])
    assert found.astype(int).tolist() == [codes.tolist()]
