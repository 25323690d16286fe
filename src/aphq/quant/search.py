"""Finding the range of a quantizer without gradients.

A range [lower, upper] is searched by turns: both ends together, then the upper end alone, then the lower. Each sweep
tries the full range shrunk by factors on a geometric grid, so its resolution is the same for a tensor with a hundred-
fold outlier as for a flat one, and zero-points need no grid of their own: any number of bits works alike.

`groups` is the shape of the quantizer's scale; a cost returns one number per group and groups are searched at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from aphq.quant.affine import affine_from_range, fake_quantize

Cost = Callable[[Tensor, Tensor], Tensor]  # (scale, zero-point) -> cost, all of shape `groups`
Side = Literal["both", "upper", "lower"]
FEWEST_OF_RANGE = 0.005  # no candidate is narrower than this share of the full range


@dataclass(frozen=True)
class Range:
    """The values a quantizer spans, per group."""

    lower: Tensor
    upper: Tensor

    def shrink(self, factor: Tensor, side: Side, current: Range) -> Range:
        lower = current.lower if side == "upper" else self.lower * factor
        upper = current.upper if side == "lower" else self.upper * factor
        return Range(lower, upper)


@dataclass(frozen=True)
class Searcher:
    """The search space of one tensor: its full range, the smallest useful share of it, and the number format."""

    full: Range
    narrowest: Tensor  # shape of the groups, in (0, 1]
    bits: int
    symmetric: bool
    candidates: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        groups: tuple[int, ...],
        bits: int,
        symmetric: bool,
        candidates: int,
        narrowest: float,
        full: Range | None = None,
    ) -> Searcher:
        """For a tensor, or for a sample `x` of one whose range is `full`; the narrowest candidate still covers
        the share `narrowest` of the values."""
        full = full or Range(reduce_to(x, groups, torch.amin), reduce_to(x, groups, torch.amax))
        largest = torch.maximum(full.upper, -full.lower)
        share = group_quantile(x.abs(), groups, narrowest) / largest.clamp_min(1e-12)
        return cls(full, share.clamp(FEWEST_OF_RANGE, 0.95), bits, symmetric, candidates)

    def affine(self, found: Range) -> tuple[Tensor, Tensor]:
        return affine_from_range(found.lower, found.upper, self.bits, self.symmetric)

    def start(self, cost: Cost) -> Range:
        """Search from scratch: both ends together, then each alone."""
        return self.improve(cost, self.full, ("both", "upper", "lower"))

    def improve(self, cost: Cost, current: Range, sides: tuple[Side, ...] = ("upper", "lower")) -> Range:
        """The best range on the sweeps `sides` from `current`, never worse than it."""
        if self.symmetric:
            sides = ("both",)  # only the larger end counts
        for side in sides:
            current = self._sweep(cost, current, side)
        return current

    def _sweep(self, cost: Cost, current: Range, side: Side) -> Range:
        best, least = current, cost(*self.affine(current))
        for step in torch.linspace(0, 1, self.candidates).tolist():
            tried = self.full.shrink(self.narrowest ** (1 - step), side, current)
            found = cost(*self.affine(tried))
            better = found < least
            least = torch.where(better, found, least)
            best = replace(
                best,
                lower=torch.where(better, tried.lower, best.lower),
                upper=torch.where(better, tried.upper, best.upper),
            )
        return best


def self_cost(x: Tensor, groups: tuple[int, ...], bits: int) -> Cost:
    """Squared error of the tensor itself."""

    def cost(scale: Tensor, zero_point: Tensor) -> Tensor:
        return (fake_quantize(x, scale, zero_point, bits) - x).square_().sum_to_size(groups)

    return cost


def output_cost(left: Tensor, right: Tensor, right_hat: Tensor, groups: tuple[int, ...], bits: int) -> Cost:
    """Squared error of a product, ||Q(left) right_hat - left right||^2, as a function of the left quantizer.

    With e = Q(left) - left the error is e right_hat + left (right_hat - right): only small terms, so that nothing
    cancels at 8 bits. Where the inner dimension k is the smaller, the Gram matrix right_hat right_hat^T [k, k] makes
    a candidate's cost independent of the number of columns (that is: of tokens, when `left` is a weight).
    """
    rest = left @ (right_hat - right)
    inner, columns = right.shape[-2:]
    if columns > inner:
        gram = right_hat @ right_hat.transpose(-1, -2)
        twice_cross = 2 * (rest @ right_hat.transpose(-1, -2))

    def cost(scale: Tensor, zero_point: Tensor) -> Tensor:
        error = fake_quantize(left, scale, zero_point, bits) - left
        if columns > inner:
            return ((error @ gram).add_(twice_cross).mul_(error)).sum_to_size(groups)
        return (error @ right_hat).add_(rest).square_().sum_to_size(groups)

    return cost


def reduce_to(x: Tensor, groups: tuple[int, ...], reduce: Callable[..., Tensor]) -> Tensor:
    """`reduce` over every dimension of `x` that the broadcastable shape `groups` does not keep."""
    shape = (1,) * (x.ndim - len(groups)) + groups
    dims = [d for d in range(x.ndim) if shape[d] == 1]
    return reduce(x, dim=dims, keepdim=True).reshape(groups) if dims else x.reshape(groups)


LARGEST_QUANTILE = 2**24 - 1  # torch.quantile refuses more elements


def group_quantile(x: Tensor, groups: tuple[int, ...], share: float) -> Tensor:
    """Quantile per group, over at most LARGEST_QUANTILE evenly spaced elements of each."""
    shape = (1,) * (x.ndim - len(groups)) + groups
    kept = [d for d in range(x.ndim) if shape[d] != 1]
    rows = x.permute(*kept, *(d for d in range(x.ndim) if d not in kept)).reshape(max(1, _product(groups)), -1)
    stride = -(-rows.shape[1] // LARGEST_QUANTILE)
    return torch.quantile(rows[:, ::stride], share, dim=1).reshape(groups)


def _product(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result
