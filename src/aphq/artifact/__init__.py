"""The result on disk."""

from aphq.artifact.info import QuantizationInfo, info_of
from aphq.artifact.loading import load
from aphq.artifact.saving import Sizes, save

__all__ = ["QuantizationInfo", "Sizes", "info_of", "load", "save"]
