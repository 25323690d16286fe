"""Feature maps cut into windows, shifted and put together again, which some libraries' Swin attentions do inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

OTHER_REGION = -100.0  # what the score of a pair gets whose tokens were not neighbours before the shift
Pair = tuple[int, int]


def partition(x: Tensor, window: Pair) -> Tensor:
    """[batch, height, width, channels] -> [batch * windows, tokens, channels]"""
    tiles = x.unflatten(2, (-1, window[1])).unflatten(1, (-1, window[0]))
    return tiles.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def merge(windows: Tensor, window: Pair, size: Pair) -> Tensor:
    """The inverse of `partition` for a map of `size`."""
    rows, columns = size[0] // window[0], size[1] // window[1]
    tiles = windows.unflatten(1, window).unflatten(0, (-1, rows, columns))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def padded(x: Tensor, window: Pair) -> Tensor:
    """Zeros at the far ends until whole windows fit."""
    down, right = (-side % one for side, one in zip(x.shape[1:3], window, strict=True))
    return F.pad(x, (0, 0, 0, right, 0, down))


def shift_mask(size: Pair, window: Pair, shift: Pair, device: torch.device) -> Tensor:
    """[windows, tokens, tokens]: 0 for pairs of one region, `OTHER_REGION` for others. It does not depend on the
    images, so a recorded program keeps it as a constant."""
    regions = [
        (torch.arange(side, device=device) >= side - one).long()
        + (torch.arange(side, device=device) >= side - moved).long()
        for side, one, moved in zip(size, window, shift, strict=True)
    ]
    number = 3 * regions[0][:, None] + regions[1][None, :]
    tokens = partition(number[None, :, :, None], window).squeeze(-1)  # [windows, tokens]
    different = tokens[:, None, :] != tokens[:, :, None]
    return different.float() * OTHER_REGION
