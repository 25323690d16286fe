"""QDrop: which elements stay in float at a step.

On a GPU the answer is a hash of (seed, step, element), so that a kernel can ask again on the way back instead of
keeping a mask, and a step recorded as a graph draws new ones on every replay. On the CPU, where a hash per element
would cost more than the quantizer itself, it is random bytes of the default generator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from aphq import kernels

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Drop:
    """Each element is quantized with probability `share` (to 1/256)."""

    share: float
    seed: int  # 31 bits
    step: Tensor  # [1], the loop's counter, on the device
    rank: int = 0  # of so many processes that each hold an equal share of the rows
    ranks: int = 1

    @property
    def threshold(self) -> int:
        return threshold(self.share)

    def first(self, elements: int) -> int:
        """The number, among those of all processes, of the first of my `elements`."""
        return self.rank * elements

    def kept(self, like: Tensor) -> Tensor:
        """True where an element is quantized, in the shape of `like`; elements are counted as matrices lie."""
        if like.device.type == "cpu" and not kernels.interpreted:
            return self.noise(like) < self.threshold
        if transposed(like):
            return hashed_mask(like.mT.shape, self).mT
        return hashed_mask(like.shape, self)

    def noise(self, like: Tensor) -> Tensor:
        """On the CPU: new random bytes, of which those below the threshold are elements to quantize."""
        if transposed(like):
            return self.noise(like.mT).mT
        rows = len(like)
        return random_bytes((self.ranks * rows, *like.shape[1:]))[self.rank * rows :][:rows]


def transposed(x: Tensor) -> bool:
    """Whether matrices lie column by column."""
    return x.ndim == 4 and x.stride(-1) != 1 and x.stride(-2) == 1


def threshold(share: float) -> int:
    """A random byte is below it with probability `share`."""
    return min(255, round(256 * share))


def random_bytes(shape: tuple[int, ...]) -> Tensor:
    """One for each element, eight per draw."""
    size = math.prod(shape)
    words = torch.empty(-(-size // 8), dtype=torch.long).random_(-(2**63), None)
    return words.view(torch.uint8)[:size].view(shape)


def hashed_mask(shape: torch.Size, drop: Drop) -> Tensor:
    """What `aphq.kernels.common.dropped` computes, the other way round: True where an element is quantized."""
    element = torch.arange(shape.numel(), device=drop.step.device) + drop.first(shape.numel())
    seed = torch.full_like(drop.step, drop.seed)
    key = _mix_bits((drop.step + _mix_bits(seed)) & WORD)
    bits = _mix_bits(_mix_bits((element + key) & WORD) ^ seed)
    return ((bits & 255) < drop.threshold).view(shape)


def _mix_bits(x: Tensor) -> Tensor:
    """32-bit words, in the low half of 64."""
    x = ((x ^ (x >> 16)) * 0x045D9F3B) & WORD
    x = ((x ^ (x >> 16)) * 0x045D9F3B) & WORD
    return x ^ (x >> 16)
