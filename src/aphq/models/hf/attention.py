"""The attention of nearly all vision models in transformers: one layer each for queries, keys, values and output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from aphq.models.attention import OpenAttention, Projection, Projections

LAYERS = ("q_proj", "k_proj", "v_proj")
OUTPUTS = ("o_proj", "out_proj")


class SplitAttention(OpenAttention):
    """Takes tokens, and a bias of the scores as `attention_mask`; gives (tokens, None) as the original does."""

    late_scale = True

    def __init__(self, source: Any) -> None:
        heads = getattr(source, "num_attention_heads", None) or source.num_heads
        scale = source.scaling if hasattr(source, "scaling") else source.scale
        super().__init__(heads, scale, source.config._attn_implementation != "eager", given_scale=scale)
        self.output_name = next(name for name in OUTPUTS if hasattr(source, name))
        for name in (*LAYERS, self.output_name):
            setattr(self, name, getattr(source, name))
        self.relative_position_bias: nn.Module | None = getattr(source, "relative_position_bias", None)

    def projections(self) -> Projections:
        q, k, v = (Projection(getattr(self, name)) for name in LAYERS)
        return Projections(q, k, v, getattr(self, self.output_name))

    def bias(self, mask: Tensor | None) -> Tensor | None:
        """[1 or windows, heads or 1, tokens, tokens]; a mask of windows is the same for every image and head."""
        if self.relative_position_bias is None:
            return mask
        bias: Tensor = self.relative_position_bias()
        return bias if mask is None else bias + mask.unsqueeze(1)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split(getattr(self, name)(hidden_states)) for name in LAYERS)
        out = self.core(q, k, v, self.bias(attention_mask))
        return getattr(self, self.output_name)(out.transpose(1, 2).flatten(2)), None


def is_split(module: nn.Module) -> bool:
    """Whether a module is such an attention: by its layers, for every model has a class of its own."""
    return (
        type(module).__module__.startswith("transformers.")
        and all(isinstance(getattr(module, name, None), nn.Linear) for name in LAYERS)
        and any(isinstance(getattr(module, name, None), nn.Linear) for name in OUTPUTS)
    )
