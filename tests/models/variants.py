"""The supported ways to build a VisionTransformer and a SwinTransformer, by name, as timm's arguments."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from timm.layers import GELUTanh, LayerNorm, QuickGELU, RmsNorm
from torch import Tensor, nn

from aphq.data import Preprocessing
from aphq.models import architecture_of

from ..conftest import scramble
from .families import FAMILIES, SIZE

NO_CLASS_TOKEN: dict[str, Any] = {"class_token": False}
VITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "layer scale": {"init_values": 1e-5, "no_embed_class": True},
    "registers": {"reg_tokens": 4, "no_embed_class": True},
    "registers with positions": {"reg_tokens": 2},
    "avg pooling": {"global_pool": "avg", **NO_CLASS_TOKEN},
    "max pooling": {"global_pool": "max", **NO_CLASS_TOKEN},
    "avgmax pooling": {"global_pool": "avgmax", **NO_CLASS_TOKEN},
    "map pooling": {"global_pool": "map", **NO_CLASS_TOKEN},
    "avg pooling beside a class token": {"global_pool": "avg"},
    "avg pooling, norm before it": {"global_pool": "avg", "fc_norm": False},
    "avg pooling over prefix tokens": {"global_pool": "avg", "pool_include_prefix": True},
    "no final norm": {"final_norm": False},
    "qk norm": {"qk_norm": True},
    "norms inside attention and mlp": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "pre norm": {"pre_norm": True, "norm_layer": partial(LayerNorm, eps=1e-5)},
    "dynamic size": {"dynamic_img_size": True},
    "dynamic size with padding": {"dynamic_img_size": True, "dynamic_img_pad": True, "img_size": 36},
    "not square": {"img_size": (32, 48)},
    "small patches": {"patch_size": 4},
    "flat patches": {"patch_size": (4, 8)},
    "one channel": {"in_chans": 1},
    "odd mlp": {"embed_dim": 44, "mlp_ratio": 60 / 44 + 1e-9},
    "no biases": {"qkv_bias": False, "proj_bias": False},
    "no positions": {"pos_embed": "none"},
    "quick gelu": {"act_layer": QuickGELU},
    "tanh gelu": {"act_layer": partial(nn.GELU, approximate="tanh")},
    "timm's tanh gelu": {"act_layer": GELUTanh},
    "rms norm": {"norm_layer": RmsNorm},
    "torch's layer norm": {"norm_layer": nn.LayerNorm},
    "norm in the embedding": {"embed_norm_layer": LayerNorm},
}
SWINS: dict[str, dict[str, Any]] = {
    "window divides": {},
    "window divides, small patches": {"patch_size": 2},
    "padded": {"window_size": 3},
    "padded on odd maps": {"img_size": 36},
    "always partition": {"window_size": 7, "always_partition": True},
    "three stages": {"patch_size": 2, "depths": (1, 2, 1), "num_heads": (1, 2, 4)},
    "three stages, padded": {"patch_size": 2, "window_size": 7, "depths": (2, 2, 2), "num_heads": (2, 2, 2)},
    "one stage": {"depths": (2,), "num_heads": (2,)},
    "not square": {"img_size": (32, 64)},
    "wide window": {"window_size": (2, 4)},
    "any size": {"strict_img_size": False, "window_size": 3},
    "no qkv bias": {"qkv_bias": False},
    "one channel": {"in_chans": 1},
    "head size": {"head_dim": 4},
}


def family(name: str) -> nn.Module:
    """A model of `FAMILIES`, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return scramble(FAMILIES[name]())


def preprocessing_for(model: Any) -> Preprocessing:
    """What the tests feed a model: models that take any size get small images."""
    known = architecture_of(model).preprocessing(model)
    return known if max(known.size) < 224 else replace(known, size=(SIZE, SIZE))


def images_for(model: Any, batch: int = 2) -> Tensor:
    shape = (batch, *preprocessing_for(model).shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def last_bits(model: nn.Module) -> float:
    """How far an opened model may be from the original: not at all, save where torch's own attention, which some
    processors multiply in another order, is replaced by separate layers."""
    return 1e-5 if any(isinstance(module, nn.MultiheadAttention) for module in model.modules()) else 0.0


def assert_same(got: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
