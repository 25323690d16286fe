"""The scale that each channel of a tensor would like for itself, which both reparameterisations start from."""

from __future__ import annotations

from torch import Tensor

from aphq.quant.quantizer import Quantizer
from aphq.quant.search import Range, Searcher, self_cost

LARGEST_RATIO = 100.0  # between a channel's scale and the mean one: a dead channel must not blow up
TOKENS = 4096  # to judge the channels by
NARROWEST = 0.9


def channel_scales(
    x: Tensor, quantizer: Quantizer, candidates: int, full: Range | None = None
) -> tuple[Tensor, Tensor]:
    """(scale, zero-point) of least error per channel of [tokens, channels], in the quantizer's number format."""
    groups = (x.shape[1],)
    form = (quantizer.bits, quantizer.symmetric)
    searcher = Searcher.of(x, groups, *form, candidates, NARROWEST, full)
    return searcher.affine(searcher.start(self_cost(x, groups, quantizer.bits)))
