"""Detections on top of their image: tinted masks, boxes, and labels with scores."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from aphq.models.detection.detector import Detections

TINT = 0.45  # how much of a mask is colour
GAP, BAR = 8, 22  # pixels between two panels, and of the bar that names one


def drawn(image: Image.Image, found: Detections, names: Sequence[str], title: str) -> Image.Image:
    """A copy of the image with everything that was found, under a bar with the title; the best on top."""
    pixels = np.array(image.convert("RGB"), dtype=np.float32)
    colours = [colour_of(label) for label in found.labels.tolist()]
    masks = [] if found.masks is None else list(zip(found.masks.cpu().numpy(), colours, strict=True))
    for mask, colour in reversed(masks):
        pixels[mask] = (1 - TINT) * pixels[mask] + TINT * np.array(colour, dtype=np.float32)
    out = Image.new("RGB", (image.width, image.height + BAR), "white")
    out.paste(Image.fromarray(pixels.round().astype(np.uint8)), (0, BAR))
    pen, font = ImageDraw.Draw(out), ImageFont.load_default()
    pen.text((6, 5), f"{title}: {len(found)} found", fill="black", font=font)
    rows = zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), colours, strict=True)
    for (x1, y1, x2, y2), score, label, colour in reversed(list(rows)):
        pen.rectangle((x1, y1 + BAR, x2, y2 + BAR), outline=colour, width=2)
        text = f"{names[label]} {score:.2f}"
        left, top, right, bottom = pen.textbbox((x1 + 3, y1 + BAR + 2), text, font=font)
        pen.rectangle((left - 2, top - 2, right + 2, bottom + 2), fill=colour)
        pen.text((x1 + 3, y1 + BAR + 2), text, fill="black", font=font)
    return out


def colour_of(label: int) -> tuple[int, int, int]:
    """Bright, and far from that of the next label."""
    red, green, blue = colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.65, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)


def side_by_side(panels: Sequence[Image.Image]) -> Image.Image:
    width = sum(panel.width for panel in panels) + GAP * (len(panels) - 1)
    out = Image.new("RGB", (width, max(panel.height for panel in panels)), "white")
    left = 0
    for panel in panels:
        out.paste(panel, (left, 0))
        left += panel.width + GAP
    return out
