"""What a detector is made of and how it is run, as one frozen dataclass of plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aphq.errors import ModelError
from aphq.typed import TypedError, from_plain, to_plain

Kind = Literal["mask_rcnn", "cascade_mask_rcnn"]
STRIDES = (4, 8, 16, 32, 64)  # of the five pyramid levels
ROI_LEVELS = 4  # regions are read from the first four
CASCADE_STDS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))


@dataclass(frozen=True)
class DetectorConfig:
    """The defaults are Mask R-CNN with Swin-T, trained on COCO, and its settings at test time."""

    kind: Kind = "mask_rcnn"
    embed_dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    window_size: int = 7
    mlp_ratio: float = 4.0
    pyramid_channels: int = 256
    fc_channels: int = 1024
    num_classes: int = 80
    proposals_per_level: int = 1000  # the best of each level go into the suppression
    proposals: int = 1000  # the best of all levels come out of it
    proposal_iou: float = 0.7
    score_threshold: float = 0.05
    detection_iou: float = 0.5
    detections: int = 100

    def __post_init__(self) -> None:
        if len(self.depths) != ROI_LEVELS or len(self.num_heads) != ROI_LEVELS:
            raise ModelError(f"a detector has four backbone stages; got depths {self.depths}, heads {self.num_heads}")
        numbers = {k: v for k, v in vars(self).items() if isinstance(v, (int, float))}
        too_small = [k for k, v in numbers.items() if v <= 0] + ["depths"] * (min(self.depths) < 1)
        if too_small:
            raise ModelError(f"a detector's {too_small[0]} must be positive")
        for heads, dim in zip(self.num_heads, self.stage_channels, strict=True):
            if heads < 1 or dim % heads:
                raise ModelError(f"{dim} channels cannot be divided among {heads} heads")

    @property
    def stage_channels(self) -> tuple[int, ...]:
        return tuple(self.embed_dim * 2**i for i in range(ROI_LEVELS))

    @property
    def stages(self) -> int:
        """Box heads in a row."""
        return len(CASCADE_STDS) if self.kind == "cascade_mask_rcnn" else 1

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(self)
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DetectorConfig:
        try:
            return from_plain(cls, data)
        except TypedError as problem:
            raise ModelError(f"detector: {problem}") from None


SMALL = (2, 2, 18, 2)
DETECTORS: dict[str, DetectorConfig] = {
    "mask_rcnn_swin_t": DetectorConfig(),
    "mask_rcnn_swin_s": DetectorConfig(depths=SMALL),
    "cascade_mask_rcnn_swin_t": DetectorConfig("cascade_mask_rcnn"),
    "cascade_mask_rcnn_swin_s": DetectorConfig("cascade_mask_rcnn", depths=SMALL),
}
