"""The plain torch side of a step's two ends; tests/kernels holds the kernels against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aphq.engine.store import Activations, Store
from aphq.quant.drop import Drop
from aphq.stages.batches import mixed_rows, recordable, weighted_error
from aphq.stages.importance import ImportanceMap

CPU = torch.device("cpu")
STORE = Store(CPU, gpu_bytes=None, host_bytes=None, folder=None)
seeds = st.integers(0, 10**6)


def kept(values: Tensor) -> Activations:
    rows = STORE.allocate(tuple(values.shape))
    rows.data.copy_(values)
    return rows


def drop(share: float) -> Drop:
    return Drop(share, 1, torch.zeros(1, dtype=torch.long))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["none", "shared", "each"]),
    st.sampled_from([(5,), (4, 6), (3, 2, 5)]),
    st.integers(1, 9),
    seeds,
)
def test_the_error_is_the_weighted_sum_of_squares_row_by_row(
    kind: str, shape: tuple[int, ...], batch: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(7, *shape, generator=generator)
    weights = torch.rand(1 if kind == "shared" else 7, *shape, generator=generator)
    index = torch.randint(7, (batch,), generator=generator)  # rows may come twice
    out, factors = torch.randn(batch, *shape, generator=generator), torch.rand(batch, generator=generator)
    importance = ImportanceMap(
        shared=weights if kind == "shared" else None, each=kept(weights) if kind == "each" else None
    )
    expected = torch.zeros((), dtype=torch.float64)
    for row, source in enumerate(index.tolist()):
        weight = {"none": torch.ones(shape), "shared": weights[0], "each": weights[source % len(weights)]}[kind]
        expected += factors[row] * (weight.double() * (out[row] - targets[source]).double() ** 2).sum()
    found = weighted_error(out, kept(targets), index, importance, factors)
    assert found.shape == ()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["none", "shared", "each"])
def test_the_error_has_the_gradient_of_its_formula(kind: str) -> None:
    torch.manual_seed(0)
    targets, weights = torch.randn(6, 4, 5), torch.rand(6, 4, 5)
    importance = ImportanceMap(
        shared=weights[:1] if kind == "shared" else None, each=kept(weights) if kind == "each" else None
    )
    index, factors = torch.tensor([4, 0, 4]), torch.tensor([0.5, 2.0, 0.0])
    out = torch.randn(3, 4, 5, requires_grad=True)
    weighted_error(out, kept(targets), index, importance, factors).backward()
    weight = {"none": torch.ones(1), "shared": weights[:1], "each": weights[index]}[kind]
    torch.testing.assert_close(
        out.grad, 2 * factors[:, None, None] * weight * (out.detach() - targets[index]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9])
def test_every_element_comes_from_one_of_the_two_in_about_the_right_share(share: float) -> None:
    torch.manual_seed(0)
    teacher, student = torch.randn(2, 40, 50, 32)
    index = torch.randperm(40)[:30]
    found = mixed_rows(kept(teacher), kept(student), index, drop(share))
    from_student = found == student[index]
    assert torch.equal(found, torch.where(from_student, student[index], teacher[index]))
    assert from_student.float().mean().item() == pytest.approx(share, abs=0.01)
    for dim in range(3):  # spread over rows, tokens and channels alike
        others = [d for d in range(3) if d != dim]
        assert (from_student.float().mean(others) - share).abs().max() < 0.1


def test_each_call_mixes_anew() -> None:
    teacher, student, index = kept(torch.zeros(4, 1000)), kept(torch.ones(4, 1000)), torch.arange(4)
    assert not torch.equal(*(mixed_rows(teacher, student, index, drop(0.5)) for _ in range(2)))


def test_where_the_student_still_is_the_teacher_there_is_nothing_to_mix() -> None:
    rows, index = kept(torch.randn(6, 8)), torch.tensor([5, 0, 5])
    before = torch.get_rng_state()
    assert torch.equal(mixed_rows(rows, rows, index, drop(0.5)), rows.data[index])
    assert torch.equal(torch.get_rng_state(), before), "and nothing to draw"


def test_only_rows_that_lie_on_the_device_can_be_recorded() -> None:
    here = kept(torch.zeros(2, 3))
    elsewhere = Activations(torch.zeros(2, 3), torch.device("meta"), "host", lambda: None)
    assert recordable(here, None, here)
    assert not recordable(here, elsewhere)
