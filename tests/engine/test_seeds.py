import torch
from hypothesis import given
from hypothesis import strategies as st

from aphq.engine.seeds import generator_for, seed_for, seeded

CPU = torch.device("cpu")


@given(st.integers(), st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_a_seed_is_a_63_bit_number_that_depends_on_nothing_else(seed: int, purpose: list[str]) -> None:
    found = seed_for(seed, *purpose)
    assert 0 <= found < 2**63
    assert seed_for(seed, *purpose) == found


def test_every_purpose_has_its_own_numbers() -> None:
    seeds = [seed_for(s, *p) for s in (0, 1) for p in ((), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",))]
    assert len(set(seeds)) == len(seeds)


def test_known_values_never_change() -> None:
    """A recipe's results depend on these."""
    assert seed_for(0, "a") == 4174393671465045295


def test_a_block_draws_the_same_whatever_ran_before_and_leaves_no_trace() -> None:
    torch.manual_seed(5)
    untouched = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1, "unit", device=CPU):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), untouched), "the generator outside goes on as if nothing had been drawn"
    torch.rand(100)
    with seeded(1, "unit", device=CPU):
        assert torch.equal(torch.rand(3), first)
    with seeded(1, "other", device=CPU):
        assert not torch.equal(torch.rand(3), first)


def test_the_generator_is_restored_after_an_error() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    try:
        with seeded(1, "unit", device=CPU):
            torch.rand(3)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_generators_are_independent() -> None:
    a, b = generator_for(1, "x"), generator_for(1, "x")
    assert torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    assert not torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=generator_for(1, "y")))
