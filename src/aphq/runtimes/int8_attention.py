"""Both products of an attention, and the softmax between them, on integers."""

from __future__ import annotations

import torch
from torch import Tensor

from aphq.models.attention import OpenAttention, biased, exponentials
from aphq.quant.affine import clamp_
from aphq.runtimes.int8_layers import OnBytes, affine_of, bytes_by


class AttentionInBytes(OnBytes):
    """By one kernel where there is one; else as the simulation does it, integers as whole floats. Takes floats, or
    bytes that already are the codes of its operands; gives floats, or the bytes of the output projection's input."""

    affines: Tensor
    emits: Tensor

    def __init__(self, attention: OpenAttention) -> None:
        super().__init__()
        each = torch.stack(
            [affine_of(one, attention.num_heads) for one in attention.operand_quantizers if one is not None]
        )
        self.register_buffer("affines", each, persistent=False)  # [q, k, softmax and v; numbers; heads]
        self.register_buffer("emits", torch.empty(0), persistent=False)  # [5]
        self.qk_shifted, self.v_shifted = bool(each[:2, 3].any()), bool(each[3, 3].any())
        self.relative = attention.pv.divides
        self.to(each.device)

    def emit(self, affine: Tensor) -> None:
        """Give bytes from here on; `affine` [5]."""
        self.emits = affine.clone().to(self.affines.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, factor: float, bias: Tensor | None) -> Tensor:
        """[batch, heads, tokens, channels] each -> the same; `bias` as in `OpenAttention.core`."""
        dtype = self.weight.dtype if q.dtype == torch.int8 else q.dtype
        emits = self.emits if self.emits.shape[0] else None
        if self.uses_kernels:
            from aphq.kernels.byte_attention import attention

            options = (dtype, emits, self.qk_shifted, self.v_shifted, self.relative)
            return attention(q, k, v, factor, bias, self.affines, *options)
        scales = self.affines[:, 0, :, None, None]
        scores = (self._whole(q, 0) @ self._whole(k, 1).transpose(-2, -1)).mul_(scales[0] * scales[1])
        scores = biased(scores, factor, bias)
        p = exponentials(scores) if self.relative else scores.softmax(dim=-1)
        out = (self._whole(p, 2) @ self._whole(v, 3)).mul_(scales[2] * scales[3])
        out = out / p.sum(dim=-1, keepdim=True) if self.relative else out
        return out.to(dtype) if emits is None else bytes_by(out, emits)

    def _whole(self, x: Tensor, operand: int) -> Tensor:
        """Codes less their zero-points, as floats."""
        scale, low, high, shift, _ = self.affines[operand, :, :, None, None].unbind(0)  # [heads, 1, 1] each
        return x.float() + shift if x.dtype == torch.int8 else clamp_((x.float() / scale).round_(), low, high)
