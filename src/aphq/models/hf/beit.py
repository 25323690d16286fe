"""transformers' BEiT, with a classifier or bare."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import BeitForImageClassification, BeitModel
from transformers.models.beit.modeling_beit import BeitRelativePositionBias

from aphq.errors import ModelError
from aphq.models.architecture import Reader, Step, Unit, register, replace_all, unchanged
from aphq.models.hf.base import HALF
from aphq.models.hf.plain import HfPlain, Layout, tensor_of


class FixedPositionBias(nn.Module):
    """`BeitRelativePositionBias` for the one image size that the model was built for, without its interpolation."""

    index: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.tokens = source.window_size[0] * source.window_size[1] + 1
        self.relative_position_bias_table = source.relative_position_bias_table
        index = source.generate_relative_position_index(source.window_size)
        self.register_buffer("index", index.flatten().to(source.relative_position_bias_table.device), persistent=False)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """[1, heads, tokens, tokens]"""
        table = self.relative_position_bias_table[self.index]
        return table.view(self.tokens, self.tokens, -1).permute(2, 0, 1).contiguous().unsqueeze(0)


@register
class HfBeit(HfPlain):
    family = "transformers.Beit"
    classes = (BeitForImageClassification, BeitModel)
    body = "beit"
    layout = Layout("layers", scales=("lambda_1", "lambda_2"))
    processor = "Beit"
    mean = std = HALF

    def check(self, model: Any) -> None:
        super().check(model)
        size = model.config.image_size
        if not isinstance(size, int) and len(set(size)) > 1:
            raise ModelError(f"the model is a {type(model).__name__} for images of {size}; supported: square images")
        _, root = self.root(model)
        if root.pooler is None:
            raise ModelError("this BeitModel was built without its pooler and gives no embedding")

    def step(self, block: str) -> Step:
        def run(model: Any, x: Tensor) -> Tensor:
            _, root = self.root(model)
            size = model.config.image_size
            size = (size, size) if isinstance(size, int) else tuple(size)
            shared = None if root.shared_position_bias is None else root.shared_position_bias(_window(model, size))
            return tensor_of(model.get_submodule(block)(x, attention_mask=shared, resolution=size))

        return run

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        _, root = self.root(model)
        out: Tensor = root.pooler(root.layernorm(x))
        return out

    def head(self, model: Any) -> Unit:
        if not self.heads(model):
            return Unit("pooler", "head", unchanged, unchanged, ())
        return super().head(model)

    def last_reader(self, model: Any) -> Reader | None:
        prefix, root = self.root(model)
        if self.task_of(model) == "embedding":
            return None
        norm = "pooler.layernorm" if root.pooler.layernorm is not None else "layernorm"
        return Reader(f"{prefix}{norm}", ("classifier",))

    def open_attention(self, model: Any) -> None:
        super().open_attention(model)
        replace_all(model, {BeitRelativePositionBias: FixedPositionBias})


def _window(model: Any, size: tuple[int, int]) -> tuple[int, int]:
    patch = model.config.patch_size
    return size[0] // patch, size[1] // patch
