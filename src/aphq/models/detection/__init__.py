"""Mask R-CNN and Cascade Mask R-CNN with a Swin backbone, as MMDetection 2.11 defines them."""

from aphq.models.detection.config import DETECTORS, DetectorConfig
from aphq.models.detection.detector import Detections, Detector

__all__ = ["DETECTORS", "Detections", "Detector", "DetectorConfig"]
