import pytest
import torch

from aphq.quant.affine import fake_quantize
from aphq.quant.drop import Drop
from aphq.quant.quantizer import Quantizer

X = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))


def calibrated(bits: int = 4, symmetric: bool = False, shape: tuple[int, ...] = (1,)) -> Quantizer:
    quantizer = Quantizer(bits, symmetric, shape)
    quantizer.set_range(torch.full(shape, -1.0), torch.full(shape, 1.5))
    quantizer.enabled = True
    return quantizer


def test_disabled_it_gives_back_what_it_got() -> None:
    assert Quantizer(4, False, (1,))(X) is X


def test_without_a_range_it_is_loud() -> None:
    quantizer = Quantizer(4, False, (1,))
    assert not quantizer.calibrated
    quantizer.enabled = True
    assert quantizer(X).isnan().all()
    assert calibrated().calibrated


@pytest.mark.parametrize("shape", [(1,), (3, 1, 1)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_values_land_on_the_grid_between_the_limits(symmetric: bool, shape: tuple[int, ...]) -> None:
    quantizer = calibrated(3, symmetric, shape)
    with torch.no_grad():
        y = quantizer(10 * X)
    lowest, highest = quantizer.limits()
    assert y.min() == lowest.min()
    assert y.max() == highest.max()
    codes = quantizer.codes(10 * X)
    assert torch.equal((codes - quantizer.zero_point) * quantizer.scale, y)
    assert 4 < y.unique().numel() <= 8


def test_each_head_has_its_own_range() -> None:
    quantizer = Quantizer(8, False, (3, 1, 1))
    quantizer.set_range(torch.zeros(3), torch.tensor([1.0, 2.0, 4.0]))
    quantizer.enabled = True
    with torch.no_grad():
        y = quantizer(torch.full((2, 3, 5, 4), 9.0))
    assert y.amax((0, 2, 3)).tolist() == pytest.approx([1.0, 2.0, 4.0])


def test_with_and_without_gradients_the_values_are_the_same() -> None:
    quantizer = calibrated()
    with torch.no_grad():
        plain = quantizer(X)
    assert torch.equal(quantizer(X), plain)


def test_the_scale_learns_when_asked() -> None:
    quantizer = calibrated()
    quantizer.scale.requires_grad_(True)
    quantizer(X).square().sum().backward()
    assert quantizer.scale.grad is not None
    assert quantizer.scale.grad.abs() > 0


@pytest.mark.parametrize("gradients", [False, True])
def test_dropping_leaves_each_element_in_float_or_on_the_grid(gradients: bool) -> None:
    quantizer = calibrated()
    quantizer.drop = Drop(0.25, 1, torch.zeros(1, dtype=torch.long))
    x = torch.rand(100, 100)
    full = fake_quantize(x, quantizer.scale.data, quantizer.zero_point, 4)
    torch.manual_seed(0)
    with torch.set_grad_enabled(gradients):
        y = quantizer(x)
    is_float, is_grid = y == x, y == full
    assert (is_float | is_grid).all()
    assert is_grid.float().mean().item() == pytest.approx(0.25, abs=0.02)
    with torch.set_grad_enabled(gradients):
        assert not torch.equal(quantizer(x), y), "each call draws anew"


def test_scale_and_zero_point_are_its_state() -> None:
    source, target = calibrated(shape=(3, 1, 1)), Quantizer(4, False, (3, 1, 1))
    assert set(source.state_dict()) == {"scale", "zero_point"}
    target.load_state_dict(source.state_dict())
    target.enabled = True
    assert torch.equal(source(X), target(X))


def test_printing_tells_the_format() -> None:
    assert "3 bits, symmetric, scales (3, 1, 1)" in repr(Quantizer(3, True, (3, 1, 1)))


@pytest.mark.parametrize("gradients", [False, True])
def test_it_can_take_over_the_relu_before_it(gradients: bool) -> None:
    quantizer = calibrated(shape=(3, 1, 1))
    with torch.set_grad_enabled(gradients):
        apart = quantizer(X.relu())
        quantizer.relu = True
        assert torch.equal(quantizer(X), apart)
        quantizer.enabled = False
        assert torch.equal(quantizer(X), X.relu()), "switched off it is still the ReLU"


def test_learning_means_on_with_gradients_and_something_to_learn() -> None:
    quantizer = calibrated()
    assert not quantizer.learning
    quantizer.scale.requires_grad_(True)
    assert quantizer.learning
    with torch.no_grad():
        assert not quantizer.learning
    quantizer.enabled = False
    assert not quantizer.learning
