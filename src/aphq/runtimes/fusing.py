"""Bytes instead of floats between layers, wherever the only reader of a tensor is a quantizer.

A layer that knows its reader's scale applies the activation between them and gives the reader's codes: a quarter of the
memory traffic, and one pass less. What is computed does not change. Only where a model is known to hand a tensor on as
it is: from fc1 to fc2 of an MLP, from queries, keys and values to their products, from those to the output projection.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq.models.architecture import Mlp, replace_module
from aphq.models.attention import OpenAttention, Projection, open_attentions
from aphq.models.mlp import MlpModules
from aphq.quant.quantizer import Quantizer
from aphq.runtimes.int8_attention import AttentionInBytes
from aphq.runtimes.int8_layers import Int8Linear, affine_of


def fuse(model: nn.Module, mlps: Iterable[Mlp]) -> None:
    """In place, on a model whose layers are integers already."""
    for mlp in mlps:
        _fuse_mlp(model, mlp)
    for _, attention in open_attentions(model):
        if isinstance(attention.in_bytes, AttentionInBytes):
            _fuse_attention(attention, attention.in_bytes)


def _fuse_mlp(model: nn.Module, mlp: Mlp) -> None:
    parts = MlpModules.of(model, mlp)
    if mlp.norm is not None or not isinstance(parts.fc1, Int8Linear) or not isinstance(parts.fc2, Int8Linear):
        return
    activation = activation_of(parts.act)
    if activation:
        parts.fc1.emit(parts.fc2.affine[:, None], activation)
        replace_module(model, mlp.act, nn.Identity())


@torch.no_grad()
def activation_of(act: nn.Module) -> str:
    """ "relu", "gelu" if it is exactly that, under whichever name, or nothing."""
    x = torch.linspace(-6, 6, 241)
    try:
        y = act(x)
    except Exception:  # an activation with parameters elsewhere, or with an idea of shapes, is not one of these
        return ""
    return "relu" if torch.equal(y, x.relu()) else "gelu" if torch.equal(y, F.gelu(x)) else ""


def _fuse_attention(attention: OpenAttention, in_bytes: AttentionInBytes) -> None:
    parts = attention.projections()
    if parts is None:
        return
    operands = (
        (parts.query, attention.qk.left),
        (parts.key, attention.qk.right),
        (parts.value, attention.pv.right),
    )
    if attention.direct and all(isinstance(projection.layer, Int8Linear) for projection, _ in operands):
        _emit_operands(operands, attention.num_heads)
    if attention.direct_output and isinstance(parts.output, Int8Linear):
        in_bytes.emit(parts.output.affine)


def _emit_operands(operands: Iterable[tuple[Projection, Quantizer | None]], heads: int) -> None:
    """Each row of a layer by the quantizer of its operand and head."""
    affines: dict[Int8Linear, Tensor] = {}
    for projection, quantizer in operands:
        assert quantizer is not None
        layer: Int8Linear = projection.layer
        start, stop, _ = projection.rows.indices(layer.features)
        rows = affines.setdefault(layer, torch.full((5, layer.features), torch.nan, device=layer.scale.device))
        rows[:, start:stop] = affine_of(quantizer, heads).repeat_interleave((stop - start) // heads, dim=1)
    for layer, rows in affines.items():
        assert not rows.isnan().any(), "a row of the layer is no query, key or value"
        layer.emit(rows)
