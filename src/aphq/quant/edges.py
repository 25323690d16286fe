"""Inputs of few distinct values, as pixels are: none of them may lie on the edge between two codes.

A picture normalised to [-1, 1] and quantized in the 255 steps of that range has every pixel half-way between two codes,
where the last bit of the arithmetic decides: each machine then sees another picture. A scale a thousandth larger
decides for all of them; a smaller one would clip black and white, and is the last resort.
"""

from __future__ import annotations

import math

from torch import Tensor

from aphq.quant.affine import top_code
from aphq.quant.quantizer import Quantizer

FEW, OFTEN = 2048, 16  # distinct values (three channels of pixels have 768), and how often each is seen on average
NEAR, ENOUGH = 1e-4, 3e-4  # of a step; float32 knows codes up to 255 to 1e-5
FACTORS = [1 + sign * k / 1000 for sign in (1, -1) for k in range(1, 11)]


def keep_off_edges(quantizer: Quantizer, values: Tensor) -> None:
    """Move the scale of a quantizer by up to a hundredth, if one of its inputs is too near an edge."""
    distinct = values.unique()
    if quantizer.scale.numel() > 1 or len(distinct) > min(FEW, values.numel() / OFTEN):
        return  # no picture: no single value matters
    steps = distinct.double() / quantizer.scale.data.double()
    zero_point, top = float(quantizer.zero_point), top_code(quantizer.bits)
    if _margin(steps + zero_point, top) < NEAR:
        margins = {factor: _margin(steps / factor + zero_point, top) for factor in FACTORS}
        best = max(FACTORS, key=lambda factor: margins[factor])
        quantizer.scale.data.mul_(next((factor for factor in FACTORS if margins[factor] >= ENOUGH), best))


def _margin(codes: Tensor, top: int) -> float:
    """The least distance of a value from an edge; beyond the first and the last there is none."""
    edges = codes.floor() + 0.5
    inside = (edges > 0) & (edges < top)
    return float((codes - edges)[inside].abs().min()) if bool(inside.any()) else math.inf
