"""Images that are in memory already: taking them out of what a loader yields, and checking that they fit the model."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aphq.data.preprocessing import Preprocessing
from aphq.errors import DataError


def split_item(item: Any) -> tuple[Any, Any]:
    """The images and the labels (None without) of what a loader yields: a tensor, a pair, or a dictionary."""
    if isinstance(item, (tuple, list)) and item:
        return item[0], item[1] if len(item) > 1 else None
    if isinstance(item, Mapping):
        images = next((item[key] for key in ("pixel_values", "image") if key in item), None)
        labels = next((item[key] for key in ("labels", "label") if key in item), None)
        return images, labels
    return item, None


def check_shape(images: Tensor, preprocessing: Preprocessing) -> None:
    """Raise unless images are [batch, channels, height, width] as the model needs them."""
    if images.ndim != 4 or tuple(images.shape[1:]) != preprocessing.shape:
        expected = ", ".join(map(str, preprocessing.shape))
        raise DataError(f"the model needs images of shape [N, {expected}], got {list(images.shape)}")


def as_batch(images: Any, preprocessing: Preprocessing) -> Tensor:
    """Check images and bring them to the CPU, as uint8 or float32 [batch, channels, height, width]."""
    if not isinstance(images, Tensor):
        raise DataError(
            f"images must be tensors, got {type(images).__name__}: give tensors, (images, labels) pairs "
            "or dictionaries with 'pixel_values' or 'image'"
        )
    check_shape(images, preprocessing)
    pixels: Tensor = images.detach().cpu()
    if pixels.dtype == torch.uint8:
        return pixels
    if not pixels.is_floating_point():
        raise DataError(f"images must be uint8 or float (already normalised), got {pixels.dtype}")
    if not torch.isfinite(pixels).all():
        raise DataError("the images hold NaN or infinite values: check the transform that made them")
    return pixels.float()
