from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aphq.quant import search
from aphq.quant.affine import affine_from_range, fake_quantize
from aphq.quant.search import Cost, Range, Searcher, group_quantile, output_cost, reduce_to, self_cost

BITS = range(2, 9)
CANDIDATES, NARROWEST = 128, 0.9


def searcher(x: Tensor, groups: tuple[int, ...], bits: int, symmetric: bool = False) -> Searcher:
    return Searcher.of(x, groups, bits, symmetric, CANDIDATES, NARROWEST)


def price(cost: Cost, form: Searcher, found: Range) -> Tensor:
    """What a range costs, per group."""
    scale, zero_point = form.affine(found)
    return cost(scale[None], zero_point[None])[0]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- the search --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 8), st.booleans(), st.sampled_from([(1,), (6, 1), (1, 1)]), st.integers(0, 10**6))
def test_a_search_never_ends_worse_than_the_full_range(
    bits: int, symmetric: bool, groups: tuple[int, ...], seed: int
) -> None:
    x = random(6, 40, seed=seed) ** 3
    right = random(40, 30, seed=seed + 1)
    right_hat = right + 0.1 * random(40, 30, seed=seed + 2)
    form = searcher(x, groups, bits, symmetric)
    own, product = self_cost(x, groups, bits), output_cost(x, right, right_hat, groups, bits)
    full = price(own, form, form.full)
    first = form.start(own)
    assert (price(own, form, first) <= full).all()
    then = form.improve(product, first)
    assert (price(product, form, then) <= price(product, form, first)).all()


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda u: u,
    "positive": lambda u: u.abs(),
    "heavy tails": lambda u: u**3,
    "off centre": lambda u: u + 2,
    "negative": lambda u: -(u**2),
}


