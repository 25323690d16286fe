from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.models import architecture_of
from aphq.models.architecture import predict
from aphq.models.attention import LatentPool, OpenAttention, SwinAttention, VitAttention
from aphq.quant.quantizer import Quantizer

from .variants import SWINS, VITS, images_for

Build = Callable[..., nn.Module]


def opened(model: nn.Module) -> list[OpenAttention]:
    architecture_of(model).open_attention(model)
    return [module for module in model.modules() if isinstance(module, OpenAttention)]


def test_every_attention_is_opened_under_its_name(tiny_vit: Any, tiny_swin: Any, vit: Build) -> None:
    assert len(opened(tiny_vit)) == 2
    assert type(tiny_vit.blocks[1].attn) is VitAttention
    assert len(opened(tiny_swin)) == 4
    assert type(tiny_swin.layers[1].blocks[0].attn) is SwinAttention
    pooled: Any = vit(global_pool="map", class_token=False)
    assert len(opened(pooled)) == 3
    assert type(pooled.attn_pool) is LatentPool


def test_opening_twice_is_opening_once(tiny_vit: Any) -> None:
    first = opened(tiny_vit)
    assert opened(tiny_vit) == first


@pytest.mark.parametrize(("fused", "late"), [(False, False), (True, False), (True, True)])
def test_a_watched_attention_sees_its_operands_and_gives_the_same(variant: Any, fused: bool, late: bool) -> None:
    """Watching makes the products be computed as they stand, on probabilities or on exponentials whose sum divides the
    product; only the order of roundings differs."""
    images = images_for(variant)
    before = predict(variant, images)
    seen: dict[str, tuple[Tensor, ...]] = {}
    attentions = opened(variant)
    for module in attentions:
        module.fused, module.pv.divides = fused, late and module.averages
    for name, module in variant.named_modules():
        if name.endswith((".qk", ".pv")):
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.__setitem__(name, inputs))
    torch.testing.assert_close(predict(variant, images), before, rtol=1e-3, atol=1e-4)
    assert len(seen) == 2 * len(attentions)
    for name, (left, right, *total) in seen.items():
        assert left.shape[1] == right.shape[1] == variant.get_submodule(name).heads
        if name.endswith(".pv") and variant.get_submodule(name.removesuffix(".pv")).averages:
            sums = left.sum(-1, keepdim=True)
            torch.testing.assert_close(sums, total[0] if late else torch.ones_like(sums))
            assert not late or bool((left.amax(-1) == 1).all())


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_without_the_fused_kernel_the_original_is_matched_too(family: str, vit: Build, swin: Build) -> None:
    model: Any = vit(**VITS["qk norm"]) if family == "vit" else swin(**SWINS["padded"])
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    images = images_for(model)
    before = model(images)
    assert not any(module.fused for module in opened(model))
    assert torch.equal(model(images), before)


def test_a_quantized_product_changes_the_output(tiny_vit: Any, images: Tensor) -> None:
    before = tiny_vit(images)
    product = opened(tiny_vit)[0].pv
    product.left = Quantizer(2, False, (2, 1, 1))
    product.left.set_range(torch.zeros(2), torch.ones(2))
    assert torch.equal(tiny_vit(images), before), "disabled"
    product.left.enabled = True
    with torch.no_grad():
        assert not torch.allclose(tiny_vit(images), before)


def test_a_mask_is_added_to_the_scores(tiny_vit: Any) -> None:
    x = torch.randn(2, 5, 32)
    mask = torch.zeros(5, 5)
    mask[:, 3:] = -torch.inf
    wanted = tiny_vit.blocks[0].attn(x, attn_mask=mask)
    opened(tiny_vit)
    assert torch.equal(tiny_vit.blocks[0].attn(x, attn_mask=mask), wanted)
