import torch

from aphq.quant.fixed_codes import FixedCodes
from aphq.quant.quantizer import Quantizer

from .weights import weight_and_quantizer


def made() -> tuple[torch.Tensor, Quantizer, FixedCodes]:
    weight, quantizer = weight_and_quantizer()
    return weight, quantizer, FixedCodes(weight, quantizer)


def test_it_gives_what_the_quantizer_does() -> None:
    weight, quantizer, fixed = made()
    assert torch.equal(fixed(), quantizer(weight))
    assert torch.equal(fixed.hard(), fixed())


def test_the_gradient_of_a_scale_is_that_of_a_gain() -> None:
    weight, quantizer, fixed = made()
    quantizer.scale.requires_grad_(True)
    fixed().square().sum().backward()
    got = quantizer(weight).detach()
    assert quantizer.scale.grad is not None
    assert torch.allclose(quantizer.scale.grad, (2 * got.square()).sum(1, keepdim=True) / quantizer.scale.detach())


def test_the_integers_survive_another_scale() -> None:
    weight, quantizer, fixed = made()
    before = quantizer.codes(weight)
    quantizer.scale.data *= torch.linspace(0.7, 1.9, 6)[:, None]
    assert torch.equal(quantizer.codes(fixed.hard()), before)
