"""Attention on signed bytes, from queries, keys and values to what the output projection reads, in one pass.

The twin is `runtimes.int8_attention.AttentionInBytes`. The softmax must be known before its codes are: where all keys
fit in one tile their scores stay in registers; else they are computed twice, first for the softmax and then for its
codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.byte_codes import as_bytes
from aphq.kernels.byte_linear import SMALLEST_INNER

KEYS = 64  # of a tile, where not all fit
SMALLEST = 16  # sides of a product of tiles


class Block(NamedTuple):
    """What one program computes at a time, and with how many threads."""

    queries: int
    most_keys: int  # whose scores fit in registers
    warps: int


BLOCK = Block(32, 256, 4)  # measured as the tiles of byte_linear


@triton.jit
def _affine(affines_ptr, operand: tl.constexpr, head, heads):
    """(scale, least code, largest code, shift, inverse of the scale) of one head of q, k, softmax or v"""
    place = affines_ptr + operand * 5 * heads + head
    low, high = tl.load(place + heads), tl.load(place + 2 * heads)
    return tl.load(place), low, high, tl.load(place + 3 * heads), tl.load(place + 4 * heads)


@triton.jit
def _load_bytes(
    x_ptr, token, tokens, channel, channels, token_step, channel_step, affines_ptr, operand: tl.constexpr, head, heads,
    given: tl.constexpr,
):  # fmt: skip
    """Codes [token, channel] of one head, zero outside; `given` as they are, or as floats."""
    inside = (token[:, None] < tokens) & (channel[None, :] < channels)
    place = x_ptr + token[:, None] * token_step + channel[None, :] * channel_step
    if given:
        code = tl.load(place, mask=inside, other=0)
    else:
        _, low, high, shift, inverse = _affine(affines_ptr, operand, head, heads)
        x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        code = tl.where(inside, as_bytes(x * inverse, low, high, shift), 0).to(tl.int8)
    return code


@triton.jit
def _scores(
    q, k_ptr, key, keys, channel, channels, k_token, k_channel, affines_ptr, head, heads, factor,
    bias_ptr, query, queries, given: tl.constexpr, shifted: tl.constexpr, has_bias: tl.constexpr,
):  # fmt: skip
    """[query, key] scores, -inf where there is no key."""
    k = _load_bytes(k_ptr, key, keys, channel, channels, k_token, k_channel, affines_ptr, 1, head, heads, given)
    total = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    if shifted:
        q_shift = tl.load(affines_ptr + 3 * heads + head).to(tl.int32)
        k_shift = tl.load(affines_ptr + 8 * heads + head).to(tl.int32)
        total += k_shift * tl.sum(q.to(tl.int32), 1)[:, None] + q_shift * tl.sum(k.to(tl.int32), 1)[None, :]
        total += channels * q_shift * k_shift
    scores = total.to(tl.float32) * factor
    if has_bias:
        inside = (query[:, None] < queries) & (key[None, :] < keys)
        bias = tl.load(bias_ptr + query[:, None] * keys + key[None, :], mask=inside, other=0.0)
        scores += bias.to(tl.float32)
    return tl.where(key[None, :] < keys, scores, float("-inf"))


@triton.jit
def _byte_attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, affines_ptr, emits_ptr, out_ptr, factor,
    heads, queries, keys, channels, width, periods,
    q_batch, q_head, q_token, q_channel, k_batch, k_head, k_token, k_channel, v_batch, v_head, v_token, v_channel,
    given: tl.constexpr, qk_shifted: tl.constexpr, v_shifted: tl.constexpr, has_bias: tl.constexpr,
    emits: tl.constexpr, relative: tl.constexpr, once: tl.constexpr,
    query_block: tl.constexpr, key_block: tl.constexpr, channel_block: tl.constexpr, width_block: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, query_block)  # programs that share keys run side by side
    pair = tl.program_id(0) // blocks
    batch, head = pair // heads, pair % heads
    query = (tl.program_id(0) % blocks) * query_block + tl.arange(0, query_block)
    channel, value = tl.arange(0, channel_block), tl.arange(0, width_block)
    q_ptr += batch.to(tl.int64) * q_batch + head * q_head
    k_ptr += batch.to(tl.int64) * k_batch + head * k_head
    v_ptr += batch.to(tl.int64) * v_batch + head * v_head
    bias_ptr += ((batch % periods).to(tl.int64) * heads + head) * queries * keys
    q = _load_bytes(q_ptr, query, queries, channel, channels, q_token, q_channel, affines_ptr, 0, head, heads, given)
    factor = factor * tl.load(affines_ptr + head) * tl.load(affines_ptr + 5 * heads + head)
    p_scale, p_low, p_high, p_shift, p_inverse = _affine(affines_ptr, 2, head, heads)
    if once:
        key = tl.arange(0, key_block)
        scores = _scores(
            q, k_ptr, key, keys, channel, channels, k_token, k_channel, affines_ptr, head, heads, factor,
            bias_ptr, query, queries, given, qk_shifted, has_bias,
        )  # fmt: skip
        weights = tl.exp(scores - tl.max(scores, 1)[:, None])
        total = tl.sum(weights, 1)
        inverse = p_inverse + 0 * total if relative else p_inverse / total
        p = as_bytes(weights * inverse[:, None], p_low, p_high, p_shift)
        p = tl.where(key[None, :] < keys, p, 0).to(tl.int8)
        v = _load_bytes(v_ptr, key, keys, value, width, v_token, v_channel, affines_ptr, 3, head, heads, given)
        sums = tl.dot(p, v, out_dtype=tl.int32)
        v_sum = tl.sum(v.to(tl.int32), 0)
        if v_shifted:
            p_sum = tl.sum(p.to(tl.int32), 1)
    else:
        largest = tl.full((query_block,), float("-inf"), tl.float32)
        total = tl.zeros((query_block,), tl.float32)
        for start in range(0, keys, key_block):
            key = start + tl.arange(0, key_block)
            scores = _scores(
                q, k_ptr, key, keys, channel, channels, k_token, k_channel, affines_ptr, head, heads, factor,
                bias_ptr, query, queries, given, qk_shifted, has_bias,
            )  # fmt: skip
            larger = tl.maximum(largest, tl.max(scores, 1))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(scores - larger[:, None]), 1)
            largest = larger
        inverse = p_inverse + 0 * total if relative else p_inverse / total
        sums = tl.zeros((query_block, width_block), tl.int32)
        p_sum = tl.zeros((query_block,), tl.int32)
        v_sum = tl.zeros((width_block,), tl.int32)
        for start in range(0, keys, key_block):
            key = start + tl.arange(0, key_block)
            scores = _scores(
                q, k_ptr, key, keys, channel, channels, k_token, k_channel, affines_ptr, head, heads, factor,
                bias_ptr, query, queries, given, qk_shifted, has_bias,
            )  # fmt: skip
            p = as_bytes(tl.exp(scores - largest[:, None]) * inverse[:, None], p_low, p_high, p_shift)
            p = tl.where(key[None, :] < keys, p, 0).to(tl.int8)
            v = _load_bytes(v_ptr, key, keys, value, width, v_token, v_channel, affines_ptr, 3, head, heads, given)
            sums += tl.dot(p, v, out_dtype=tl.int32)
            v_sum += tl.sum(v.to(tl.int32), 0)
            if v_shifted:
                p_sum += tl.sum(p.to(tl.int32), 1)
    shift = p_shift.to(tl.int32)
    sums += shift * v_sum[None, :]
    if v_shifted:
        v_shift = tl.load(affines_ptr + 18 * heads + head).to(tl.int32)
        sums += v_shift * p_sum[:, None] + keys * shift * v_shift
    out = sums.to(tl.float32) * (p_scale * tl.load(affines_ptr + 15 * heads + head))
    if relative:
        out = out / total[:, None]
    # [batch, queries, heads, width]: as the output projection reads it
    token = batch.to(tl.int64) * queries + query[:, None]
    place = out_ptr + (token * heads + head) * width + value[None, :]
    stored = (query[:, None] < queries) & (value[None, :] < width)
    if emits:
        low, high, off = tl.load(emits_ptr + 1), tl.load(emits_ptr + 2), tl.load(emits_ptr + 3)
        tl.store(place, as_bytes(out * tl.load(emits_ptr + 4), low, high, off), mask=stored)
    else:
        tl.store(place, out, mask=stored)


def attention(
    q: Tensor, k: Tensor, v: Tensor, factor: float, bias: Tensor | None, affines: Tensor,
    dtype: torch.dtype, emits: Tensor | None = None, qk_shifted: bool = True, v_shifted: bool = True,
    relative: bool = False, block: Block = BLOCK,
) -> Tensor:  # fmt: skip
    """softmax(q k^T factor + bias) v, [batch, heads, tokens, channels] each, all three floats or all three bytes.

    `affines` [4, 5, heads] holds for q, k, softmax and v their scales, least and largest code less the zero-point, what
    brings both into a signed byte (`qk_shifted` and `v_shifted` may be False where that is zero), and the scales'
    inverses. With `relative` the scale of the softmax is relative to the largest of each row: it is the exponentials
    that become integers, and their sum divides the product. The result, of `dtype` or int8 if `emits` [5] says the same
    of the output, lies in memory as [batch, tokens, heads, channels]."""
    (batch, heads, queries, channels), keys, width = q.shape, k.shape[2], v.shape[3]
    out = torch.empty(batch, queries, heads, width, device=q.device, dtype=dtype if emits is None else torch.int8)
    if bias is not None:
        bias = bias.expand(-1, heads, queries, keys).contiguous()
    if batch == 0:
        return out.transpose(1, 2)
    once = keys <= block.most_keys
    query_block = min(block.queries, _side(queries, SMALLEST))
    key_block = _side(keys, SMALLEST_INNER) if once else KEYS
    _byte_attention[(triton.cdiv(queries, query_block) * batch * heads,)](
        q, k, v, q if bias is None else bias, affines, affines if emits is None else emits, out, factor,
        heads, queries, keys, channels, width, 1 if bias is None else bias.shape[0],
        *q.stride(), *k.stride(), *v.stride(),
        given=q.dtype == torch.int8, qk_shifted=qk_shifted, v_shifted=v_shifted, has_bias=bias is not None,
        emits=emits is not None, relative=relative, once=once, query_block=query_block, key_block=key_block,
        channel_block=_side(channels, SMALLEST_INNER), width_block=_side(width, SMALLEST),
        num_warps=block.warps,
    )  # fmt: skip
    return out.transpose(1, 2)


def _side(size: int, smallest: int) -> int:
    """Of a tile that holds so many; `smallest` is a power of 2 too."""
    return max(smallest, int(triton.next_power_of_2(size)))
