import pytest
import torch
from torch import Tensor

from aphq.quant.compensation import compensated
from aphq.quant.quantizer import Quantizer


def problem(
    inputs: int = 100, outputs: int = 24, bits: int = 3, correlated: bool = True
) -> tuple[Tensor, Tensor, Quantizer]:
    """A weight, inputs [tokens, in] that lie mostly in a few directions, and a quantizer with ranges."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = torch.randn(2000, inputs, generator=generator)
    if correlated:
        x = 0.2 * x + torch.randn(2000, 8, generator=generator) @ torch.randn(8, inputs, generator=generator)
    quantizer = Quantizer(bits, False, (outputs, 1))
    quantizer.set_range(weight.amin(1), weight.amax(1))
    quantizer.enabled = True
    return weight, x, quantizer


def output_error(x: Tensor, weight: Tensor, rounded: Tensor) -> float:
    return float((x @ (weight - rounded).T).square().mean())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("inputs", [40, 64, 100, 150])
def test_the_output_moves_less_than_by_the_nearest_codes(inputs: int, bits: int) -> None:
    weight, x, quantizer = problem(inputs, bits=bits)
    rounded = compensated(weight, x.T @ x, quantizer)
    assert output_error(x, weight, rounded) < 0.7 * output_error(x, weight, quantizer(weight))


def test_the_result_is_on_the_grid() -> None:
    weight, x, quantizer = problem()
    rounded = compensated(weight, x.T @ x, quantizer)
    assert torch.equal(quantizer(rounded), rounded)


def test_inputs_that_have_nothing_in_common_leave_the_nearest_codes() -> None:
    weight, _, quantizer = problem()
    rounded = compensated(weight, torch.eye(100), quantizer)
    assert torch.allclose(rounded, quantizer(weight))


def test_a_dead_input_channel_does_no_harm() -> None:
    weight, x, quantizer = problem()
    x[:, 3] = 0
    rounded = compensated(weight, x.T @ x, quantizer)
    assert torch.isfinite(rounded).all()
    assert torch.isfinite(compensated(weight, torch.zeros(100, 100), quantizer)).all()


def test_one_scale_for_the_whole_layer_works_too() -> None:
    weight, x, _ = problem()
    quantizer = Quantizer(4, False, (1, 1))
    quantizer.set_range(weight.amin(), weight.amax())
    quantizer.enabled = True
    rounded = compensated(weight, x.T @ x, quantizer)
    assert output_error(x, weight, rounded) < output_error(x, weight, quantizer(weight))
