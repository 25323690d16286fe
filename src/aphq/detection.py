"""Detectors: Mask R-CNN and Cascade Mask R-CNN with Swin, and the public checkpoints that fit them; timm's models as
backbones of torchvision's detectors."""

from aphq.models.detection import DETECTORS, Detections, Detector, DetectorConfig
from aphq.models.detection.checkpoint import load_detector
from aphq.models.detection.timm_backbone import TimmBackbone, timm_backbone

__all__ = [
    "DETECTORS",
    "Detections",
    "Detector",
    "DetectorConfig",
    "TimmBackbone",
    "load_detector",
    "timm_backbone",
]
