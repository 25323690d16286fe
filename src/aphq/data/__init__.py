"""Images in: finding and decoding them, preparing them for a model, drawing calibration and labelled sets."""

from aphq.data.augment import Augmentation, train_view
from aphq.data.calibration import CalibrationSet, load_calibration
from aphq.data.images import CorruptImage, ImageFiles, open_images
from aphq.data.labelled import (
    Labelled,
    LabelledImages,
    LabelledLoader,
    LabelledTensors,
    as_labelled,
    open_labelled,
)
from aphq.data.preprocessing import Preprocessing

__all__ = [
    "Augmentation",
    "CalibrationSet",
    "CorruptImage",
    "ImageFiles",
    "Labelled",
    "LabelledImages",
    "LabelledLoader",
    "LabelledTensors",
    "Preprocessing",
    "as_labelled",
    "load_calibration",
    "open_images",
    "open_labelled",
    "train_view",
]
