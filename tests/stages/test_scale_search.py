import pytest
import torch
from torch import nn

from aphq.engine.workspace import Workspace
from aphq.models.student import finalise
from aphq.quant.layers import quantizers
from aphq.recipe import Recipe
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace


def searched(model: nn.Module, recipe: Recipe, images: int = 16) -> Workspace:
    work = workspace(model, recipe, pixels(images))
    norms = recipe.stage("layernorm_reparameterisation")
    if norms is not None:
        reparameterise_norms(work, norms)  # type: ignore[arg-type]
    search_scales(work, recipe.stage("scale_search"))  # type: ignore[arg-type]
    return work


def error(work: Workspace) -> float:
    """Of the quantized student's logits, relative."""
    finalise(work.student)
    with torch.no_grad():
        x = all_images(work)
        expected = work.teacher(x)
        return float((work.student(x) - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["vit", "distilled", "swin"])
def test_more_bits_are_better(request: pytest.FixtureRequest, family: str) -> None:
    build = request.getfixturevalue(family)
    errors = [error(searched(build(), short(bits, "fast"))) for bits in ("w8a8", "w6a6", "w4a4")]
    assert errors[0] < 0.6 * errors[1]
    assert errors[1] < 0.6 * errors[2]
    assert errors[0] < 0.1


@pytest.mark.parametrize("method", ["minmax", "percentile", "self_mse", "output_mse"])
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_every_method_sets_every_quantizer(request: pytest.FixtureRequest, family: str, method: str) -> None:
    work = searched(request.getfixturevalue(family)(), short("w6a6", "fast", scale_search__method=method))
    for quantizer in quantizers(work.student):
        assert quantizer.calibrated
        assert (quantizer.scale > 0).all()
        assert (quantizer.zero_point == quantizer.zero_point.round()).all()
        assert (quantizer.zero_point >= 0).all()
        assert (quantizer.zero_point < 2**quantizer.bits).all()
        assert not quantizer.enabled, "the student is still a float model"
    x = all_images(work)
    expected = work.teacher(x)
    assert torch.allclose(work.student(x), expected, rtol=1e-3, atol=1e-3)
    assert error(work) < 0.6


def test_searching_pays_at_few_bits(tiny_vit: nn.Module) -> None:
    plain = error(searched(tiny_vit, short("w4a4", "fast", scale_search__method="minmax")))
    best = error(searched(tiny_vit, short("w4a4", "fast", scale_search__candidates=32)))
    assert best < plain


def test_minmax_spans_exactly_what_was_seen(tiny_vit: nn.Module) -> None:
    recipe = short("w8a8", "fast", scale_search__method="minmax").without("layernorm_reparameterisation")
    work = searched(tiny_vit, recipe)
    x = all_images(work)
    lower, upper = work.student.get_submodule("patch_embed.proj.input_quantizer").limits()  # type: ignore[operator]
    step = (upper - lower) / 255
    assert (lower - x.min()).abs() <= step
    assert (upper - x.max()).abs() <= step


def test_eight_bits_predict_what_float_predicts(vit: object, swin: object) -> None:
    for build in (vit, swin):
        work = searched(build(), short("w8a8", "fast"), images=64)  # type: ignore[operator]
        finalise(work.student)
        x = all_images(work)
        agreement = (work.student(x).argmax(1) == work.teacher(x).argmax(1)).float().mean()
        assert agreement > 0.95
