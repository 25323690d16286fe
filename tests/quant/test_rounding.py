import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aphq.quant.affine import top_code
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding

seeds = st.integers(0, 10**6)
bits = st.integers(2, 8)


def prepare(seed: int, bits: int, symmetric: bool = False, clip: float = 1.0) -> tuple[Tensor, Quantizer]:
    """A weight [6, 10] and its quantizer per row; `clip` below 1 leaves weights outside the range."""
    weight = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
    quantizer = Quantizer(bits, symmetric, (6, 1))
    quantizer.set_range(clip * weight.amin(1, keepdim=True), clip * weight.amax(1, keepdim=True))
    return weight, quantizer


def inside(weight: Tensor, quantizer: Quantizer) -> Tensor:
    lowest, highest = quantizer.limits()
    return (weight >= lowest) & (weight <= highest)


@settings(deadline=None)
@given(seeds, bits, st.booleans(), st.sampled_from([1.0, 0.6]))
def test_it_starts_at_the_float_weight(seed: int, bits: int, symmetric: bool, clip: float) -> None:
    weight, quantizer = prepare(seed, bits, symmetric, clip)
    rounding = LearnedRounding(weight, quantizer)
    rounding.soften(torch.tensor(2.0))
    soft = rounding()
    within = inside(weight, quantizer)
    error = (soft - weight).abs() / quantizer.scale
    assert (error[within] < 1e-3).all()
    lowest, highest = quantizer.limits()
    torch.testing.assert_close(soft, weight.clamp(lowest, highest), rtol=0, atol=1e-3 * float(quantizer.scale.max()))


@settings(deadline=None)
@given(seeds, bits, st.booleans(), st.sampled_from([1.0, 0.6]), seeds)
def test_hard_is_the_floor_or_the_ceiling_on_the_grid(
    seed: int, bits: int, symmetric: bool, clip: float, noise: int
) -> None:
    weight, quantizer = prepare(seed, bits, symmetric, clip)
    rounding = LearnedRounding(weight, quantizer)
    rounding.alpha.data += 3 * torch.randn(6, 10, generator=torch.Generator().manual_seed(noise))
    hard = rounding.hard()
    codes = quantizer.codes(hard)
    assert torch.equal((codes - quantizer.zero_point) * quantizer.scale, hard), "on the grid, bit by bit"
    floor = (weight / quantizer.scale).floor() + quantizer.zero_point
    choices = torch.stack([floor, floor + 1]).clamp(0, top_code(bits))
    assert (codes == choices).any(dim=0).all()


@settings(deadline=None)
@given(seeds, bits)
def test_untrained_it_rounds_to_the_nearest(seed: int, bits: int) -> None:
    weight, quantizer = prepare(seed, bits)
    hard = LearnedRounding(weight, quantizer).hard()
    assert ((hard - weight).abs() <= quantizer.scale * (0.5 + 1e-4)).all()


@given(bits, st.floats(0.01, 10))
def test_weights_on_the_grid_start_between_the_bounds(bits: int, scale: float) -> None:
    """Whatever the last bits of a sigmoid are: at a bound itself there may be no gradient."""
    quantizer = Quantizer(bits, False, (1, 1))
    weight = scale * torch.arange(2**bits).reshape(1, -1).float()
    weight = torch.cat([weight, weight.nextafter(weight - 1), weight.nextafter(weight + 1)], 1)  # both of its ends
    quantizer.set_range(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))
    rounding = LearnedRounding(weight, quantizer)
    for towards in (0.0, 1.0):
        sigmoid = torch.sigmoid(rounding.alpha.detach())
        for _ in range(4):  # bits
            h = sigmoid * (rounding.zeta - rounding.gamma) + rounding.gamma
            assert ((h > 0) & (h < 1)).all()
            sigmoid = sigmoid.nextafter(torch.tensor(towards))


@pytest.mark.parametrize("beta", [2.0, 8.0, 20.0])
def test_the_penalty_vanishes_when_every_weight_has_decided(beta: float) -> None:
    weight, quantizer = prepare(0, 4)
    rounding = LearnedRounding(weight, quantizer)
    exponent = torch.tensor(beta)
    assert rounding.soften(exponent).sum() > 0
    rounding.alpha.data = 10 * rounding.alpha.data.sign()
    assert rounding.soften(exponent).sum().item() == 0
    assert torch.equal(rounding(), rounding.hard())
    rounding.alpha.data.zero_()
    assert rounding.soften(exponent).sum().item() == pytest.approx(weight.numel())


def test_the_penalty_pushes_towards_a_decision() -> None:
    weight, quantizer = prepare(1, 4)
    rounding = LearnedRounding(weight, quantizer)
    before = (rounding.soft() - 0.5).abs().sum()
    optimiser = torch.optim.Adam([rounding.alpha], lr=0.01)
    for _ in range(20):
        optimiser.zero_grad()
        rounding.soften(torch.tensor(2.0)).sum().backward()
        optimiser.step()
    assert (rounding.soft() - 0.5).abs().sum() > before


def test_only_the_rounding_learns() -> None:
    weight, quantizer = prepare(0, 4)
    rounding = LearnedRounding(weight, quantizer)
    rounding.soften(torch.tensor(2.0))
    rounding().sum().backward()
    assert [name for name, p in rounding.named_parameters() if p.grad is not None] == ["alpha"]
