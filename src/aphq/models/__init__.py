"""Model families; importing this package registers every adapter."""

from aphq.models import (
    timm_beit,
    timm_cait,
    timm_eva,
    timm_swin,
    timm_swin_v2,
    timm_vit,
    torchvision_swin,
    torchvision_vit,
)
from aphq.models.architecture import Architecture, NormPair, Unit, architecture_named, architecture_of, register
from aphq.models.detection import adapter, torchvision_adapter

__all__ = ["Architecture", "NormPair", "Unit", "architecture_named", "architecture_of", "register"]
del adapter, timm_beit, timm_cait, timm_eva, timm_swin, timm_swin_v2, timm_vit
del torchvision_adapter, torchvision_swin, torchvision_vit
