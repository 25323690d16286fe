"""transformers' Swin V2, with a classifier or bare."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Swinv2ForImageClassification, Swinv2Model
from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

from aphq.models.architecture import Mlp, NormPair, register, replace_all
from aphq.models.attention import Projections
from aphq.models.attention_cosine import CosineAttention, table_of
from aphq.models.hf.base import require_parts
from aphq.models.hf.swin import HfSwin, Size

LAYERS = ("query", "key", "value")


class CosineSelfAttention(CosineAttention):
    """`Swinv2SelfAttention`; the output projection belongs to its parent."""

    def __init__(self, source: Any) -> None:
        heads = source.num_attention_heads
        table = table_of(source.continuous_position_bias_mlp, source.relative_coords_table, heads)
        area = source.window_size[0] * source.window_size[1]
        super().__init__(heads, area, source.logit_scale, table, source.relative_position_index)
        self.query, self.key, self.value = source.query, source.key, source.value

    def projections(self) -> Projections | None:
        return None  # the output's layer is out of reach

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any) -> tuple[Tensor]:
        q, k, v = (self.split(getattr(self, name)(hidden_states)) for name in LAYERS)
        mask = None if attention_mask is None else 2 * attention_mask.unsqueeze(1)  # the original adds it twice
        return (self.core(q, k, v, mask).transpose(1, 2).flatten(2),)


@register
class HfSwinv2(HfSwin):
    """It normalises last, so no layer reads a norm alone."""

    family = "transformers.Swinv2"
    classes = (Swinv2ForImageClassification, Swinv2Model)  # type: ignore[assignment]
    body = "swinv2"

    def check(self, model: Any) -> None:
        for name, block, _ in self.blocks(model):
            parts = ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
            require_parts(block, name, *parts)

    def mlp(self, name: str) -> Mlp:
        inner = f"{name}.intermediate"
        return Mlp(inner, f"{inner}.dense", f"{inner}.intermediate_act_fn", f"{name}.output.dense")

    def norms(self, name: str, block: Any, size: Size) -> tuple[NormPair, ...]:
        return ()

    def merge_norms(self, name: str) -> tuple[NormPair, ...]:
        return ()

    def open_attention(self, model: Any) -> None:
        replace_all(model, {Swinv2SelfAttention: CosineSelfAttention})
