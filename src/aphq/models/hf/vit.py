"""transformers' ViT and DeiT, with a classifier, two of them, or none."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTModel,
    ViTForImageClassification,
    ViTModel,
)

from aphq.models.architecture import Reader, Unit, register, unchanged
from aphq.models.hf.base import HALF
from aphq.models.hf.plain import HfPlain, Layout


@register
class HfVit(HfPlain):
    family = "transformers.ViT"
    classes = (ViTForImageClassification, ViTModel)
    body = "vit"
    layout = Layout("layers")
    mean: ClassVar[tuple[float, ...]] = HALF
    std: ClassVar[tuple[float, ...]] = HALF

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        out: Tensor = root.layernorm(x)[:, 0]
        return out

    def head(self, model: Any) -> Unit:
        """Without a classifier the pooler, a layer on the class token, makes the embedding."""
        _, root = self.root(model)
        if getattr(root, "pooler", None) is not None:
            return Unit("pooler", "head", _pooler, unchanged, ("pooler",))
        return super().head(model)

    def last_reader(self, model: Any) -> Reader | None:
        prefix, root = self.root(model)
        pooler = ("pooler.dense",) if getattr(root, "pooler", None) is not None else ()
        names = tuple(n for n in self.heads(model) if not isinstance(model.get_submodule(n), nn.Identity))
        return Reader(f"{prefix}layernorm", names or pooler) if names or pooler else None


@register
class HfDeit(HfVit):
    family = "transformers.DeiT"
    classes = (DeiTForImageClassification, DeiTForImageClassificationWithTeacher, DeiTModel)  # type: ignore[assignment]
    body = "deit"
    processor = "DeiT"
    mean, std = HfPlain.mean, HfPlain.std

    def heads(self, model: Any) -> tuple[str, ...]:
        pair = ("cls_classifier", "distillation_classifier")
        return pair if hasattr(model, pair[0]) else super().heads(model)

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        tokens: Tensor = root.layernorm(x)
        return tokens[:, :2] if len(self.heads(model)) == 2 else tokens[:, 0]

    def head(self, model: Any) -> Unit:
        names = self.heads(model)
        if len(names) == 2:
            return Unit(names[0], "head", _average, unchanged, names)
        return super().head(model)


def _average(model: Any, x: Tensor) -> Tensor:
    out: Tensor = (model.cls_classifier(x[:, 0]) + model.distillation_classifier(x[:, 1])) / 2
    return out


def _pooler(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.pooler.activation(model.pooler.dense(x))
    return out