def brute_force(x: Tensor, bits: int, symmetric: bool) -> float:
    """The least squared error over a fine grid of both ends."""
    share = torch.linspace(0.02, 1, 120)
    lower, upper = x.min().clamp_max(0), x.max().clamp_min(0)
    pairs = torch.stack([share, share], 1) if symmetric else torch.cartesian_prod(share, share)
    scale, zero_point = affine_from_range(lower * pairs[:, 0], upper * pairs[:, 1], bits, symmetric)
    y = fake_quantize(x[None], scale[:, None], zero_point[:, None], bits)
    return (y - x).square().sum(1).min().item()


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_a_search_finds_nearly_the_best_range(kind: str, bits: int, symmetric: bool) -> None:
    for seed in range(3):
        x = DISTRIBUTIONS[kind](random(400, seed=seed))
        form, cost = searcher(x, (1,), bits, symmetric), self_cost(x, (1,), bits)
        assert price(cost, form, form.start(cost)).item() <= 1.15 * brute_force(x, bits, symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_lone_outlier_is_clipped(symmetric: bool) -> None:
    x = random(50_000)
    x[7] = 100 * x.std()
    form, cost = searcher(x, (1,), 4, symmetric), self_cost(x, (1,), 4)
    found = form.start(cost)
    assert 2 < found.upper.item() < 10
    assert price(cost, form, found) < 0.5 * price(cost, form, form.full)


@pytest.mark.parametrize("symmetric", [False, True])
def test_dead_and_constant_channels_get_usable_scales(symmetric: bool) -> None:
    x = random(4, 32)
    x[0], x[1], x[2] = 0.0, 3.0, -1e-20
    form = searcher(x, (4, 1), 4, symmetric)
    for found in (form.full, form.start(self_cost(x, (4, 1), 4))):
        scale, zero_point = form.affine(found)
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()
        assert torch.isfinite(fake_quantize(x, scale, zero_point, 4)).all()
    y = fake_quantize(x, scale, zero_point, 4)
    assert torch.equal(y[0], x[0])
    torch.testing.assert_close(y[1], x[1])


def test_groups_are_searched_as_if_alone() -> None:
    x = random(5, 40) * torch.tensor([1.0, 10.0, 0.1, 3.0, 1e-4])[:, None]
    form = searcher(x, (5, 1), 4)
    together = form.start(self_cost(x, (5, 1), 4))
    for row, lower, upper in zip(x, together.lower, together.upper, strict=True):
        alone = searcher(row, (1,), 4)
        found = alone.start(self_cost(row, (1,), 4))
        torch.testing.assert_close(torch.cat([lower, upper]), torch.cat([found.lower, found.upper]))


def test_a_sample_is_searched_over_the_range_of_the_whole() -> None:
    x = random(2000)
    whole = Range(torch.tensor([-8.0]), torch.tensor([8.0]))
    form = Searcher.of(x, (1,), 8, False, CANDIDATES, NARROWEST, whole)
    assert form.full is whole
    found = form.start(self_cost(x, (1,), 8))
    assert x.max() * 0.8 < found.upper.item() < 8


def test_results_do_not_depend_on_how_many_candidates_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(6, 40)
    form, cost = searcher(x, (6, 1), 3), self_cost(x, (6, 1), 3)
    wide = form.start(cost)
    monkeypatch.setitem(search.ELEMENTS_AT_ONCE, "cpu", 3 * x.numel())
    narrow = form.start(cost)
    assert torch.equal(wide.lower, narrow.lower)
    assert torch.equal(wide.upper, narrow.upper)


# -- the costs ---------------------------------------------------------------------------------------------------------

CASES = {  # left, right, groups
    "weight per row, few tokens": ((5, 12), (12, 7), (5, 1)),
    "weight per row, many tokens": ((5, 12), (12, 50), (5, 1)),
    "weight per tensor, many tokens": ((5, 12), (12, 50), (1, 1)),
    "activation, few outputs": ((30, 12), (12, 5), (1,)),
    "activation, many outputs": ((30, 12), (12, 40), (1,)),
    "product per head, few columns": ((2, 3, 6, 8), (2, 3, 8, 4), (3, 1, 1)),
    "product per head, many columns": ((2, 3, 6, 4), (2, 3, 4, 9), (3, 1, 1)),
    "product for all heads": ((2, 3, 6, 4), (2, 3, 4, 9), (1,)),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("case", CASES)
def test_the_output_cost_is_the_error_of_the_output(case: str, bits: int) -> None:
    left_shape, right_shape, groups = CASES[case]
    left = random(*left_shape, dtype=torch.float64)
    right = random(*right_shape, seed=1, dtype=torch.float64)
    right_hat = right + 0.05 * random(*right_shape, seed=2, dtype=torch.float64)
    shrink = torch.tensor([0.5, 0.8, 1.0], dtype=torch.float64).reshape(-1, *(1,) * len(groups))
    full = reduce_to(left, groups, torch.amin), reduce_to(left, groups, torch.amax)
    scale, zero_point = affine_from_range(full[0] * shrink, full[1] * shrink, bits)

    found = output_cost(left, right, right_hat, groups, bits)(scale, zero_point)
    errors = torch.stack(
        [(fake_quantize(left, s, z, bits) @ right_hat - left @ right) for s, z in zip(scale, zero_point, strict=True)]
    )
    wanted = torch.stack([reduce_to(e.square(), groups, torch.sum) for e in errors])
    if right_shape[-1] > right_shape[-2]:  # through the Gram matrix: less the part that no candidate changes
        wanted = wanted - reduce_to((left @ (right_hat - right)).square(), groups, torch.sum)
    assert found.shape == (3, *groups)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_the_own_cost_is_the_squared_error_per_group() -> None:
    x = random(2, 3, 4, 5)
    scale = torch.tensor([0.1, 0.5, 1.0]).reshape(1, 3, 1, 1)
    found = self_cost(x, (3, 1, 1), 4)(scale, torch.full_like(scale, 8.0))
    wanted = (fake_quantize(x, scale[0], torch.tensor(8.0), 4) - x).square().sum((0, 2, 3))
    torch.testing.assert_close(found.reshape(3), wanted)


def test_in_float32_at_8_bits_the_cost_still_tells_candidates_apart() -> None:
    left, right = random(64, 48), random(48, 200, seed=1)
    form = searcher(left, (1,), 8)
    found = form.improve(output_cost(left, right, right, (1,), 8), form.full)
    y = [fake_quantize(left, *form.affine(r), 8) @ right - left @ right for r in (found, form.full)]
    assert y[0].square().sum() <= y[1].square().sum() * (1 + 1e-4)


# -- helpers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "kept"), [((1,), ()), ((1, 1), ()), ((3, 1, 1), (1,)), ((2, 3, 1, 1), (0, 1)), ((5,), (3,))]
)
def test_reduction_keeps_the_dimensions_of_the_groups(groups: tuple[int, ...], kept: tuple[int, ...]) -> None:
    x = random(2, 3, 4, 5)
    dims = tuple(d for d in range(4) if d not in kept)
    assert torch.equal(reduce_to(x, groups, torch.amax), x.amax(dims).reshape(groups))
    rows = x.permute(*kept, *dims).reshape(x.amax(dims).numel(), -1)
    wanted = rows.quantile(0.7, dim=1).reshape(groups)
    torch.testing.assert_close(group_quantile(x, groups, 0.7), wanted)


def test_a_quantile_over_many_tokens_looks_at_every_channel() -> None:
    x = torch.zeros(4096, 96)  # more elements than are sorted, channels fastest: a stride could skip some for ever
    for channel in range(96):
        x[:, channel] = 1.0
        assert group_quantile(x, (1,), 0.995).item() == 1.0, f"channel {channel} is 1 % of the values"
        x[:, channel] = 0.0
