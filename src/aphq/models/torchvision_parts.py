"""What the adapters of torchvision's models share."""

from __future__ import annotations

from typing import Any

from torch import nn

from aphq.data.preprocessing import Preprocessing
from aphq.models.architecture import Mlp
from aphq.models.timm_parts import construct, norm_factory


def mlp_of(name: str) -> Mlp:
    """torchvision's MLP is a sequence: linear, activation, dropout, linear, dropout."""
    return Mlp(name, f"{name}.0", f"{name}.1", f"{name}.3")


def build_with_head(cls: type[nn.Module], arguments: dict[str, Any], head: str) -> nn.Module:
    """A model from its description; without classes its `head` is an Identity, as it is for embeddings."""
    arguments["norm_layer"] = norm_factory(arguments.pop("norm"))
    classes = arguments.pop("num_classes")
    model = construct(cls, {**arguments, "num_classes": 1 if classes is None else classes})
    if classes is None:
        setattr(model, head, nn.Identity())
    return model


def torchvision_input(size: int, resized: int | None = None) -> Preprocessing:
    """The usual transforms of its weights: the short side to `resized` (256 for 224), then the centre; ImageNet's mean
    and deviation. Weights with other habits have them in `weights.transforms()`: pass `preprocessing`."""
    short = resized or (256 if size == 224 else size)
    return Preprocessing((size, size), interpolation="bilinear", crop_pct=size / short)
