"""Feeding a runtime that takes a fixed number of images at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Infer = Callable[[NDArray[Any]], NDArray[Any]]


def in_batches(infer: Infer, images: Tensor, batch: int | None) -> Tensor:
    """The outputs for all images; the last batch is filled up with zeros, whose outputs are dropped."""
    found = []
    for part in images.float().cpu().split(batch or len(images)):
        missing = 0 if batch is None else batch - len(part)
        whole = torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part
        found.append(torch.from_numpy(np.array(infer(whole.contiguous().numpy())))[: len(part)])
    return torch.cat(found)
