"""transformers' Swin, with a classifier or bare."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import SwinForImageClassification, SwinModel

from aphq.models.architecture import Mlp, NormPair, Step, Unit, register, unchanged
from aphq.models.hf.attention import LAYERS
from aphq.models.hf.base import HfArchitecture, require_parts
from aphq.models.hf.plain import tensor_of

Size = tuple[int, int]


@register
class HfSwin(HfArchitecture):
    family = "transformers.Swin"
    classes = (SwinForImageClassification, SwinModel)
    body = "swin"

    def check(self, model: Any) -> None:
        for name, block, _ in self.blocks(model):
            require_parts(block, name, "layernorm_before", "layernorm_after", "attention.q_proj", "mlp.fc1")

    def num_classes(self, model: Any) -> int:
        _, root = self.root(model)
        return int(model.config.num_labels if self.task_of(model) == "classification" else root.num_features)

    def blocks(self, model: Any) -> list[tuple[str, Any, Size]]:
        """With the size of the map that each sees."""
        return [(name, part, size) for name, part, size in self.parts(model) if not name.endswith("downsample")]

    def parts(self, model: Any) -> list[tuple[str, Any, Size]]:
        """Blocks and merges in forward order, with the size of the map that each sees."""
        prefix, root = self.root(model)
        height, width = root.embeddings.patch_grid
        found = []
        for s, stage in enumerate(root.encoder.layers):
            name = f"{prefix}encoder.layers.{s}"
            found += [(f"{name}.blocks.{b}", block, (height, width)) for b, block in enumerate(stage.blocks)]
            if stage.downsample is not None:
                found.append((f"{name}.downsample", stage.downsample, (height, width)))
                height, width = (height + 1) // 2, (width + 1) // 2
        return found

    def units(self, model: Any) -> tuple[Unit, ...]:
        prefix, _ = self.root(model)
        embed = f"{prefix}embeddings"
        units = [Unit(embed, "patch_embed", _tokens_of(embed), unchanged, (embed,))]
        parts = self.parts(model)
        for name, part, size in parts:
            bridge = self.pool if part is parts[-1][1] else unchanged
            if name.endswith("downsample"):
                units.append(Unit(name, "merge", _sized(name, size), bridge, (name,), norms=self.merge_norms(name)))
            else:
                inner = (self.mlp(name), self.norms(name, part, size))
                units.append(Unit(name, "block", _sized(name, size), bridge, (name,), *inner))
        heads = self.heads(model)
        run = _head if heads else unchanged
        units.append(Unit(heads[0] if heads else f"{prefix}layernorm", "head", run, unchanged, heads))
        return tuple(units)

    def pool(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        out: Tensor = root.pooler(root.layernorm(x).transpose(1, 2)).flatten(1)
        return out

    def mlp(self, name: str) -> Mlp:
        inner = f"{name}.mlp"
        return Mlp(inner, f"{inner}.fc1", f"{inner}.activation_fn", f"{inner}.fc2")

    def norms(self, name: str, block: Any, size: Size) -> tuple[NormPair, ...]:
        q, *others = (f"{name}.attention.{layer}" for layer in LAYERS)
        window = min(block.window_size, *size)  # a window larger than the map shrinks when the block first runs
        whole = all(side % window == 0 for side in size)  # else zeros fill up the last windows after the norm
        first = NormPair(f"{name}.layernorm_before", q, whole, tuple(others))
        return first, NormPair(f"{name}.layernorm_after", f"{name}.mlp.fc1")

    def merge_norms(self, name: str) -> tuple[NormPair, ...]:
        return (NormPair(f"{name}.norm", f"{name}.reduction"),)


def _tokens_of(name: str) -> Step:
    """The embeddings come with the size of their map."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        return tensor_of(model.get_submodule(name)(x))

    return run


def _sized(name: str, size: Size) -> Step:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return tensor_of(model.get_submodule(name)(x, size))

    return run


def _head(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.classifier(x)
    return out
