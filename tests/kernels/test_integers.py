"""Kernels on signed bytes against plain torch: on the GPU where there is one, else in Triton's interpreter."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from aphq import kernels
from aphq.kernels import integers
from aphq.models.attention import probabilities
from aphq.quant.quantizer import Quantizer
from aphq.runtimes.int8 import _affine, to_int8

from ..export.exports import calibrated, normalised, relative

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GENERATOR = torch.Generator()


@pytest.fixture
def random() -> Callable[..., Tensor]:
    GENERATOR.manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=GENERATOR).to(DEVICE)


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=GENERATOR).to(DEVICE, torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes(random: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = random(37, 50).to(dtype)
    wanted = (x.float() / 0.02).round().clamp(-100, 155)
    assert torch.equal(integers.codes(x, 0.02, -100, 155, 28).float() + 28, wanted)
    assert integers.codes(x[:0], 0.02, -100, 155, 28).shape == (0, 50)


@pytest.mark.parametrize("shifted", [False, True])
def test_linear(random: Callable[..., Tensor], shifted: bool) -> None:
    x, weight, scale, bias = bytes_of(37, 50), bytes_of(24, 56), random(20).abs(), random(20)
    constant, column = bytes_of(20).int(), bytes_of(20).int() if shifted else torch.empty(0, device=DEVICE).int()
    sums = x.cpu().int() @ weight[:20, :50].cpu().int().T + constant.cpu()
    if shifted:
        sums += x.cpu().int().sum(1)[:, None] * column.cpu()
    wanted = sums.to(DEVICE).float() * scale + bias
    found = integers.linear(x, weight, scale, bias, constant, column, torch.float32)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6 * float(wanted.abs().max()))
    assert integers.linear(x[:0], weight, scale, bias, constant, column, torch.float32).shape == (0, 20)


def quantizer(random: Callable[..., Tensor], low: float, high: float, per_head: bool, symmetric: bool) -> Quantizer:
    groups = (3, 1, 1) if per_head else ()
    found = Quantizer(8, symmetric, groups).to(DEVICE)
    found.set_range(low - random(*groups).abs(), high + 0.1 * random(*groups).abs())
    return found


@pytest.mark.parametrize(
    ("tokens", "per_head", "symmetric", "periods"),
    [(37, False, True, 0), (37, True, False, 2), (70, True, False, 4), (130, False, False, 0)],
)
def test_attention(random: Callable[..., Tensor], tokens: int, per_head: bool, symmetric: bool, periods: int) -> None:
    q, k, v = random(4, tokens, 3, 20).transpose(1, 2), random(4, 3, tokens, 20), random(4, 3, tokens, 33)
    bias = random(periods, 1, tokens, tokens) if periods else None
    operands = [quantizer(random, -1.5, 1.7, per_head, symmetric) for _ in range(2)]
    softmax, values = quantizer(random, 0.0, 0.2, per_head, False), quantizer(random, -2.0, 1.5, per_head, symmetric)
    scores = operands[0].integers(q) @ operands[1].integers(k).transpose(-2, -1)
    p = probabilities(scores * (operands[0].scale * operands[1].scale), 0.2, bias)
    wanted = (softmax.integers(p) @ values.integers(v)) * (softmax.scale * values.scale)
    affines = torch.stack([_affine(one, 3) for one in (*operands, softmax, values)])
    found = integers.attention(q, k, v, 0.2, bias, affines)
    # a probability on the edge between two codes may take either
    assert ((found - wanted).abs() > 1e-5).float().mean() < 1e-3


def test_a_model_of_bytes_is_the_simulated_one(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 4)
    monkeypatch.setattr(kernels, "interpreted", True)
    found = to_int8(copy.deepcopy(model)).to(DEVICE)(images.to(DEVICE)).cpu()
    assert relative(found, model(images)) < 1e-3


def test_kernels_that_compute_something_else_are_not_used(
    tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = calibrated(tiny_vit)
    images = normalised(model, 4)
    monkeypatch.setattr(kernels, "interpreted", True)
    monkeypatch.setattr(integers, "linear", lambda x, weight, *_: torch.zeros(len(x), len(weight), device=x.device))
    integers._right.cache_clear()
    try:
        found = to_int8(copy.deepcopy(model)).to(DEVICE)(images.to(DEVICE)).cpu()
    finally:
        integers._right.cache_clear()
    assert "integer kernels do not work here (products of bytes are wrong); running without them" in caplog.text
    assert relative(found, model(images)) < 1e-2
