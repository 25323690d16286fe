"""Fresh views of the calibration images, drawn many times over while a stage learns.

The pictures are kept once as sources, squeezed into small squares, so that a view of all of them (a crop of random area
and ratio, a flip, a change of colours, a blend or a collage of two) is a few passes on the compute device, without
decoding.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from aphq.data.images import to_mode, to_tensor
from aphq.data.preprocessing import Preprocessing
from aphq.recipe import Views

SOURCE_SIDE = 1.25  # of the model's input: enough that a crop of most of the picture is not blurred
RATIOS = (3 / 4, 4 / 3)  # width / height of a crop
FLIP = 0.5
LUMA = (0.299, 0.587, 0.114)  # red, green and blue in grey


def source_of(image: Image.Image, preprocessing: Preprocessing) -> tuple[Tensor, float]:
    """(uint8 [channels, side, side], width / height) of a whole picture."""
    side = math.ceil(SOURCE_SIDE * max(preprocessing.size))
    picture = to_mode(image, preprocessing.channels)
    return to_tensor(picture.resize((side, side), Image.Resampling.BICUBIC)), picture.width / picture.height


def draw_views(
    sources: Tensor, aspects: Tensor, preprocessing: Preprocessing, config: Views, generator: torch.Generator
) -> Tensor:
    """A view of each source [n, channels, side, side], uint8 or normalised already: normalised float32 images.

    All that is random comes from `generator`, a CPU one; the rest runs where the sources are."""
    count, device = len(sources), sources.device
    boxes = _crops(aspects, config.smallest_crop, generator)
    jitter = 1 + config.jitter * (2 * torch.rand(3, count, generator=generator) - 1)
    partners = torch.randperm(count, generator=generator)
    kind, share, *corner = torch.rand(4, count, generator=generator)
    blended = kind < config.mixup
    cut = ~blended & (kind < config.mixup + config.cutmix)

    mean = torch.tensor(preprocessing.mean, device=device).view(-1, 1, 1)
    std = torch.tensor(preprocessing.std, device=device).view(-1, 1, 1)
    pixels = sources.float() * std + mean if sources.is_floating_point() else sources.float() / 255
    grid = F.affine_grid(boxes.to(device), [count, *preprocessing.shape], align_corners=False)
    views = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    views = _recoloured(views, jitter.to(device)[:, :, None, None, None])
    if blended.any() or cut.any():
        own = torch.where(blended, share, 1.0)[:, None, None, None]  # how much of each pixel is the view's own
        own = torch.where(cut[:, None, None, None], _outside(share, corner, preprocessing.size), own).to(device)
        views = own * views + (1 - own) * views[partners.to(device)]
    return (views - mean) / std


def _crops(aspects: Tensor, smallest: float, generator: torch.Generator) -> Tensor:
    """[n, 2, 3]: where each view's coordinates lie in its source, both from -1 to 1."""
    count = len(aspects)
    area, ratio, x, y, flip = torch.rand(5, count, generator=generator)
    area = smallest + (1 - smallest) * area
    ratio = torch.exp(math.log(RATIOS[0]) + (math.log(RATIOS[1]) - math.log(RATIOS[0])) * ratio)
    width = (area * ratio / aspects).sqrt().clamp_max(1)  # shares of the picture's own width and height
    height = (area / ratio * aspects).sqrt().clamp_max(1)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = torch.where(flip < FLIP, -width, width)
    theta[:, 1, 1] = height
    theta[:, 0, 2] = (1 - width) * (2 * x - 1)
    theta[:, 1, 2] = (1 - height) * (2 * y - 1)
    return theta


def _outside(share: Tensor, corner: list[Tensor], size: tuple[int, int]) -> Tensor:
    """[n, 1, height, width]: 0 in a rectangle of the view's shape that leaves `share` of its area, 1 elsewhere."""
    side = (1 - share).sqrt()
    inside = []
    for start, pixels in zip(corner, size, strict=True):
        at = (torch.arange(pixels) + 0.5) / pixels - ((1 - side) * start)[:, None]  # from the rectangle's edge
        inside.append((at >= 0) & (at < side[:, None]))
    rows, columns = inside
    return 1 - (rows[:, :, None] & columns[:, None, :]).float()[:, None]


def _recoloured(views: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast and saturation times their factors [3, n, 1, 1, 1], of pixels from 0 to 1."""
    brightness, contrast, saturation = factors
    views = (views * brightness).clamp_(0, 1)
    grey = _grey(views).mean((2, 3), keepdim=True)
    views = (grey + contrast * (views - grey)).clamp_(0, 1)
    if views.shape[1] == 3:
        grey = _grey(views)
        views = (grey + saturation * (views - grey)).clamp_(0, 1)
    return views


def _grey(views: Tensor) -> Tensor:
    """[n, 1, height, width]"""
    if views.shape[1] != 3:
        return views.mean(1, keepdim=True)
    return (views * torch.tensor(LUMA, device=views.device).view(3, 1, 1)).sum(1, keepdim=True)
