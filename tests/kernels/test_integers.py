"""Kernels on signed bytes against plain torch: on the GPU where there is one, else in Triton's interpreter."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from aphq import kernels
from aphq.kernels import byte_linear, integers
from aphq.kernels.byte_attention import BLOCK, Block, attention
from aphq.kernels.byte_codes import codes
from aphq.kernels.byte_linear import LARGE, SMALL, Tile, linear
from aphq.kernels.integers import TWO_PASSES
from aphq.models.architecture import predict
from aphq.models.attention import biased, exponentials
from aphq.quant.quantizer import Quantizer
from aphq.runtimes.int8 import to_int8
from aphq.runtimes.int8_layers import affine_of, bytes_by

from ..export.exports import calibrated, normalised, relative
from ..models.families import FAMILIES
from ..models.variants import family

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GENERATOR = torch.Generator()
Random = Callable[..., Tensor]
TINY = Tile(16, 16, 32, 4, 1)  # several tiles in every direction, of a matrix that the interpreter takes


@pytest.fixture
def random() -> Random:
    GENERATOR.manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=GENERATOR).to(DEVICE)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=GENERATOR).to(DEVICE, torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes(random: Random, dtype: torch.dtype) -> None:
    x = random(37, 50).to(dtype)
    wanted = (x.float() / 0.02).round().clamp(-100, 155)
    assert torch.equal(codes(x, 0.02, -100, 155, 28).float() + 28, wanted)
    assert codes(x[:0], 0.02, -100, 155, 28).shape == (0, 50)


def layer(random: Random, inner: int, shifted: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """The arguments of a linear layer of 20 outputs, padded to 24, and what it gives before its activation."""
    x, weight, scale, bias = bytes_of(37, inner), bytes_of(24, -(-inner // 8) * 8), random(20).abs() * 1e-4, random(20)
    constant, column = bytes_of(20).int(), bytes_of(20).int() if shifted else torch.empty(0, device=DEVICE).int()
    sums = x.cpu().int() @ weight[:20, :inner].cpu().int().T + constant.cpu()
    if shifted:
        sums += x.cpu().int().sum(1)[:, None] * column.cpu()
    return (x, weight, scale, bias, constant, column), sums.to(DEVICE).float() * scale + bias


def affine_columns(random: Random) -> Tensor:
    """[5, 20]: another scale, zero-point and shift for every column"""
    point = torch.arange(20, device=DEVICE) * 12.0
    scale = random(20).abs() * 0.05 + 0.01
    return torch.stack([scale, -point, 255 - point, 128 - point, 1 / scale])


@pytest.mark.parametrize("tile", [LARGE, SMALL, TINY])
@pytest.mark.parametrize(("inner", "shifted"), [(50, False), (50, True), (96, False), (128, True)])
def test_linear(random: Random, inner: int, shifted: bool, tile: Tile) -> None:
    """Sums that tiles divide, and others."""
    given, wanted = layer(random, inner, shifted)
    found = linear(*given, torch.float32, tile=tile)  # type: ignore[arg-type]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    x, *others = given
    assert linear(x[:0], *others, torch.float32).shape == (0, 20)  # type: ignore[arg-type]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"": lambda x: x, "relu": torch.relu, "gelu": F.gelu}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_floats_out_of_a_linear_layer(random: Random, activation: str, dtype: torch.dtype) -> None:
    given, before = layer(random, 50, True)
    assert (before < -1).any()
    found = linear(*given, dtype, activation, tile=TINY)  # type: ignore[arg-type]
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.float(), ACTIVATIONS[activation](before), rtol=2 * eps, atol=16 * eps)


@pytest.mark.parametrize(("alike", "whole"), [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_bytes_out_of_a_linear_layer(random: Random, activation: str, alike: bool, whole: bool) -> None:
    given, before = layer(random, 50, True)
    emits = affine_columns(random)
    if not whole:  # fewer bits
        emits[2] = emits[1] + 63
    if alike:
        emits = emits[:, 2:3].contiguous()
    wanted = ACTIVATIONS[activation](before)
    found = linear(*given, torch.float32, activation, emits, whole, TINY)  # type: ignore[arg-type]
    assert found.dtype == torch.int8
    off = (found.int() - bytes_by(wanted, emits).int()).abs()
    assert len(found.unique()) > 20
    assert off.max() <= 1  # a value on the edge between two codes may take either
    assert (off > 0).float().mean() < 1e-2


def quantizer(random: Random, low: float, high: float, per_head: bool, symmetric: bool) -> Quantizer:
    groups = (3, 1, 1) if per_head else ()
    found = Quantizer(8, symmetric, groups).to(DEVICE)
    found.set_range(low - random(*groups).abs(), high + 0.1 * random(*groups).abs())
    return found


@pytest.mark.parametrize("block", [BLOCK._replace(queries=32), TWO_PASSES])
@pytest.mark.parametrize("given", ["floats", "bytes"])
@pytest.mark.parametrize("emits", [False, True])
@pytest.mark.parametrize(
    ("tokens", "per_head", "symmetric", "periods", "late"),
    [
        (37, False, True, 0, False),
        (37, True, False, 4, True),
        (70, True, False, 2, False),
        (70, False, False, 0, False),
        (70, False, True, 2, True),
    ],
)
def test_attention(
    random: Random,
    tokens: int,
    per_head: bool,
    symmetric: bool,
    periods: int,
    late: bool,
    given: str,
    emits: bool,
    block: Block,
) -> None:
    batch = max(2, periods)
    q = random(batch, tokens, 3, 20).transpose(1, 2)
    k, v = random(batch, 3, tokens, 20), random(batch, 3, tokens, 33)
    bias = random(periods, 1, tokens, tokens) if periods else None
    operands = [quantizer(random, -1.5, 1.7, per_head, symmetric) for _ in range(2)]
    softmax = quantizer(random, 0.0, 1.0 if late else 0.2, per_head, False)
    values = quantizer(random, -2.0, 1.5, per_head, symmetric)
    scores = operands[0].integers(q) @ operands[1].integers(k).transpose(-2, -1)
    scores = biased(scores * (operands[0].scale * operands[1].scale), 0.2, bias)
    p = exponentials(scores) if late else scores.softmax(-1)
    wanted = (softmax.integers(p) @ values.integers(v)) * (softmax.scale * values.scale)
    wanted = wanted / p.sum(-1, keepdim=True) if late else wanted
    affines = torch.stack([affine_of(one, 3) for one in (*operands, softmax, values)])
    if given == "bytes":
        q, k, v = (bytes_by(x, affines[i, :, :, None, None]) for x, i in ((q, 0), (k, 1), (v, 3)))
    out = torch.tensor([0.013, -100.0, 155.0, 28.0, 1 / 0.013], device=DEVICE) if emits else None
    options: dict[str, Any] = {"qk_shifted": not symmetric, "v_shifted": not symmetric, "relative": late}
    found = attention(q, k, v, 0.2, bias, affines, torch.float32, out, block=block, **options)
    assert found.transpose(1, 2).flatten(2).data_ptr() == found.data_ptr()  # as the projection reads it, no copy
    assert found.shape == wanted.shape
    # a probability on the edge between two codes may take either
    if out is None:
        assert ((found - wanted).abs() > 1e-5).float().mean() < 1e-3
    else:
        assert found.dtype == torch.int8
        assert len(found.unique()) > 20
        assert (found != bytes_by(wanted, out)).float().mean() < 5e-3


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreted", True)


def fused_model(model: nn.Module) -> Any:
    """Of integers, where the kernels are."""
    found = to_int8(copy.deepcopy(model)).to(DEVICE)
    assert all(part.uses_kernels for part in found.modules() if hasattr(part, "uses_kernels"))
    return found


def watched(model: nn.Module, images: Tensor) -> tuple[Tensor, set[str]]:
    """What a model predicts, and which of its modules get bytes from what comes before them."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        module.register_forward_pre_hook(
            lambda _, given, name=name: (
                seen.add(name) if given and isinstance(given[0], Tensor) and given[0].dtype == torch.int8 else None
            )
        )
    return predict(model, images.to(DEVICE)).cpu(), seen


