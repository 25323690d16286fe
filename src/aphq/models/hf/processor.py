"""What transformers' image processors do to an image, read from their files and said as `Preprocessing`.

A file says what differs from the defaults of the processor class that it names; without a file the family's own class
counts. Sizes come in several spellings: `224`, `[224, 224]`, `{"height": 224, "width": 224}`, `{"shortest_edge": 224}`.
What `Preprocessing` cannot say is refused by its key: wrongly prepared images cost accuracy without a word.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aphq.data.preprocessing import Preprocessing
from aphq.errors import DataError, ModelError
from aphq.typed import shown

log = logging.getLogger(__name__)
RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's numbers
SQUASHED: dict[str, Any] = {
    "size": {"height": 224, "width": 224},
    "default_to_square": True,  # what a bare number for `size` means: both sides, or else the short one
    "do_center_crop": False,
    "resample": 3,
}
CROPPED: dict[str, Any] = {
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": 224,
    "resample": 3,
}
# as the classes <name>ImageProcessor have them
DEFAULTS: dict[str, dict[str, Any]] = {
    "ViT": {**SQUASHED, "resample": 2},
    "DeiT": {**SQUASHED, "size": {"height": 256, "width": 256}, "do_center_crop": True, "crop_size": 224},
    "Beit": {**SQUASHED, "crop_size": 224},
    "Siglip": {**SQUASHED, "default_to_square": False},
    "CLIP": CROPPED,
    "Bit": CROPPED,
}
CLASS = re.compile(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?")  # generations of names for the same
KNOWN_STEPS = {"do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb", "do_reduce_labels"}
UNKNOWN_RULES = ("crop_pct", "rescale_offset", "size_divisor")  # other processors' ways to resize and rescale
Sides = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Family:
    """What is known of the model: the name of its processor's class, its statistics, and the images it takes."""

    processor: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: Sides
    channels: int
    any_size: bool  # whether it takes images of other sizes too


def preprocessing_from(said: Mapping[str, Any], family: Family, where: str) -> Preprocessing:
    """The settings `said` of a file `where`, on top of the defaults; without settings the defaults alone."""
    try:
        return _read(said, family, where)
    except DataError as problem:
        raise ModelError(f"{where}: {problem}") from None


def _read(said: Mapping[str, Any], family: Family, where: str) -> Preprocessing:
    given = {**_defaults_for(said, family, where), **{key: value for key, value in said.items() if value is not None}}
    _refuse_unknown_steps(given)
    resized, crop, mode = _geometry(given, family.size, where)
    size = crop if said and family.any_size else family.size
    if said and size != crop:
        log.warning("%s makes images of %s, the model takes %s: resized in proportion", where, crop, size)
    return Preprocessing(
        size=size,
        channels=family.channels,
        interpolation=_interpolation(given["resample"]),
        crop_pct=_crop_pct(resized, crop),
        crop_mode=mode,
        **_statistics(given, family),
    )


def _defaults_for(said: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    named = said.get("image_processor_type") or said.get("feature_extractor_type")
    if named is None:
        return DEFAULTS[family.processor]
    match = CLASS.fullmatch(named) if isinstance(named, str) else None
    if match is None or match[1] not in DEFAULTS:
        log.warning("%s is for a %s, read as for a %sImageProcessor", where, shown(named), family.processor)
        return DEFAULTS[family.processor]
    return DEFAULTS[match[1]]


def _refuse_unknown_steps(given: Mapping[str, Any]) -> None:
    steps = [key for key, value in given.items() if key.startswith("do_") and value and key not in KNOWN_STEPS]
    for key in (*steps, *(key for key in UNKNOWN_RULES if given.get(key))):
        raise DataError(f"images cannot be prepared with {shown(key)}; pass `preprocessing` yourself")


def _geometry(given: Mapping[str, Any], own: Sides, where: str) -> tuple[Sides, Sides, str]:
    """(the image resized, what is cut out of it, crop mode); a short side is given as the square over it."""
    crop = _sides(given.get("crop_size", own), "crop_size") if given["do_center_crop"] else None
    if not given.get("do_resize", True):
        if crop is not None:
            raise DataError(
                "images cannot be cropped without being resized ('do_resize'); pass `preprocessing` yourself"
            )
        log.warning("%s resizes no images: they are brought to the model's size where they differ", where)
        return own, own, "squash"
    size = given["size"]
    short = not given["default_to_square"] if isinstance(size, int) else _is_short_side(size)
    resized = _sides(size, "size")
    if short and crop is None:
        log.warning("%s keeps the shape of images: what is longer than a square is cut off", where)
    return resized, crop or resized, "center" if short else "squash"


def _sides(value: Any, key: str) -> Sides:
    """Height and width from any spelling of both."""
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        value = (value["height"], value["width"])
    elif _is_short_side(value):
        value = value["shortest_edge"]
    sides = (value, value) if isinstance(value, int) else value
    pair = isinstance(sides, (list, tuple)) and len(sides) == 2
    if not pair or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in sides):
        raise DataError(f"'{key}' must be a number, a height and a width, or a shortest edge, got {shown(value)}")
    return sides[0], sides[1]


def _is_short_side(size: Any) -> bool:
    return isinstance(size, Mapping) and set(size) == {"shortest_edge"}


def _crop_pct(resized: Sides, crop: Sides) -> float:
    """Crop over image, such that dividing by it and rounding down gives the image back."""
    if crop[0] * resized[1] != crop[1] * resized[0]:
        raise DataError(f"'size' {resized} and 'crop_size' {crop} differ in shape; pass `preprocessing` yourself")
    pct = crop[0] / resized[0]
    return pct if math.floor(crop[0] / pct) == resized[0] else math.nextafter(pct, 0)


def _interpolation(number: Any) -> str:
    if not isinstance(number, int) or number not in range(len(RESAMPLING)):
        raise DataError(f"'resample' must be one of PIL's numbers from 0 to {len(RESAMPLING) - 1}, got {shown(number)}")
    return RESAMPLING[number]


def _statistics(given: Mapping[str, Any], family: Family) -> dict[str, tuple[float, ...]]:
    """Mean and deviation for pixels in 0-1, whatever range the processor brings them to before it normalises."""
    mean, std = (given.get("image_mean", family.mean), given.get("image_std", family.std))
    if not given.get("do_normalize", True):
        mean, std = 0.0, 1.0
    factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise DataError(f"'rescale_factor' must be a number above 0, got {shown(factor)}")
    top = 1.0 if math.isclose(factor, 1 / 255) else 255 * factor  # what white becomes
    return {
        key: tuple(x / top for x in _per_channel(value, family.channels, key))
        for key, value in {"mean": mean, "std": std}.items()
    }


def _per_channel(value: Any, channels: int, key: str) -> tuple[float, ...]:
    values = [value] if isinstance(value, (int, float)) else value
    if not isinstance(values, (list, tuple)) or not values or not all(isinstance(x, (int, float)) for x in values):
        raise DataError(f"'image_{key}' must be numbers, one per channel, got {shown(value)}")
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
