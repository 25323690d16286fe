"""Adapters for Hugging Face transformers; imported when the first of its models, or its name, turns up."""

from aphq.models.hf import beit, clip, dinov2, siglip, swin, swinv2, vit
from aphq.models.hf.base import HfArchitecture

__all__ = ["HfArchitecture"]
del beit, clip, dinov2, siglip, swin, swinv2, vit