FIRST = {"vit": "blocks.0", "swin": "layers.0.blocks.1"}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["vit", "swin"])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("softmax", ["probabilities", "exponentials"])
def test_a_model_of_bytes_is_the_simulated_one(
    kind: str, per_head: bool, softmax: str, tiny_vit: Any, tiny_swin: Any
) -> None:
    float_model = {"vit": tiny_vit, "swin": tiny_swin}[kind]
    options = {"activations__attention": "head" if per_head else "tensor", "activations__softmax": softmax}
    model = calibrated(float_model, **options)
    images = normalised(model, 3)
    found, seen = watched(fused_model(model), images)
    assert relative(found, model(images)) < 1e-3
    block = FIRST[kind]
    assert {f"{block}.mlp.fc2", f"{block}.attn.in_bytes", f"{block}.attn.proj"} <= seen


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("torchvision swin", ("features.1.1.mlp.3", "features.1.1.attn.in_bytes", "features.1.1.attn.proj")),
        ("transformers vit", ("mlp.fc2", "attention.in_bytes", "attention.o_proj")),
        ("timm eva, eva02", ("blocks.0.attn.proj",)),  # queries and keys are turned by their positions first
    ],
)
def test_other_families(name: str, inside: tuple[str, ...]) -> None:
    if name not in FAMILIES:
        pytest.skip("transformers is not installed")
    model = calibrated(family(name))
    images = normalised(model, 3)
    found, seen = watched(fused_model(model), images)
    assert relative(found, predict(model, images)) < 1e-3
    for part in inside:
        assert any(one.endswith(part) for one in seen), part
    assert any(one.endswith(".in_bytes") for one in seen) == any(part.endswith("in_bytes") for part in inside)


