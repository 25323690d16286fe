"""A linear layer on signed bytes: sums stay in registers, and leave as floats or as the bytes of the next layer.

The twin is `runtimes.int8_layers.Int8Linear` with `torch._int_mm`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aphq.kernels.byte_codes import as_bytes


class Tile(NamedTuple):
    """What one program computes at a time, and with how many threads."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int  # of the loop over `inner` that are loaded ahead


# measured on an H200 by benchmarks/byte_tiles.py: GELU keeps twice the threads busy
LARGE, LARGE_GELU, SMALL = Tile(128, 128, 128, 4, 3), Tile(128, 128, 128, 8, 3), Tile(64, 64, 128, 4, 4)
FEW_ROWS = 2048  # so few large tiles would leave most of a GPU idle
SMALLEST_INNER = 32  # of a product of bytes
MASKED_INNER = 64  # where loads need masks, and may be of single bytes, which take more registers


@triton.jit
def _byte_linear(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, constant_ptr, column_ptr, emits_ptr, out_ptr,
    rows, columns, inner, width,
    has_column: tl.constexpr, relu: tl.constexpr, gelu: tl.constexpr,
    emits: tl.constexpr, alike: tl.constexpr, whole: tl.constexpr, even: tl.constexpr,
    row_block: tl.constexpr, column_block: tl.constexpr, inner_block: tl.constexpr,
):  # fmt: skip
    # programs that share rows of x run side by side: x is large, the weight stays in the cache anyway
    tiles = tl.cdiv(columns, column_block)
    row = (tl.program_id(0) // tiles) * row_block + tl.arange(0, row_block)
    column = (tl.program_id(0) % tiles) * column_block + tl.arange(0, column_block)
    # outside, the last row or column is computed once more and not stored: loads without masks are faster
    x_ptr += tl.minimum(row, rows - 1)[:, None].to(tl.int64) * inner
    weight_ptr += tl.minimum(column, columns - 1)[:, None] * width
    inside = column < columns
    constant = tl.load(constant_ptr + column, mask=inside, other=0)
    total = tl.zeros((row_block, column_block), tl.int32) + constant[None, :]
    row_sum = tl.zeros((row_block,), tl.int32)
    for start in range(0, inner, inner_block):
        k = start + tl.arange(0, inner_block)[None, :]
        if even:
            x, weight = tl.load(x_ptr + k), tl.load(weight_ptr + k)
        else:
            x = tl.load(x_ptr + k, mask=k < inner, other=0)
            weight = tl.load(weight_ptr + k, mask=k < inner, other=0)
        total = tl.dot(x, tl.trans(weight), total, out_dtype=tl.int32)
        if has_column:
            row_sum += tl.sum(x.to(tl.int32), 1)
    if has_column:
        total += row_sum[:, None] * tl.load(column_ptr + column, mask=inside, other=0)[None, :]
    out = total.to(tl.float32) * tl.load(scale_ptr + column, mask=inside, other=0.0)[None, :]
    out += tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    if relu:
        out = tl.maximum(out, 0.0)
    if gelu:
        out = 0.5 * out * (1.0 + tl.erf(out * 0.7071067811865476))
    place = out_ptr + row[:, None].to(tl.int64) * columns + column[None, :]
    stored = (row[:, None] < rows) & inside[None, :]
    if emits:  # vectors over columns fill registers, so no more of them than needed
        if alike:
            low, high = tl.load(emits_ptr + 1), tl.load(emits_ptr + 2)
            shift, inverse = tl.load(emits_ptr + 3), tl.load(emits_ptr + 4)
        else:
            shift = tl.load(emits_ptr + 3 * columns + column, mask=inside, other=0.0)[None, :]
            inverse = tl.load(emits_ptr + 4 * columns + column, mask=inside, other=0.0)[None, :]
            if whole:
                low, high = shift - 128, shift + 127
            else:
                low = tl.load(emits_ptr + columns + column, mask=inside, other=0.0)[None, :]
                high = tl.load(emits_ptr + 2 * columns + column, mask=inside, other=0.0)[None, :]
        tl.store(place, as_bytes(out * inverse, low, high, shift), mask=stored)
    else:
        tl.store(place, out, mask=stored)


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, constant: Tensor, column: Tensor,
    dtype: torch.dtype, activation: str = "", emits: Tensor | None = None, whole: bool = False,
    tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """act((x weight^T + constant + sum(x) column^T) * scale + bias) of x int8 [rows, in] and weight int8 [out, in],
    either side of it possibly larger; scale and bias float32, constant and column (or nothing) int32 [out].

    -> [rows, out] of `dtype`, or int8 if `emits` [5, out] or [5, 1] says of the columns their scale, least and largest
    code, what is taken off them, and the scale's inverse; `whole` may say that this leaves -128 and 127 of all bounds.
    `activation` is "relu", "gelu" or nothing."""
    rows, inner, columns = x.shape[0], x.shape[1], scale.shape[0]
    out = torch.empty(rows, columns, device=x.device, dtype=dtype if emits is None else torch.int8)
    if rows == 0:
        return out
    if tile is None:
        large = LARGE_GELU if activation == "gelu" else LARGE
        tile = SMALL if rows <= FEW_ROWS else large
    step = min(tile.inner, inner & -inner)  # a power of 2 that divides the sum leaves no rest to mask
    even = step >= SMALLEST_INNER
    _byte_linear[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        x, weight, scale, bias, constant, column, scale if emits is None else emits, out,
        rows, columns, inner, weight.shape[1],
        has_column=column.shape[0] > 0, relu=activation == "relu", gelu=activation == "gelu",
        emits=emits is not None, alike=emits is not None and emits.shape[1] == 1, whole=whole, even=even,
        row_block=tile.rows, column_block=tile.columns, inner_block=step if even else MASKED_INNER,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out
