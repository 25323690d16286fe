"""What the adapters of torchvision's models share."""

from __future__ import annotations

from aphq.data.preprocessing import Preprocessing
from aphq.models.architecture import Mlp


def mlp_of(name: str) -> Mlp:
    """torchvision's MLP is a sequence: linear, activation, dropout, linear, dropout."""
    return Mlp(name, f"{name}.0", f"{name}.1", f"{name}.3")


def torchvision_input(size: int, resized: int | None = None) -> Preprocessing:
    """The usual transforms of its weights: the short side to `resized` (256 for 224), then the centre; ImageNet's mean
    and deviation. Weights with other habits have them in `weights.transforms()`: pass `preprocessing`."""
    short = resized or (256 if size == 224 else size)
    return Preprocessing((size, size), interpolation="bilinear", crop_pct=size / short)
