"""Finding the range of a quantizer without gradients.

A range [lower, upper] is searched by turns: both ends together, then the upper end alone, then the lower. Each sweep
tries the full range shrunk by factors on a geometric grid, so its resolution is the same for a tensor with a hundred-
fold outlier as for a flat one, and zero-points need no grid of their own: any number of bits works alike.

`groups` is the shape of the quantizer's scale; a cost returns one number per group and groups are searched at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aphq import kernels
from aphq.quant.affine import affine_from_range, fake_quantize, top_code

Side = Literal["both", "upper", "lower"]
FEWEST_OF_RANGE = 0.005  # no candidate is narrower than this share of the full range
ELEMENTS_AT_ONCE = {"cpu": 2**18, "other": 2**26}  # of all candidates together: a cache, a share of a GPU's memory


@dataclass(frozen=True)
class Range:
    """The values a quantizer spans, per group; candidates add a first dimension."""

    lower: Tensor
    upper: Tensor


@dataclass(frozen=True)
class Cost:
    """What a quantizer of `x` costs, per group, for many candidates at once.

    With e = Q(x) - x it is the sum of e^2; or, for a `matrix`, of (e @ matrix + shift) * e or (e @ matrix + shift)^2.
    """

    x: Tensor
    groups: tuple[int, ...]
    bits: int
    matrix: Tensor | None = None
    shift: Tensor | None = None
    times_error: bool = False

    def __call__(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """[candidates, *groups] each -> costs of that shape."""
        limit = ELEMENTS_AT_ONCE["cpu" if self.x.device.type == "cpu" else "other"]
        chunk = max(1, limit // max(self.x.numel(), 0 if self.shift is None else self.shift.numel()))
        compute = self.fused if kernels.usable(self.x) and self.x.is_contiguous() else self.plain
        found = [compute(s, z) for s, z in zip(scale.split(chunk), zero_point.split(chunk), strict=True)]
        return torch.cat(found)

    def plain(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        wide = (-1, *(1,) * (self.x.ndim - len(self.groups)), *self.groups)
        error = fake_quantize(self.x, scale.reshape(wide), zero_point.reshape(wide), self.bits).sub_(self.x)
        if self.matrix is None or self.shift is None:
            score = error.square_()
        else:
            score = (error @ self.matrix).add_(self.shift)
            score = score.mul_(error) if self.times_error else score.square_()
        return score.sum_to_size(len(scale), *wide[1:]).reshape(-1, *self.groups)

    def fused(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The same by kernels that pass over the candidates' errors once."""
        from aphq.kernels.search import candidate_errors, squared_errors, summed_product

        x, matrix, shift = self.x, self.matrix, self.shift
        form = (scale.flatten(1), zero_point.flatten(1), top_code(self.bits))
        leading = _dimensions_up_to_the_groups(x, self.groups)
        if matrix is None or shift is None:
            rows = x.flatten(0, -2).T.contiguous() if leading == x.ndim else x.reshape(math.prod(x.shape[:leading]), -1)
            return squared_errors(rows, *form).reshape(-1, *self.groups)
        count = math.prod(x.shape[:leading])
        error = candidate_errors(x.reshape(count, -1), *form)  # [rows, candidates, inner]
        tall = error.reshape(count, len(scale), *x.shape[leading:])
        if matrix.ndim > 2 and leading == matrix.ndim - 2:  # a matrix for every row
            score = tall.flatten(1, -2) @ matrix.flatten(0, -3)
        else:
            score = tall @ matrix
        per_row = summed_product(
            score.reshape(count, len(scale), -1), shift.reshape(count, -1), error if self.times_error else None
        )
        return per_row.reshape(-1, form[0].shape[1], len(scale)).sum(0).T.reshape(-1, *self.groups)


def _dimensions_up_to_the_groups(x: Tensor, groups: tuple[int, ...]) -> int:
    """How many of the first dimensions of `x` it takes to tell the group: all elements after them share it."""
    wide = (1,) * (x.ndim - len(groups)) + groups
    return max((d + 1 for d in range(x.ndim) if wide[d] != 1), default=0)


def self_cost(x: Tensor, groups: tuple[int, ...], bits: int) -> Cost:
    """Squared error of the tensor itself."""
    return Cost(x, groups, bits)


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
        return Cost(left, groups, bits, gram, 2 * (rest @ right_hat.transpose(-1, -2)), times_error=True)
    return Cost(left, groups, bits, right_hat, rest)


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
        if symmetric:
            share = share * (1 - 2 ** (1 - bits))  # one more code below zero than above: -2, -1, 0, 1 at 2 bits
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
        """The current range, and the full one shrunk on one side or both; per group the cheapest."""
        exponent = torch.linspace(1, 0, self.candidates, device=self.narrowest.device)
        factor = self.narrowest ** exponent.reshape(-1, *(1,) * self.narrowest.ndim)  # [candidates, *groups]
        if side != "both":
            factor = torch.cat([torch.zeros_like(factor[:1]), factor])  # few values may lie on this side of 0
        lower = current.lower.expand_as(factor) if side == "upper" else self.full.lower * factor
        upper = current.upper.expand_as(factor) if side == "lower" else self.full.upper * factor
        tried = Range(torch.cat([current.lower[None], lower]), torch.cat([current.upper[None], upper]))
        best = cost(*self.affine(tried)).argmin(dim=0, keepdim=True)
        return Range(tried.lower.gather(0, best)[0], tried.upper.gather(0, best)[0])


def reduce_to(x: Tensor, groups: tuple[int, ...], reduce: Callable[..., Tensor]) -> Tensor:
    """`reduce` over every dimension of `x` that the broadcastable shape `groups` does not keep."""
    shape = (1,) * (x.ndim - len(groups)) + groups
    dims = [d for d in range(x.ndim) if shape[d] == 1]
    return reduce(x, dim=dims, keepdim=True).reshape(groups) if dims else x.reshape(groups)


LARGEST_QUANTILE = 2**17  # a sort; more elements would only cost time


def group_quantile(x: Tensor, groups: tuple[int, ...], share: float) -> Tensor:
    """Quantile per group, over about LARGEST_QUANTILE evenly spaced elements of each."""
    shape = (1,) * (x.ndim - len(groups)) + groups
    kept = [d for d in range(x.ndim) if shape[d] != 1]
    rows = x.permute(*kept, *(d for d in range(x.ndim) if d not in kept)).reshape(max(1, math.prod(groups)), -1)
    stride = -(-rows.shape[1] // LARGEST_QUANTILE)
    while stride > 1 and math.gcd(stride, rows.shape[1]) > 1:
        stride += 1  # a common factor would visit the same few channels of every token
    return torch.quantile(rows[:, ::stride], share, dim=1).reshape(groups)
