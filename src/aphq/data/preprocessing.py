"""What a model expects of its input: size, channels, normalisation, and how an image is resized and cropped.

Images stay uint8 until the last moment: a quarter of the memory, and the normalisation runs on the model's device.
`normalise(eval_transform(image))` is what timm's own evaluation transform gives.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from aphq.data.images import to_mode
from aphq.errors import DataError
from aphq.typed import shown

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
MAX_SIDE, MIN_CROP = 8192, 0.05  # beyond them one image would take gigabytes
CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class Preprocessing:
    """The input of a model; timm's names and meanings."""

    size: tuple[int, int]  # height, width
    channels: int = 3  # 1 or 3
    mean: tuple[float, ...] = IMAGENET_MEAN  # one per channel, for pixels in 0-1
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bicubic"
    crop_pct: float = 0.875  # side of the crop / side of the resized image
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        sides = _is_tuple_of(self.size, int, 2) and min(self.size) > 0 and max(self.size) <= MAX_SIDE
        _check("size", self.size, sides, f"two positive integers up to {MAX_SIDE}")
        _check("channels", self.channels, _is_number(self.channels) and self.channels in (1, 3), "1 or 3")
        numbers = f"{self.channels} numbers, one per channel"
        _check("mean", self.mean, _is_tuple_of(self.mean, float, self.channels), numbers)
        _check("std", self.std, _is_tuple_of(self.std, float, self.channels) and min(self.std) > 0, f"{numbers}, > 0")
        _check("interpolation", self.interpolation, self.interpolation in INTERPOLATIONS, f"one of {INTERPOLATIONS}")
        pct = _is_number(self.crop_pct) and MIN_CROP <= self.crop_pct <= 1 / MIN_CROP
        _check("crop_pct", self.crop_pct, pct, f"a number from {MIN_CROP:g} to {1 / MIN_CROP:g}")
        _check("crop_mode", self.crop_mode, self.crop_mode in CROP_MODES, f"one of {CROP_MODES}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (self.channels, *self.size)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as JSON would give them back."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; every key must be there, and no other."""
        if not isinstance(d, Mapping):
            raise DataError(f"preprocessing must be a mapping, got {type(d).__name__}")
        known = [field.name for field in fields(cls)]
        for key in d:
            if key not in known:
                raise DataError(f"preprocessing: unknown key '{key}'; the keys are {', '.join(known)}")
        for key in known:
            if key not in d:
                raise DataError(f"preprocessing: key '{key}' is missing")
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in d.items()}
        return cls(**values)

    @classmethod
    def of_model(cls, model: nn.Module) -> "Preprocessing":
        """Read a model's `pretrained_cfg`; the size and channels it was built with win, ImageNet's habits fill gaps."""
        import timm.data

        timm_data: Any = timm.data  # its own annotations are partial
        config = timm_data.resolve_model_data_config(model, pretrained_cfg=getattr(model, "pretrained_cfg", None))
        patches = getattr(model, "patch_embed", None)
        size = getattr(patches, "img_size", None) or config["input_size"][-2:]
        size = (size, size) if isinstance(size, int) else tuple(size)
        channels = getattr(model, "in_chans", None) or getattr(getattr(patches, "proj", None), "in_channels", None)
        channels = channels or config["input_size"][0]
        return cls(
            size=size,
            channels=channels,
            mean=_per_channel(config["mean"], channels),
            std=_per_channel(config["std"], channels),
            interpolation=config["interpolation"],
            crop_pct=config["crop_pct"],
            crop_mode=config["crop_mode"],
        )

    def eval_transform(self, image: Image.Image) -> Tensor:
        """Resize and crop as timm does for evaluation: uint8 [channels, height, width]."""
        view = _timm_transform(self)(to_mode(image, self.channels))
        return torch.as_tensor(view).contiguous()  # older timm gives a numpy array

    def normalise(self, batch: Tensor) -> Tensor:
        """uint8 [batch, channels, height, width] to normalised float32; a float batch is normalised already."""
        if batch.is_floating_point():
            return batch.float()
        if batch.dtype != torch.uint8:
            raise DataError(f"images must be uint8 or float, got {batch.dtype}")
        mean = torch.tensor(self.mean, device=batch.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=batch.device).view(-1, 1, 1)
        return batch.float().div_(255).sub_(mean).div_(std)


@lru_cache(maxsize=16)
def _timm_transform(preprocessing: Preprocessing) -> Callable[[Image.Image], Any]:
    import timm.data

    timm_data: Any = timm.data
    transform: Callable[[Image.Image], Any] = timm_data.create_transform(
        preprocessing.shape,
        is_training=False,
        use_prefetcher=True,  # timm's name for "stop before ToTensor and Normalize"
        interpolation=preprocessing.interpolation,
        mean=preprocessing.mean,
        std=preprocessing.std,
        crop_pct=preprocessing.crop_pct,
        crop_mode=preprocessing.crop_mode,
    )
    return transform


def _per_channel(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    """Statistics for another number of channels: a grey model gets the average of the colours."""
    if len(values) == channels:
        return tuple(values)
    return (sum(values) / len(values),) * channels


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30  # NaN is not


def _is_tuple_of(values: object, kind: type, length: int) -> bool:
    if not isinstance(values, tuple) or len(values) != length:
        return False
    return all(_is_number(value) and (kind is float or isinstance(value, int)) for value in values)


def _check(key: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise DataError(f"preprocessing: '{key}' must be {expected}, got {shown(value)}")
