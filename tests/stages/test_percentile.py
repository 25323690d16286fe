import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aphq.stages.percentile import positive_percentile


def by_sorting(values: Tensor, share: float) -> float:
    positive = values[values > 0].sort().values
    return positive[max(1, math.ceil(share * len(positive))) - 1].item() if len(positive) else 0.0


def stream(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    return lambda: list(tensors)


floats = st.floats(width=32, allow_nan=False, allow_subnormal=True) | st.sampled_from([0.0, 1.0, 1.5, 1e-45, -1.0])
shares = st.floats(0, 1) | st.sampled_from([0.0, 0.5, 0.98, 0.99, 1.0])


@given(st.lists(st.lists(floats, max_size=30), min_size=1, max_size=4), shares)
def test_the_percentile_is_that_of_a_sort(parts: list[list[float]], share: float) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    assert positive_percentile(stream(*tensors), share) == by_sorting(torch.cat(tensors), share)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.98, 0.99, 0.9999, 1.0])
def test_large_tensors_of_any_shape(share: float) -> None:
    x = torch.randn(8, 50, 60, generator=torch.Generator().manual_seed(0))
    assert positive_percentile(stream(*x.split(3)), share) == by_sorting(x, share)


def test_ties_fall_on_the_tied_value() -> None:
    x = torch.cat([torch.full((500,), 0.25), torch.full((500,), 0.75)])
    assert positive_percentile(stream(x), 0.5) == 0.25
    assert positive_percentile(stream(x), 0.501) == 0.75


def test_denormals_are_positive() -> None:
    x = torch.tensor([1e-45, 1e-42, 1e-40, 1.0])
    assert positive_percentile(stream(x), 0.5) == x[1].item()


@pytest.mark.parametrize("x", [torch.zeros(5), -torch.rand(5), torch.empty(0), torch.tensor([torch.nan])])
def test_without_positive_values_it_is_zero(x: Tensor) -> None:
    assert positive_percentile(stream(x), 0.99) == 0.0


def test_strided_tensors_are_read_in_place() -> None:
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    assert positive_percentile(stream(x.T), 0.9) == by_sorting(x, 0.9)
