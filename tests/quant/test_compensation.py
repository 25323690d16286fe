import pytest
import torch
from torch import Tensor

from aphq.quant.compensation import compensated, compensated_for
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


@pytest.mark.parametrize("rows", [2000, 60])
def test_rows_that_were_not_seen_gain_or_at_least_do_not_lose(rows: int) -> None:
    """Sixty rows cannot tell how a hundred inputs go together; two thousand can."""
    weight, x, quantizer = problem(bits=4)
    seen, fresh = x[:rows], problem()[1].flip(0)[:1000]
    if rows == 60:
        seen, fresh = (y + 2 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) for y in (seen, fresh))
    nearest, plain = output_error(fresh, weight, quantizer(weight)), compensated(weight, seen.T @ seen, quantizer)
    found = output_error(fresh, weight, compensated_for(weight, seen, quantizer))
    assert found < (0.7 if rows == 2000 else 1.01) * nearest
    if rows == 60:
        assert output_error(fresh, weight, plain) > 1.1 * nearest, "what the damping is for"


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_next_to_no_rows_give_codes_all_the_same(rows: int) -> None:
    weight, x, quantizer = problem()
    rounded = compensated_for(weight, x[:rows], quantizer)
    assert torch.equal(quantizer(rounded), rounded)
    if rows < 2:
        assert torch.equal(rounded, quantizer(weight)), "there is nothing to judge by"
