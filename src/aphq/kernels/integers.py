"""What runs after quantization, on signed bytes: codes of a tensor, a linear layer, attention from queries to output.

Each is one pass over memory: sums of bytes stay in registers, and leave as floats. Twins: `runtimes.int8.Int8Linear`
with `torch._int_mm`, and the simulation of `models.attention.OpenAttention.core`. A code less its zero-point
may not fit in a byte; the byte holds it less a `shift`, and the sums make up for that:
sum (a + s)(b + t) = sum a b + t sum a + s sum b + n s t.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq import kernels
from aphq.kernels.common import BLOCK, round_even

log = logging.getLogger(__name__)
ROWS, COLUMNS, INNER = 128, 128, 64  # of a tile of a linear layer
QUERIES, KEYS = 64, 64  # of a tile of attention
SMALLEST = 16  # sides of a product of tiles


@triton.jit
def byte_codes(x, scale, low, high, shift):
    """round(x / scale) between low and high, less shift; int8"""
    code = round_even(tl.minimum(tl.maximum(x / scale, low), high))
    return (code - shift).to(tl.int8)


@triton.jit
def _codes(x_ptr, code_ptr, scale, low, high, shift, size, block: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = i < size
    x = tl.load(x_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(code_ptr + i, byte_codes(x, scale, low, high, shift), mask=inside)


def codes(x: Tensor, scale: float, low: int, high: int, shift: int) -> Tensor:
    """int8, of the shape of x"""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    numbers = (scale, float(low), float(high), float(shift), x.numel())
    if x.numel():
        _codes[(triton.cdiv(x.numel(), BLOCK),)](x, out, *numbers, block=BLOCK)
    return out


@triton.jit
def _linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, constant_ptr, column_ptr, out_ptr, rows, columns, inner, width,
    has_column: tl.constexpr, row_block: tl.constexpr, column_block: tl.constexpr, inner_block: tl.constexpr,
):
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    column = tl.program_id(1) * column_block + tl.arange(0, column_block)
    total = tl.zeros((row_block, column_block), tl.int32)
    row_sum = tl.zeros((row_block,), tl.int32)
    for start in range(0, inner, inner_block):
        k = start + tl.arange(0, inner_block)
        x = tl.load(
            x_ptr + row[:, None].to(tl.int64) * inner + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < inner), other=0,
        )
        weight = tl.load(
            weight_ptr + column[:, None] * width + k[None, :],
            mask=(column[:, None] < columns) & (k[None, :] < inner), other=0,
        )
        total += tl.dot(x, tl.trans(weight), out_dtype=tl.int32)
        if has_column:
            row_sum += tl.sum(x.to(tl.int32), 1)
    inside = column < columns
    total += tl.load(constant_ptr + column, mask=inside, other=0)[None, :]
    if has_column:
        total += row_sum[:, None] * tl.load(column_ptr + column, mask=inside, other=0)[None, :]
    out = total.to(tl.float32) * tl.load(scale_ptr + column, mask=inside, other=0.0)[None, :]
    out += tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    tl.store(
        out_ptr + row[:, None].to(tl.int64) * columns + column[None, :],
        out, mask=(row[:, None] < rows) & inside[None, :],
    )


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, constant: Tensor, column: Tensor, dtype: torch.dtype
) -> Tensor:
    """(x weight^T + constant + sum(x) column^T) * scale + bias, of x int8 [rows, in] and weight int8 [out, in], either
    side possibly larger; scale and bias float32, constant and column (or nothing) int32 [out] -> [rows, out]"""
    rows, inner, columns = len(x), x.shape[1], len(scale)
    out = torch.empty(rows, columns, device=x.device, dtype=dtype)
    if rows:
        grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
        _linear[grid](
            x, weight, scale, bias, constant, column, out, rows, columns, inner, weight.shape[1],
            has_column=column.numel() > 0, row_block=ROWS, column_block=COLUMNS, inner_block=INNER, num_warps=8,
        )
    return out


@triton.jit
def _load_codes(x_ptr, token, tokens, channel, channels, token_step, channel_step, affine_ptr, head, heads):
    """Bytes [token, channel] of one head, zero outside, and what they were shifted by."""
    scale, low = tl.load(affine_ptr + head), tl.load(affine_ptr + heads + head)
    high, shift = tl.load(affine_ptr + 2 * heads + head), tl.load(affine_ptr + 3 * heads + head)
    inside = (token[:, None] < tokens) & (channel[None, :] < channels)
    x = tl.load(x_ptr + token[:, None] * token_step + channel[None, :] * channel_step, mask=inside, other=0.0)
    code = byte_codes(x.to(tl.float32), scale, low, high, shift)
    return tl.where(inside, code, 0), shift.to(tl.int32)


@triton.jit
def _scores(
    q, q_shift, k_ptr, key, tokens, channel, channels, token_step, channel_step, affine_ptr, head, heads, factor,
    bias_ptr, query, bias_queries, has_bias: tl.constexpr,
):
    """[query, key] scores, -inf where there is no key."""
    k, k_shift = _load_codes(
        k_ptr, key, tokens, channel, channels, token_step, channel_step, affine_ptr, head, heads
    )
    total = tl.dot(q, tl.trans(k), out_dtype=tl.int32)
    total += k_shift * tl.sum(q.to(tl.int32), 1)[:, None] + q_shift * tl.sum(k.to(tl.int32), 1)[None, :]
    total += channels * q_shift * k_shift
    scores = total.to(tl.float32) * factor
    if has_bias:
        inside = (query[:, None] < bias_queries) & (key[None, :] < tokens)
        bias = tl.load(bias_ptr + query[:, None] * tokens + key[None, :], mask=inside, other=0.0)
        scores += bias.to(tl.float32)
    return tl.where(key[None, :] < tokens, scores, float("-inf"))


@triton.jit
def _attention(
    q_ptr, k_ptr, v_ptr, bias_ptr, out_ptr, q_affine, k_affine, p_affine, v_affine, factor,
    heads, queries, keys, channels, width, periods,
    q_batch, q_head, q_token, q_channel, k_batch, k_head, k_token, k_channel, v_batch, v_head, v_token, v_channel,
    has_bias: tl.constexpr, query_block: tl.constexpr, key_block: tl.constexpr,
    channel_block: tl.constexpr, width_block: tl.constexpr,
):
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * query_block + tl.arange(0, query_block)
    channel, value = tl.arange(0, channel_block), tl.arange(0, width_block)
    q_ptr += batch.to(tl.int64) * q_batch + head * q_head
    k_ptr += batch.to(tl.int64) * k_batch + head * k_head
    v_ptr += batch.to(tl.int64) * v_batch + head * v_head
    bias_ptr += ((batch % periods).to(tl.int64) * heads + head) * queries * keys
    q, q_shift = _load_codes(q_ptr, query, queries, channel, channels, q_token, q_channel, q_affine, head, heads)
    factor = factor * tl.load(q_affine + head) * tl.load(k_affine + head)
    largest = tl.full((query_block,), float("-inf"), tl.float32)
    total = tl.zeros((query_block,), tl.float32)
    for start in range(0, keys, key_block):  # the softmax must be known before its codes are
        key = start + tl.arange(0, key_block)
        scores = _scores(
            q, q_shift, k_ptr, key, keys, channel, channels, k_token, k_channel, k_affine, head, heads, factor,
            bias_ptr, query, queries, has_bias,
        )
        larger = tl.maximum(largest, tl.max(scores, 1))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(scores - larger[:, None]), 1)
        largest = larger
    p_scale, p_low = tl.load(p_affine + head), tl.load(p_affine + heads + head)
    p_high, p_shift = tl.load(p_affine + 2 * heads + head), tl.load(p_affine + 3 * heads + head)
    v_shift = tl.load(v_affine + 3 * heads + head).to(tl.int32)
    sums = tl.zeros((query_block, width_block), tl.int32)
    p_sum = tl.zeros((query_block,), tl.int32)
    v_sum = tl.zeros((width_block,), tl.int32)
    for start in range(0, keys, key_block):
        key = start + tl.arange(0, key_block)
        scores = _scores(
            q, q_shift, k_ptr, key, keys, channel, channels, k_token, k_channel, k_affine, head, heads, factor,
            bias_ptr, query, queries, has_bias,
        )
        p = byte_codes(tl.exp(scores - largest[:, None]) / total[:, None], p_scale, p_low, p_high, p_shift)
        p = tl.where(key[None, :] < keys, p, 0)
        v, _ = _load_codes(v_ptr, key, keys, value, width, v_token, v_channel, v_affine, head, heads)
        sums += tl.dot(p, v, out_dtype=tl.int32)
        p_sum += tl.sum(p.to(tl.int32), 1)
        v_sum += tl.sum(v.to(tl.int32), 0)
    shift = p_shift.to(tl.int32)
    sums += v_shift * p_sum[:, None] + shift * v_sum[None, :] + keys * shift * v_shift
    out = sums.to(tl.float32) * (p_scale * tl.load(v_affine + head))
    place = (tl.program_id(1).to(tl.int64) * queries + query[:, None]) * width + value[None, :]
    tl.store(out_ptr + place, out, mask=(query[:, None] < queries) & (value[None, :] < width))


def attention(
    q: Tensor, k: Tensor, v: Tensor, factor: float, bias: Tensor | None, affines: Tensor
) -> Tensor:
    """softmax(q k^T factor + bias) v, [batch, heads, tokens, channels] each. `affines` [4, 4, heads] holds for q, k,
    softmax and v their scales, least and largest code less the zero-point, and what brings both into a signed byte."""
    (batch, heads, queries, channels), keys, width = q.shape, k.shape[2], v.shape[3]
    out = torch.empty(batch, heads, queries, width, device=q.device, dtype=q.dtype)
    if bias is not None:
        bias = bias.expand(-1, heads, queries, keys).contiguous()
    if out.numel():
        _attention[(triton.cdiv(queries, QUERIES), batch * heads)](
            q, k, v, q if bias is None else bias, out, *affines.unbind(0), factor,
            heads, queries, keys, channels, width, 1 if bias is None else len(bias),
            *q.stride(), *k.stride(), *v.stride(),
            has_bias=bias is not None, query_block=QUERIES, key_block=KEYS,
            channel_block=max(SMALLEST, triton.next_power_of_2(channels)),
            width_block=max(SMALLEST, triton.next_power_of_2(width)),
        )
    return out


def usable(x: Tensor) -> bool:
    """Whether these kernels can take a tensor."""
    fitting = x.dtype in (torch.float32, torch.bfloat16, torch.float16) and (x.is_cuda or kernels.interpreted)
    return kernels.switched_on and fitting and _right(x.device)


@functools.cache
def _right(device: torch.device) -> bool:
    """Whether they can be compiled for a device, and compute what they should there."""
    try:
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(-128, 128, (40, 48), generator=generator).to(device, torch.int8)
        ones, zeros = torch.ones(40, device=device), torch.zeros(40, device=device)
        none = zeros[:0].int()
        wanted = (x.cpu().int() @ x.cpu().int().T).float()
        found = linear(codes(x.float(), 1.0, -128, 127, 0), x, ones, zeros, zeros.int(), none, torch.float32)
        assert torch.equal(found.cpu(), wanted), "products of bytes are wrong"
        affine = torch.tensor([[0.01], [-128.0], [127.0], [0.0]], device=device)
        values = x.float()[None, None] / 100  # on their grid
        p = torch.full((1, 1, 40, 40), 1 / 40)
        found = attention(values, values, values, 0.0, None, torch.stack([affine] * 4)).cpu()
        codes_of_p = (p / 0.01).round() * 0.01  # all keys alike
        torch.testing.assert_close(found, codes_of_p @ values.cpu())
    except Exception as problem:
        reason = str(problem).strip().split("\n")[0] or type(problem).__name__
        log.warning("integer kernels do not work here (%s); running without them, with the same result", reason)
        return False
    return True
