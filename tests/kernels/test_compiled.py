"""The compiled passes of the CPU against their plain torch twins."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from aphq import kernels
from aphq.kernels import compiled
from aphq.quant.affine import fake_quantize_learned
from aphq.quant.drop import Drop
from aphq.stages.mlp_reconstruction import relu_and_clamped

LAYOUTS = ["tensor", "rows", "heads", "transposed", "one scale for all heads"]


@pytest.fixture
def small_tensors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled.compiler_works():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(compiled, "LARGE", 1)


def both(function: Callable[..., Tensor], *inputs: Tensor) -> Iterator[list[Tensor]]:
    """[value, gradients ...] compiled, then plain, with the same random numbers."""
    for switched_on in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "switched_on", switched_on)
            torch.manual_seed(0)
            leaves = [x.detach().requires_grad_() for x in inputs]
            y = function(*leaves)
            weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            yield [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]


def operand(layout: str) -> tuple[Tensor, Tensor]:
    """(x, scale) as a site of that kind has them, with values beyond the range and exactly between two codes."""
    if layout == "tensor":
        x, scale = torch.randn(3, 50, 48), torch.tensor([0.25])
        x[0, 0, :4] = torch.tensor([0.125, 0.375, 0.0, -0.125])
    elif layout == "rows":
        x, scale = torch.randn(33, 20), torch.rand(33, 1) + 0.2
    else:
        x = torch.randn(2, 19, 3, 4, 16).permute(2, 0, 3, 1, 4)[1]  # one of q, k, v, as attention cuts it out
        scale = torch.tensor([0.5]) if layout == "one scale for all heads" else torch.rand(4, 1, 1) + 0.2
        x = x.mT if layout == "transposed" else x
    return x, scale


@pytest.mark.usefixtures("small_tensors_too")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dropping", [False, True])
def test_a_quantizer_gives_the_same_elements(layout: str, relu: bool, dropping: bool) -> None:
    torch.manual_seed(2)
    x, scale = operand(layout)
    drop = Drop(0.7, 5, torch.zeros(1, dtype=torch.long)) if dropping else None
    mine, plain = both(
        lambda x, scale: fake_quantize_learned(x, scale, torch.full_like(scale, 3), 3, drop, relu), x, scale
    )
    assert torch.equal(mine[0], plain[0])
    assert torch.equal(mine[1], plain[1])
    torch.testing.assert_close(mine[2], plain[2], rtol=1e-4, atol=1e-4)  # a sum, in another order


@pytest.mark.usefixtures("small_tensors_too")
def test_drops_are_drawn_anew_every_time() -> None:
    x, scale = torch.randn(40, 40), torch.tensor([0.3])
    drop = Drop(0.5, 5, torch.zeros(1, dtype=torch.long))
    first, second = (fake_quantize_learned(x, scale, torch.tensor([4.0]), 3, drop) for _ in range(2))
    assert not torch.equal(first, second)
    assert (first == x).float().mean().item() == pytest.approx(0.5, abs=0.1)


@pytest.mark.usefixtures("small_tensors_too")
def test_relu_and_clamped_give_the_same_elements() -> None:
    mine, plain = both(lambda x: relu_and_clamped(x, 0.8), torch.randn(5, 7, 12))
    assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


def test_only_large_tensors_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise AssertionError("asked for a compiler")

    monkeypatch.setattr(compiled, "compiler_works", fail)
    assert not compiled.usable(torch.zeros(1000))


def test_without_a_compiler_the_plain_twin_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(compiled, "_relu_and_clamped", broken)
    monkeypatch.setattr(compiled, "compiler_works", compiled.compiler_works.__wrapped__)
    monkeypatch.setattr(compiled, "LARGE", 1)
    x = torch.randn(4, 4, requires_grad=True)
    assert fake_quantize_learned(x, torch.tensor([0.3]), torch.tensor([4.0]), 3).shape == x.shape
    assert "no working C++ compiler" in caplog.text
