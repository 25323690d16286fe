"""Tiny models of every family beside timm's VisionTransformer and SwinTransformer, by name; all take 32 pixels."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torchvision.models import swin_transformer as tv_swin
from torchvision.models import vision_transformer as tv_vit

from aphq.models.hf.base import OLDEST_RELEASE

Make = Callable[[], nn.Module]
SIZE = 32
TIMM: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
}
TIMM_SWIN: dict[str, Any] = {
    "img_size": SIZE,
    "patch_size": 4,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 2),
    "num_classes": 10,
}
HF: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HF_SWIN: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 2],
    "num_labels": 10,
}


def timm_model(cls: type[nn.Module], **changes: Any) -> Make:
    defaults = TIMM_SWIN if "Swin" in cls.__name__ else TIMM
    return lambda: cls(**{**defaults, **changes})


def tv_vit_model(**changes: Any) -> Make:
    return lambda: tv_vit.VisionTransformer(SIZE, 8, 2, 2, 32, 64, **{"num_classes": 10, **changes})


def tv_swin_model(version: int = 1, window: int = 4) -> Make:
    second: dict[str, Any] = {
        "block": tv_swin.SwinTransformerBlockV2,
        "downsample_layer": tv_swin.PatchMergingV2,
    }
    options = second if version == 2 else {}
    windows = [window, window]
    return lambda: tv_swin.SwinTransformer([4, 4], 16, [2, 2], [2, 2], windows, num_classes=10, **options)


def hf_model(name: str, config: str, width: dict[str, Any] | None = None, nested: str = "", **changes: Any) -> Make:
    """A class of transformers, which is imported when the model is built."""

    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers", minversion=OLDEST_RELEASE)
        defaults = HF_SWIN if "Swin" in name else {**HF, **(width if width is not None else {"intermediate_size": 64})}
        values = {**defaults, **changes}
        labels = values.pop("num_labels", 10)
        if nested:  # the classifiers of two-tower models keep the vision tower's configuration inside
            inner = getattr(transformers, config)(**values).to_dict()
            made = getattr(transformers, nested)(vision_config=inner, text_config={}, num_labels=labels)
        else:
            made = getattr(transformers, config)(**values, num_labels=labels)
        model: nn.Module = getattr(transformers, name)(made)
        return model

    return make


ROPE: dict[str, Any] = {"use_rot_pos_emb": True}
NO_WIDTH: dict[str, Any] = {}
FAMILIES: dict[str, Make] = {
    "timm vit, packed swiglu": timm_model(VisionTransformer, mlp_layer=SwiGLUPacked, act_layer=nn.SiLU),
    "timm vit, swiglu": timm_model(VisionTransformer, mlp_layer=SwiGLU, act_layer=nn.SiLU, init_values=1e-5),
    "timm vit, embedding": timm_model(VisionTransformer, num_classes=0),
    "timm swin, embedding": timm_model(SwinTransformer, num_classes=0),
    "timm eva": timm_model(Eva),
    "timm eva, eva02": timm_model(
        Eva, qkv_fused=False, swiglu_mlp=True, scale_mlp=True, ref_feat_shape=(4, 4), init_values=1e-5, **ROPE
    ),
    "timm eva, packed swiglu": timm_model(Eva, swiglu_mlp=True, **ROPE),
    "timm eva, norms last": timm_model(Eva, use_post_norm=True, scale_attn_inner=True),
    "timm eva, dinov3": timm_model(
        Eva,
        rope_type="dinov3",
        rope_rotate_half=True,
        rope_temperature=100,
        use_abs_pos_emb=False,
        num_reg_tokens=4,
        qkv_bias=False,
        swiglu_mlp=True,
        swiglu_align_to=8,
        num_classes=0,
        **ROPE,
    ),
    "timm eva, mixed rope": timm_model(Eva, rope_type="mixed", attn_type="rope", **ROPE),
    "timm eva, pooled by attention": timm_model(
        Eva,
        attn_type="rope",
        global_pool="map",
        use_pre_transformer_norm=True,
        use_fc_norm=False,
        use_post_transformer_norm=True,
        attn_pool_num_heads=4,
        attn_pool_mlp_ratio=2.0,
        **ROPE,
    ),
    "timm eva, any size": timm_model(Eva, dynamic_img_size=True, **ROPE),
    "timm beit": timm_model(Beit),
    "timm beit, own positions": timm_model(Beit, use_rel_pos_bias=True, init_values=0.1, use_abs_pos_emb=False),
    "timm beit, shared positions": timm_model(
        Beit, use_rel_pos_bias=True, use_shared_rel_pos_bias=True, global_pool="token"
    ),
    "timm beit, swiglu": timm_model(Beit, swiglu_mlp=True, scale_mlp=True),
    "timm cait": timm_model(Cait, embed_dim=64, num_heads=4),
    "timm cait, average": timm_model(Cait, embed_dim=64, num_heads=4, global_pool="avg"),
    "timm swin v2": timm_model(SwinTransformerV2),
    "timm swin v2, other pretraining": timm_model(SwinTransformerV2, pretrained_window_sizes=(3, 2)),
    "timm swin v2, one window": timm_model(SwinTransformerV2, window_size=8),
    "torchvision vit": tv_vit_model(),
    "torchvision vit, representation": tv_vit_model(representation_size=16),
    "torchvision swin": tv_swin_model(),
    "torchvision swin, padded": tv_swin_model(window=3),
    "torchvision swin v2": tv_swin_model(2),
    "torchvision swin v2, padded": tv_swin_model(2, window=3),
}
HF_FAMILIES: dict[str, Make] = {
    "transformers vit": hf_model("ViTForImageClassification", "ViTConfig"),
    "transformers vit, embedding": hf_model("ViTModel", "ViTConfig"),
    "transformers deit": hf_model("DeiTForImageClassification", "DeiTConfig"),
    "transformers deit, two heads": hf_model("DeiTForImageClassificationWithTeacher", "DeiTConfig"),
    "transformers dinov2": hf_model("Dinov2ForImageClassification", "Dinov2Config", NO_WIDTH),
    "transformers dinov2, swiglu": hf_model(
        "Dinov2ForImageClassification", "Dinov2Config", NO_WIDTH, use_swiglu_ffn=True
    ),
    "transformers dinov2, embedding": hf_model("Dinov2Model", "Dinov2Config", NO_WIDTH),
    "transformers dinov2, registers": hf_model(
        "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", NO_WIDTH
    ),
    "transformers beit": hf_model("BeitForImageClassification", "BeitConfig", use_relative_position_bias=True),
    "transformers beit, embedding": hf_model(
        "BeitModel", "BeitConfig", use_shared_relative_position_bias=True, use_mean_pooling=False
    ),
    "transformers clip": hf_model("CLIPVisionModel", "CLIPVisionConfig"),
    "transformers clip, projection": hf_model("CLIPVisionModelWithProjection", "CLIPVisionConfig", projection_dim=16),
    "transformers clip, classifier": hf_model("CLIPForImageClassification", "CLIPVisionConfig", nested="CLIPConfig"),
    "transformers siglip": hf_model("SiglipVisionModel", "SiglipVisionConfig"),
    "transformers siglip, classifier": hf_model(
        "SiglipForImageClassification", "SiglipVisionConfig", nested="SiglipConfig"
    ),
    "transformers swin": hf_model("SwinForImageClassification", "SwinConfig", window_size=4),
    "transformers swin, padded": hf_model("SwinForImageClassification", "SwinConfig", window_size=3),
    "transformers swin, embedding": hf_model("SwinModel", "SwinConfig", window_size=4),
    "transformers swin v2": hf_model("Swinv2ForImageClassification", "Swinv2Config", window_size=4),
    "transformers swin v2, padded": hf_model("Swinv2ForImageClassification", "Swinv2Config", window_size=3),
}
if find_spec("transformers") is not None:
    FAMILIES |= HF_FAMILIES
