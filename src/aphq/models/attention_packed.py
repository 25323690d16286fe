"""torch's `nn.MultiheadAttention` opened: its packed projections become layers.

A parameter of a module cannot be a layer under the same name, so in_proj_weight becomes qkv.weight (or q.weight and
kv.weight where queries come from elsewhere) and out_proj becomes proj.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from aphq.errors import ModelError
from aphq.models.attention import OpenAttention, linear_of


def require_plain(source: nn.MultiheadAttention, name: str) -> None:
    """Refuse what the open classes do not compute."""
    if not source.batch_first or not source._qkv_same_embed_dim or source.add_zero_attn or source.bias_k is not None:
        raise ModelError(
            f"module {name!r} is a MultiheadAttention of another kind; supported there: batch_first=True, one width "
            "for queries, keys and values, no add_bias_kv, no add_zero_attn"
        )


class PackedAttention(OpenAttention):
    """Tokens that attend to themselves."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__(source.num_heads, source.head_dim**-0.5, fused=True)
        self.qkv = linear_of(source.in_proj_weight, source.in_proj_bias)
        self.proj = linear_of(source.out_proj.weight, source.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, need_weights: bool = False) -> tuple[Tensor, None]:
        assert query is key, "opened where tokens attend to themselves"
        qkv = self.qkv(query).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(self.core(q, k, v, None).transpose(1, 2).flatten(2)), None


class PackedPool(OpenAttention):
    """Learned queries that attend to tokens; as it is called, torch fuses nothing."""

    def __init__(self, source: nn.MultiheadAttention) -> None:
        super().__init__(source.num_heads, math.sqrt(1 / source.head_dim), fused=False)
        width, bias = source.embed_dim, source.in_proj_bias
        self.q = linear_of(source.in_proj_weight[:width], None if bias is None else bias[:width])
        self.kv = linear_of(source.in_proj_weight[width:], None if bias is None else bias[width:])
        self.proj = linear_of(source.out_proj.weight, source.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, None]:
        kv = self.kv(key).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        k, v = kv.unbind(0)
        out = self.core(self.split(self.q(query)), k, v, None)
        return self.proj(out.transpose(1, 2).flatten(2)), None
