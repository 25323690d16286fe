"""Attention with its two products as modules, so that they can be quantized like any layer.

Each class takes over the children and parameters of the timm module it replaces, under the same names. While neither
product is active it calls the same fused kernel as timm, so an unquantized model is the original bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from aphq.quant.layers import QuantizedProduct


class OpenAttention(nn.Module):
    """What all open attentions share: the products and the core between the projections."""

    def __init__(self, heads: int, scale: float, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused = heads, scale, fused
        self.qk = QuantizedProduct(heads)  # q k^T
        self.pv = QuantizedProduct(heads)  # softmax(...) v

    def core(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """[batch, heads, tokens, channels] each -> the same; `bias` is added to the scores."""
        opened = self.qk.active or self.pv.active
        if self.fused and not opened:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        if opened:  # the scale comes after the product of integers, where it costs nothing
            scores = self.qk(q, k.transpose(-2, -1)) * self.scale
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        out: Tensor = self.pv(scores.softmax(dim=-1), v)
        return out


class VitAttention(OpenAttention):
    """timm's `Attention`."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.head_dim = source.head_dim
        self.qkv, self.proj = source.qkv, source.proj
        self.q_norm, self.k_norm, self.norm = source.q_norm, source.k_norm, getattr(source, "norm", nn.Identity())

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [batch, heads, tokens, channels]
        x = self.core(self.q_norm(q), self.k_norm(k), v, attn_mask)
        out: Tensor = self.proj(self.norm(x.transpose(1, 2).reshape(batch, tokens, -1)))
        return out


class SwinAttention(OpenAttention):
    """timm's `WindowAttention`; the batch is images times windows."""

    relative_position_index: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.window_area = source.window_area
        self.qkv, self.proj = source.qkv, source.proj
        self.relative_position_bias_table = source.relative_position_bias_table
        self.register_buffer("relative_position_index", source.relative_position_index, persistent=False)

    def position_bias(self) -> Tensor:
        """[1, heads, tokens, tokens]"""
        table = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias: Tensor = table.view(self.window_area, self.window_area, -1).permute(2, 0, 1).contiguous()
        return bias.unsqueeze(0)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        bias = self.position_bias()
        if mask is not None:  # [windows, tokens, tokens], the same for every image and head
            windows = mask.shape[0]
            mask = mask.view(1, windows, 1, tokens, tokens).expand(batch // windows, -1, self.num_heads, -1, -1)
            bias = bias + mask.reshape(-1, self.num_heads, tokens, tokens)
        x = self.core(q, k, v, bias)
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class LatentPool(OpenAttention):
    """timm's `AttentionPoolLatent`: learned queries gather the tokens into one vector."""

    def __init__(self, source: Any) -> None:
        super().__init__(source.num_heads, source.scale, source.fused_attn)
        self.head_dim, self.latent_len, self.pool = source.head_dim, source.latent_len, source.pool
        self.latent, self.pos_embed = source.latent, source.pos_embed
        self.q, self.kv, self.proj = source.q, source.kv, source.proj
        self.q_norm, self.k_norm, self.norm, self.mlp = source.q_norm, source.k_norm, source.norm, source.mlp

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        latent = self.latent.expand(batch, -1, -1)
        q = self.q(latent).reshape(batch, self.latent_len, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        x = self.core(self.q_norm(q), self.k_norm(k), v, None)
        x = self.proj(x.transpose(1, 2).reshape(batch, self.latent_len, channels))
        x = x + self.mlp(self.norm(x))
        return x[:, 0] if self.pool == "token" else x.mean(1) if self.pool == "avg" else x
