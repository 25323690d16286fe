import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aphq.analysis.budget import allocate, extrapolated, mean_bits
from aphq.errors import RecipeError

BITS = (3, 4, 5)
COUNTS = {("a", "weights"): 10, ("b", "weights"): 30, ("c", "weights"): 5, ("a", "activations"): 7}


def cost_of(chosen: dict[tuple[str, str], int], costs: dict[tuple[str, str, int], float]) -> float:
    return sum(costs[name, side, bits] for (name, side), bits in chosen.items())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=len(COUNTS), max_size=len(COUNTS)), st.sampled_from([3.0, 3.6, 4.0, 4.7]))
def test_no_other_choice_within_the_budget_costs_less(scales: list[float], target: float) -> None:
    costs = {
        (*side, bits): scale / 4 ** (bits - 3) for side, scale in zip(COUNTS, scales, strict=True) for bits in BITS
    }
    chosen = allocate(costs, COUNTS, target)
    fits = [
        dict(zip(COUNTS, bits, strict=True))
        for bits in itertools.product(BITS, repeat=len(COUNTS))
        if all(
            mean_bits(dict(zip(COUNTS, bits, strict=True)), COUNTS, kind) <= target + 1e-6
            for kind in ("weights", "activations")
        )
    ]
    assert chosen in fits
    assert cost_of(chosen, costs) <= min(cost_of(other, costs) for other in fits) * (1 + 1e-3) + 1e-6


def test_what_is_sensitive_gets_more_bits() -> None:
    costs = {("a", "weights", b): 100 / 4**b for b in BITS} | {("b", "weights", b): 1 / 4**b for b in BITS}
    counts = {("a", "weights"): 10, ("b", "weights"): 10}
    assert allocate(costs, counts, 4.0) == {("a", "weights"): 5, ("b", "weights"): 3}


def test_an_impossible_target_is_refused() -> None:
    with pytest.raises(RecipeError, match="no bits of at least 3 have a mean of 2"):
        allocate({("a", "weights", 3): 1.0}, {("a", "weights"): 4}, 2.0)


def test_costs_beyond_what_was_measured_fall_by_four_per_bit() -> None:
    assert extrapolated({3: 8.0, 4: 4.0}, range(2, 7)) == {3: 8.0, 4: 4.0, 5: 1.0, 6: 0.25}
