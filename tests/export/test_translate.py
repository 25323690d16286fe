"""Every supported model, as ONNX: the graph must compute what the fake-quantized model does, for any batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aphq.errors import ExportError
from aphq.export.operators import OPERATORS
from aphq.export.sites import STYLES
from aphq.export.trace import trace
from aphq.export.translate import translate
from aphq.models.architecture import predict
from aphq.quant.layers import QuantizedConv2d
from aphq.runtimes.onnxruntime import open_session

from ..models.families import FAMILIES
from ..models.variants import SWINS, VITS, family
from .exports import calibrated, distances, normalised, relative

Build = Callable[..., nn.Module]
EXACT = 1e-5
FEW_CODES = 2e-2
onnx = pytest.importorskip("onnx")


def exported(model: nn.Module, style: str = "openvino", batch: int | None = None) -> Any:
    sample = normalised(model, batch or 2)
    proto = translate(model, trace(model, sample, batch is None), STYLES[style])
    onnx.checker.check_model(proto, full_check=True)
    return proto


def run(proto: Any, images: Tensor, literal: bool = True) -> Tensor:
    infer, _ = open_session(proto.SerializeToString(), 1, literal=literal)
    return torch.from_numpy(infer(images.numpy()))


def operators(proto: Any) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def build(name: str, vit: Build, distilled: Build, swin: Build) -> nn.Module:
    if name in FAMILIES:
        return family(name)
    what, _, kind = name.partition(": ")
    if what == "distilled":
        return distilled()
    return vit(**VITS[kind]) if what == "vit" else swin(**SWINS[kind])


QUICK = ("vit: registers", "vit: map pooling", "vit: qk norm", "vit: rms norm", "vit: dynamic size with padding")
QUICK += ("vit: quick gelu", "vit: avgmax pooling", "distilled", "swin: three stages, padded", "swin: window divides")
ALL = (*(f"vit: {name}" for name in VITS), "distilled", *(f"swin: {name}" for name in SWINS), *FAMILIES)
VARIANTS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALL]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_the_model_at_any_batch(name: str, vit: Build, distilled: Build, swin: Build) -> None:
    model = calibrated(build(name, vit, distilled, swin))
    proto = exported(model)
    images = normalised(model, 8)
    expected = predict(model, images)
    found = distances(run(proto, images), expected)
    assert found.min() < EXACT, "what is wrong in the graph is wrong for every image"
    assert found.median() < FEW_CODES, "float operations of another library move a code here and there"
    assert run(proto, images[:1]).shape == expected[:1].shape


@pytest.mark.parametrize(
    ("bits", "style"),
    [("w8a8", "any"), ("w4a8", "onnxruntime"), ("w4a4", "any"), ("w3a3", "openvino"), ("w2a2", "any"), ("w6a5", "any")],
)
def test_every_width_is_exact(tiny_vit: nn.Module, bits: str, style: str) -> None:
    model = calibrated(tiny_vit, bits)
    images = normalised(model, 8)
    # an int32 bias is rounded to a step of the sum, which moves a few codes
    bound = EXACT if style == "openvino" or bits[-1] < "8" else FEW_CODES
    assert relative(run(exported(model, style), images), model(images)) < bound


@pytest.mark.parametrize(
    "changes",
    [
        {"weights__symmetric": False},
        {"weights__granularity": "tensor"},
        {"activations__symmetric": True},
        {"activations__attention": "head"},
        {"activations__softmax": "exponentials"},
        {"activations__softmax": "exponentials", "activations__attention": "head"},
        {"activations__softmax": "exponentials", "activations__symmetric": True},
        {"activations__softmax": "exponentials", "overrides__*.pv": None},
        {"activations__attention": "head", "activations__attention_symmetric": False},
        {"activations__attention_symmetric": False},
        {"overrides__head": None},
        {"overrides__*.attn.*": None},
        {"weights__bits": None},
        {"activations__bits": None},
    ],
    ids=str,
)
def test_every_number_format_is_exact(tiny_vit: nn.Module, changes: dict[str, Any]) -> None:
    model = calibrated(tiny_vit, "w8a8", **changes)
    images = normalised(model, 8)
    assert relative(run(exported(model), images), model(images)) < EXACT


@pytest.mark.parametrize("softmax", ["probabilities", "exponentials"])
def test_swin_below_eight_bits(tiny_swin: nn.Module, softmax: str) -> None:
    model = calibrated(tiny_swin, "w4a4", activations__softmax=softmax)
    images = normalised(model, 8)
    assert relative(run(exported(model), images), model(images)) < EXACT


def test_a_fixed_batch_is_fixed(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit)
    proto = exported(model, batch=2)
    assert [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 32, 32]
    with pytest.raises(Exception, match="Got invalid dimensions"):
        run(proto, normalised(model, 3))
    free = exported(model)
    assert free.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"


def test_onnx_runtime_multiplies_integers(tiny_vit: nn.Module, tmp_path: Any) -> None:
    """All layers as QGemm, the products as integer products, and ReLU gone."""
    for block in tiny_vit.blocks:  # type: ignore[union-attr]
        block.mlp.act = nn.ReLU()  # type: ignore[union-attr]
    model = calibrated(tiny_vit)
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(exported(model, "any", batch=1).SerializeToString(), options)
    found = operators(onnx.load(tmp_path / "fused.onnx"))
    assert found.count("QGemm") == 10  # 4 in each block, the patches, the head
    assert found.count("MatMulIntegerToFloat") + found.count("QLinearMatMul") == 4
    assert not {"Gemm", "MatMul", "Relu", "Conv"} & set(found)


@pytest.mark.parametrize("bits", ["w8a8", "w4a8", "w4a4"])
def test_openvino_multiplies_integers(tiny_vit: nn.Module, bits: str) -> None:
    openvino = pytest.importorskip("openvino")
    model = calibrated(tiny_vit, bits)
    core = openvino.Core()
    graph = core.read_model(exported(model, "any", batch=1).SerializeToString())
    compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [op.get_rt_info() for op in compiled.get_runtime_model().get_ordered_ops()]
    layers = [_text(kind["primitiveType"]) for kind in kinds if "FullyConnected" in _text(kind["layerType"])]
    if "avx512" not in "".join(layers):
        pytest.skip("what OpenVINO calls its kernels is known for AVX-512 only")
    assert len(layers) == 10
    assert all(layer.lower().endswith("i8") for layer in layers)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def test_weights_of_four_bits_and_less_take_half_a_byte(tiny_vit: nn.Module) -> None:
    kinds = {"w4a8": onnx.TensorProto.UINT4, "w3a8": onnx.TensorProto.UINT4, "w5a8": onnx.TensorProto.INT8}
    for bits, kind in kinds.items():
        weights = [t for t in exported(calibrated(tiny_vit, bits)).graph.initializer if "weight_integers" in t.name]
        assert len(weights) == 10
        assert {tensor.data_type for tensor in weights} == {kind}
        width = 1 if kind == onnx.TensorProto.INT8 else 2
        assert all(len(t.raw_data) == -(-int(np.prod(t.dims)) // width) for t in weights)


def test_an_odd_number_of_half_bytes(vit: Any) -> None:
    model = calibrated(vit(num_classes=7, embed_dim=30), "w3a8")
    images = normalised(model, 8)
    assert relative(run(exported(model), images), model(images)) < EXACT


def test_low_bit_inputs_are_clipped_before_they_are_quantized(tiny_vit: nn.Module) -> None:
    proto = exported(calibrated(tiny_vit, "w4a4"))
    makers = {node.output[0]: node for node in proto.graph.node}
    clipped = [n for n in proto.graph.node if n.op_type == "QuantizeLinear" and makers.get(n.input[0])]
    assert clipped
    for node in clipped:  # all but the image, which has eight bits
        if "patch_embed" not in node.name:
            assert makers[node.input[0]].op_type in ("Clip", "Min")


def test_a_kernel_that_does_not_tile_stays_a_convolution(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrated(tiny_vit)
    monkeypatch.setattr(QuantizedConv2d, "tiles", lambda *_: False)
    proto = exported(model)
    assert "Conv" in operators(proto)
    images = normalised(model, 8)
    assert relative(run(proto, images), model(images)) < EXACT


def test_an_unknown_operation_is_named(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrated(tiny_vit)
    monkeypatch.delitem(OPERATORS, torch.ops.aten.softmax.int)
    with pytest.raises(ExportError, match=r"aten\.softmax"):
        exported(model)


def test_masks_and_position_biases_are_stored_apart(swin: Build) -> None:
    """Their sum, for every window and head, would be the largest tensor in the file."""
    model = calibrated(swin(img_size=64))
    largest = max(int(np.prod(tensor.dims)) for tensor in exported(model).graph.initializer)
    masks = [block.attn_mask for stage in model.layers for block in stage.blocks if block.attn_mask is not None]  # type: ignore[union-attr]
    assert masks
    heads = 2
    assert largest < heads * max(mask.numel() for mask in masks)
