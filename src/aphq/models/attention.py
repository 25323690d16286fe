"""Attention with its two products as modules, so that they can be quantized like any layer.

Each class takes over the children and parameters of the module it replaces, under the same names where they are layers.
While neither product is active it calls the same fused kernel as the original, so an unquantized model is the original
bit for bit (but for torch's own `nn.MultiheadAttention`, which on some processors adds up in another order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq import kernels
from aphq.quant.affine import top_code
from aphq.quant.layers import QuantizedProduct
from aphq.quant.quantizer import Quantizer

TOKENS_BY = 4  # TF32 products of odd sizes run at a fraction of the speed


@dataclass(frozen=True)
class Projection:
    """Some rows of a linear layer: the queries, the keys or the values."""

    layer: Any
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass(frozen=True)
class Projections:
    """The layers around an attention."""

    query: Projection
    key: Projection
    value: Projection
    output: Any


class OpenAttention(nn.Module):
    """What all open attentions share: the products and the core between the projections."""

    late_scale = False  # where the original multiplies the scores, rather than the queries, if no kernel is fused
    usual_core = True  # whether `OpenAttention.core` is all that lies between the projections

    def __init__(self, heads: int, scale: float, fused: bool, given_scale: float | None = None) -> None:
        """`given_scale` is what the original hands to the fused kernel, None if it leaves that to the kernel."""
        super().__init__()
        self.num_heads, self.scale, self.fused, self.given_scale = heads, scale, fused, given_scale
        self.qk = QuantizedProduct(heads)  # q k^T
        self.pv = QuantizedProduct(heads)  # softmax(...) v
        self.in_bytes: Any = None  # how to do it all with integers (runtimes.int8_attention)

    def projections(self) -> Projections | None:
        """None where queries, keys, values and output have no layers of their own."""
        qkv, proj = getattr(self, "qkv", None), getattr(self, "proj", None)
        if qkv is None or proj is None:
            return None
        size = len(qkv.weight) // 3
        q, k, v = (Projection(qkv, slice(i * size, (i + 1) * size)) for i in range(3))
        return Projections(q, k, v, proj)

    @property
    def operand_quantizers(self) -> tuple[Quantizer | None, ...]:
        """The quantizers of queries, keys, softmax and values."""
        return self.qk.left, self.qk.right, self.pv.left, self.pv.right

    @property
    def direct(self) -> bool:
        """Whether queries and keys reach their product as the layers give them."""
        return self._all_identity("q_norm", "k_norm")

    @property
    def direct_output(self) -> bool:
        """Whether the projection gets what the second product gives."""
        return self._all_identity("norm")

    @property
    def averages(self) -> bool:
        """Whether the weights of the values add up to 1."""
        return True

    def _all_identity(self, *names: str) -> bool:
        return all(isinstance(getattr(self, name, None) or nn.Identity(), nn.Identity) for name in names)

    def split(self, x: Tensor) -> Tensor:
        """[batch, tokens, heads * channels] -> [batch, heads, tokens, channels]"""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def core(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """[batch, heads, tokens, channels] each -> the same; `bias` [periods, heads, tokens, tokens] is added to the
        scores, repeated over the batch."""
        if self.in_bytes is not None:
            return self.in_bytes(q, k, v, self.scale, bias)
        if self.qk.active or self.pv.active:
            if self._learning() and kernels.usable(q) and (bias is None or not bias.requires_grad):
                return self._fused_core(q, k, v, bias)
            # the scale comes after the product of integers, where it costs nothing
            return self.mix_values(self.qk(q, k.transpose(-2, -1)), self.scale, bias, v)
        if self.fused:
            if bias is not None and len(bias) not in (1, len(q)):
                bias = bias.repeat(len(q) // len(bias), 1, 1, 1)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.given_scale)
        if self.late_scale:
            return probabilities(q @ k.transpose(-2, -1), self.scale, bias) @ v
        return probabilities((q * self.scale) @ k.transpose(-2, -1), 1.0, bias) @ v

    def mix_values(self, scores: Tensor, factor: float | Tensor, bias: Tensor | None, v: Tensor) -> Tensor:
        """softmax(factor * scores + bias) v by the second product."""
        scores = biased(scores, factor, bias)
        if not self.pv.divides:
            out: Tensor = self.pv(scores.softmax(dim=-1), v)
            return out
        weights = exponentials(scores)
        out = self.pv(weights, v, weights.sum(dim=-1, keepdim=True))
        return out

    def _learning(self) -> bool:
        return all(quantizer is not None and quantizer.learning for quantizer in self.operand_quantizers)

    def _fused_core(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        """The quantized core by kernels. Tokens are filled up with zeros to a number that fast products like."""
        from aphq.kernels.fake_quantize import fake_quantize
        from aphq.kernels.softmax import quantized_softmax

        def operand(quantizer: Any, x: Tensor) -> Tensor:
            affine = (quantizer.scale, quantizer.zero_point, top_code(quantizer.bits), quantizer.drop)
            extra = -x.shape[2] % TOKENS_BY
            return fake_quantize(x.contiguous() if extra and x.stride(-1) != 1 else x, *affine, extra_rows=extra)

        left: Any = self.pv.left
        affine = (left.scale, left.zero_point, top_code(left.bits), left.drop)
        size = (q.shape[2], k.shape[2])
        if bias is not None:
            bias = bias.expand(-1, self.num_heads, *size)
        scores = operand(self.qk.left, q) @ operand(self.qk.right, k).transpose(-2, -1)
        p = quantized_softmax(scores, self.scale, bias, *affine, size, relative=self.pv.divides)
        return (p @ operand(self.pv.right, v))[:, :, : size[0]]


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A layer made of tensors that belong to no layer yet."""
    out, inner = weight.shape
    layer = nn.Linear(inner, out, bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)
    return layer


def with_joint_bias(source: Any) -> nn.Linear:
    """The qkv layer of an attention that keeps the biases of queries and values apart and has none for the keys."""
    qkv: nn.Linear = source.qkv
    if source.q_bias is None:
        return qkv
    return linear_of(qkv.weight, torch.cat([source.q_bias, torch.zeros_like(source.q_bias), source.v_bias]))


def open_attentions(model: nn.Module) -> Iterator[tuple[str, OpenAttention]]:
    for name, module in model.named_modules():
        if isinstance(module, OpenAttention):
            yield name, module


def probabilities(scores: Tensor, factor: float | Tensor, bias: Tensor | None) -> Tensor:
    """softmax(factor * scores + bias), the bias repeated over the batch."""
    return biased(scores, factor, bias).softmax(dim=-1)


def exponentials(scores: Tensor) -> Tensor:
    """What a softmax divides by its sum: 1 is the largest of each row. Which one that is has no gradient, because all
    of a row times a constant gives the same softmax."""
    return (scores - scores.detach().amax(dim=-1, keepdim=True)).exp()


def biased(scores: Tensor, factor: float | Tensor, bias: Tensor | None) -> Tensor:
    """factor * scores + bias, the bias repeated over the batch."""
    if isinstance(factor, Tensor) or factor != 1:
        scores = scores * factor
    if bias is not None:
        batch = scores.shape[0]
        if len(bias) == 1 or (isinstance(batch, int) and batch == len(bias)):  # an unknown batch is not compared
            scores = scores + bias
        else:
            scores = (scores.unflatten(0, (-1, len(bias))) + bias).flatten(0, 1)
    return scores


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
        bias = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.ndim)]
        x = self.core(self.q_norm(q), self.k_norm(k), v, bias)
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
            bias = bias + mask.unsqueeze(1)
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
