"""The attention of Swin V2: the cosine of queries and keys, times a learned factor per head.

Its position bias comes from a small MLP on fixed coordinates, so the bias is as fixed as they are. It is computed once,
when the attention is opened, and kept as a table like that of the first Swin: the MLP multiplies nothing that depends
on an image, and is gone.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from aphq.models.attention import OpenAttention

LARGEST_FACTOR = math.log(1 / 0.01)
WIDEST_BIAS = 16


class CosineAttention(OpenAttention):
    """What the opened attentions of all Swin V2 share; the batch is images times windows."""

    relative_position_index: Tensor
    usual_core = False

    def __init__(self, heads: int, window_area: int, logit_scale: nn.Parameter, table: Tensor, index: Tensor) -> None:
        """`table` [distances, heads] is what the MLP says of every distance; `index` picks one for each pair."""
        super().__init__(heads, 1.0, fused=False)
        self.window_area, self.logit_scale = window_area, logit_scale
        self.relative_position_bias_table = nn.Parameter(table.detach(), requires_grad=False)
        self.register_buffer("relative_position_index", index.flatten(), persistent=False)

    @property
    def direct(self) -> bool:
        return False

    def position_bias(self) -> Tensor:
        """[1, heads, tokens, tokens]"""
        table = self.relative_position_bias_table[self.relative_position_index]
        bias = table.view(self.window_area, self.window_area, -1).permute(2, 0, 1).contiguous()
        return WIDEST_BIAS * bias.sigmoid().unsqueeze(0)

    def core(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """`bias` is the mask of windows; the bias of positions comes first, as in the originals."""
        factor = self.logit_scale.clamp(max=LARGEST_FACTOR).exp()
        scores = self.qk(_unit(q), _unit(k).transpose(-2, -1)) * factor + self.position_bias()
        return self.mix_values(scores, 1.0, bias, v)


def _unit(x: Tensor) -> Tensor:
    """What `F.normalize` gives, by operations that broadcast."""
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)


@torch.no_grad()
def table_of(mlp: nn.Module, coordinates: Tensor, heads: int) -> Tensor:
    """What the position MLP says of its coordinates, [distances, heads]."""
    table: Any = mlp(coordinates)
    return table.view(-1, heads)