@pytest.mark.usefixtures("interpreted")
def test_norms_between_keep_floats(vit: Any) -> None:
    """Queries and keys are normalised after their layer, and the MLP before its second."""
    model = calibrated(vit(qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True))
    images = normalised(model, 3)
    found, seen = watched(fused_model(model), images)
    assert relative(found, model(images)) < 1e-3
    assert seen == set()


@pytest.mark.usefixtures("interpreted")
def test_bf16_between_layers_leaves_the_integers_alone(tiny_vit: nn.Module) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 4)
    integer = fused_model(model)
    before = integer.blocks[0].mlp.fc1.scale.clone()
    found = integer.bfloat16()(images.to(DEVICE, torch.bfloat16))
    assert torch.equal(integer.blocks[0].mlp.fc1.scale, before)
    assert found.dtype == torch.bfloat16
    assert relative(found.cpu().float(), model(images)) < 5e-2


@pytest.mark.usefixtures("interpreted")
def test_kernels_that_compute_something_else_are_not_used(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 4)
    monkeypatch.setattr(byte_linear, "linear", lambda x, weight, *_: torch.zeros(len(x), len(weight), device=x.device))
    integers.right.cache_clear()
    try:
        integer = to_int8(copy.deepcopy(model)).to(DEVICE)
        found = integer(images.to(DEVICE)).cpu()
    finally:
        integers.right.cache_clear()
    assert "integer kernels do not work here (products of bytes are wrong); running without them" in caplog.text
    assert not any(part.by_kernels for part in integer.modules() if hasattr(part, "by_kernels"))
    assert relative(found, model(images)) < (1e-4 if DEVICE.type == "cpu" else 1e-2)
