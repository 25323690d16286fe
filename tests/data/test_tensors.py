from typing import Any

import pytest
import torch

from aphq.data import Preprocessing
from aphq.data.tensors import as_batch, split_item
from aphq.errors import DataError

X, Y = torch.zeros(2, 3, 16, 16), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("item", "labels"),
    [
        (X, None),
        ((X, Y), Y),
        ([X, Y], Y),
        ((X,), None),
        ((X, Y, "paths"), Y),
        ({"pixel_values": X, "labels": Y}, Y),
        ({"image": X, "label": Y}, Y),
        ({"image": X}, None),
    ],
)
def test_takes_images_and_labels_out_of_what_loaders_yield(item: Any, labels: Any) -> None:
    images, found = split_item(item)
    assert images is X
    assert found is labels


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_floats_become_float32(small: Preprocessing, dtype: torch.dtype) -> None:
    assert as_batch(X.to(dtype).requires_grad_(), small).dtype == torch.float32
    assert not as_batch(X.to(dtype).requires_grad_(), small).requires_grad


def test_pixels_stay_pixels(small: Preprocessing) -> None:
    assert as_batch(X.byte(), small).dtype == torch.uint8


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 1, 16, 16), r"\[N, 3, 16, 16\], got \[2, 1, 16, 16\]"),
        (torch.zeros(2, 3, 16, 17), r"got \[2, 3, 16, 17\]"),
        (torch.zeros(3, 16, 16), r"got \[3, 16, 16\]"),
        (X.int(), "int32"),
        (X + float("nan"), "NaN"),
        (X - float("inf"), "infinite"),
        ("a.jpg", "got str"),
        (None, "'pixel_values' or 'image'"),
    ],
)
def test_what_does_not_fit_is_refused(small: Preprocessing, images: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_batch(images, small)
