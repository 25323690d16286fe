"""Top-1 and top-5 of one or more models over the same labelled images, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from aphq.data.labelled import Labelled
from aphq.data.preprocessing import Preprocessing
from aphq.errors import DataError
from aphq.models.architecture import predict


@dataclass(frozen=True)
class Accuracy:
    """In per cent, over `images` images."""

    top1: float
    top5: float
    images: int

    def __str__(self) -> str:
        return f"top-1 {self.top1:.2f} %  top-5 {self.top5:.2f} %  ({self.images} images)"


@dataclass(frozen=True)
class Comparison:
    """Several models on the same images; `agreement` is the share of equal predictions with the first model."""

    accuracy: dict[str, Accuracy]
    agreement: dict[str, float]


@torch.no_grad()
def compare(
    models: Mapping[str, nn.Module],
    data: Labelled,
    preprocessing: Preprocessing,
    *,
    batch: int = 50,
    device: torch.device | str = "cpu",
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Comparison:
    """Each model on every image; `progress(n)` after each batch of n images."""
    hits = {name: [0, 0] for name in models}
    agreed = dict.fromkeys(models, 0)
    images = 0
    for pixels, labels in data.batches(preprocessing, batch, limit=limit):
        pixels, labels = pixels.to(device), labels.to(device)
        first = None
        for name, model in models.items():
            logits = predict(model, pixels)
            ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            predicted = logits.argmax(dim=1)
            hits[name][0] += int((predicted == labels).sum())
            hits[name][1] += int(ranked.any(dim=1).sum())
            first = predicted if first is None else first
            agreed[name] += int((predicted == first).sum())
        images += len(labels)
        if progress:
            progress(len(labels))
    if images == 0:
        raise DataError("there is no image to evaluate on")
    accuracy = {name: Accuracy(100 * top1 / images, 100 * top5 / images, images) for name, (top1, top5) in hits.items()}
    return Comparison(accuracy, {name: 100 * count / images for name, count in agreed.items()})
