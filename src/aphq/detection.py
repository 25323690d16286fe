"""Detectors: Mask R-CNN and Cascade Mask R-CNN with Swin, and the public checkpoints that fit them."""

from aphq.models.detection import DETECTORS, Detections, Detector, DetectorConfig
from aphq.models.detection.checkpoint import load_detector

__all__ = ["DETECTORS", "Detections", "Detector", "DetectorConfig", "load_detector"]
