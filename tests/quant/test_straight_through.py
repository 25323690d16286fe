import torch

from aphq.quant.quantizer import Quantizer
from aphq.quant.straight_through import StraightThrough

from .weights import weight_and_quantizer


def made() -> tuple[torch.Tensor, Quantizer, StraightThrough]:
    weight, quantizer = weight_and_quantizer()
    return weight, quantizer, StraightThrough(weight, quantizer)


def test_it_starts_at_the_nearest_codes() -> None:
    weight, quantizer, rounding = made()
    assert torch.allclose(rounding(), quantizer(weight))
    assert torch.equal(rounding.hard(), rounding().detach())


def test_the_gradient_passes_the_rounding_and_reaches_the_scale() -> None:
    weight, quantizer, rounding = made()
    quantizer.scale.requires_grad_(True)
    target = torch.zeros_like(weight)
    (rounding() - target).square().sum().backward()
    assert rounding.master.grad is not None
    inside = (quantizer.codes(weight) > 0) & (quantizer.codes(weight) < 7)
    assert torch.allclose(rounding.master.grad[inside], 2 * quantizer(weight)[inside].detach())
    assert quantizer.scale.grad is not None
    assert quantizer.scale.grad.shape == (6, 1)


def test_learning_moves_codes_towards_what_is_wanted() -> None:
    weight, quantizer, rounding = made()
    target = quantizer(weight.flip(1)).detach()
    optimiser = torch.optim.Adam([rounding.master], lr=0.05)
    first = float((rounding.hard() - target).square().sum())
    for _ in range(60):
        optimiser.zero_grad()
        (rounding() - target).square().sum().backward()
        optimiser.step()
    assert float((rounding.hard() - target).square().sum()) < 0.05 * first
