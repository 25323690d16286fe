"""Swin as a detector's backbone: any image size, fixed windows, and a normalised output of every stage.

Built of timm's parts. The blocks are not timm's: theirs shift before they pad and shrink the window on small maps, and
the public checkpoints were trained padding first and shifting always. Tokens lie as an image, [batch, h, w, c].
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import PatchMerging, WindowAttention, window_partition, window_reverse
from torch import Tensor, nn

from aphq.models.detection.config import DetectorConfig

PATCH = 4
OTHER_REGION = -100.0  # added to the score of a pair that the shift has brought together


class SwinBlock(nn.Module):
    """x + attention(norm(x)), x + mlp(norm(x)). Zeros fill the last windows after the norm, and take part."""

    def __init__(self, dim: int, heads: int, window: int, shift: int, mlp_ratio: float) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1 = nn.LayerNorm(dim)
        self.attn: Any = WindowAttention(dim, heads, window_size=window)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out

    def attend(self, x: Tensor) -> Tensor:
        _, height, width, _ = x.shape
        x = F.pad(x, (0, 0, 0, -width % self.window, 0, -height % self.window))
        padded = x.shape[1], x.shape[2]
        if self.shift:
            x = x.roll((-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, (self.window, self.window)).flatten(1, 2)  # [batch * windows, tokens, channels]
        mask = shift_mask(*padded, self.window, self.shift, x.device) if self.shift else None
        windows = self.attn(windows, mask=mask).unflatten(1, (self.window, self.window))
        x = window_reverse(windows, (self.window, self.window), *padded)
        if self.shift:
            x = x.roll((self.shift, self.shift), dims=(1, 2))
        return x[:, :height, :width]


@lru_cache(maxsize=32)
def shift_mask(height: int, width: int, window: int, shift: int, device: torch.device) -> Tensor:
    """[windows, tokens, tokens] to add to the scores: tokens of different regions of the shifted map do not mix."""

    def regions(side: int) -> Tensor:
        """0 for the windows before the last, 1 and 2 for the parts of the last that the shift put together"""
        at = torch.arange(side, device=device)
        return (at >= side - window).int() + (at >= side - shift).int()

    label = (3 * regions(height)[:, None] + regions(width)).view(1, height, width, 1)
    tokens = window_partition(label, (window, window)).flatten(1)
    return (tokens[:, :, None] != tokens[:, None, :]).float() * OTHER_REGION


class SwinStage(nn.Module):
    """Blocks, every other one shifted; `downsample` (None in the last stage) leads to the next stage."""

    def __init__(self, config: DetectorConfig, index: int) -> None:
        super().__init__()
        dim, window = config.stage_channels[index], config.window_size
        self.blocks = nn.ModuleList(
            SwinBlock(dim, config.num_heads[index], window, window // 2 if b % 2 else 0, config.mlp_ratio)
            for b in range(config.depths[index])
        )
        last = index == len(config.depths) - 1
        self.downsample = None if last else PatchMerging(dim, norm_layer=nn.LayerNorm)


class Swin(nn.Module):
    """[batch, 3, height, width] -> the stages' outputs, each [batch, channels, height / stride, width / stride]."""

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(
            img_size=None,
            patch_size=PATCH,
            embed_dim=config.embed_dim,
            norm_layer=nn.LayerNorm,
            output_fmt="NHWC",
            strict_img_size=False,
            dynamic_img_pad=True,
        )
        self.layers = nn.ModuleList(SwinStage(config, i) for i in range(len(config.depths)))
        for i, channels in enumerate(config.stage_channels):
            self.add_module(f"norm{i}", nn.LayerNorm(channels))

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.patch_embed(images)
        outputs = []
        for i, stage in enumerate(self.layers):
            for block in stage.blocks:  # type: ignore[union-attr]
                x = block(x)
            outputs.append(self.output(i, x))
            if stage.downsample is not None:
                x = stage.downsample(x)  # type: ignore[operator]
        return outputs

    def output(self, stage: int, x: Tensor) -> Tensor:
        """A stage's result, normalised and as channels first; the next stage goes on from the result itself."""
        out: Tensor = self.get_submodule(f"norm{stage}")(x).permute(0, 3, 1, 2)
        return out
