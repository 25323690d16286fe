import pytest
import torch
from torch import nn

from aphq.engine.workspace import Workspace
from aphq.models.attention import exponentials, open_attentions
from aphq.models.student import enable, finalise
from aphq.quant.layers import QuantizedProduct, quantizers
from aphq.quant.quantizer import Quantizer
from aphq.recipe import Recipe, ScaleSearch
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.samples import Sample
from aphq.stages.scale_search import search_product, search_scales

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


@pytest.mark.parametrize("bits", [6, 4, 3])
def test_exponentials_lose_less_where_some_rows_are_peaked_and_some_are_even(bits: int) -> None:
    """One scale for their probabilities fits neither."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 2, 50, 50, generator=generator) * torch.linspace(0.2, 6, 50)[:, None]
    v = torch.randn(8, 2, 50, 16, generator=generator)
    errors = {}
    for divides in (False, True):
        product = QuantizedProduct(2)
        product.left, product.right = Quantizer(bits, False, (2, 1, 1)), Quantizer(8, False, (2, 1, 1))
        product.divides = divides
        samples = (Sample((2, 1, 1)), Sample((2, 1, 1)))
        for sample, x in zip(samples, (scores.softmax(-1), v), strict=True):
            sample.add(x, x)
        search_product(product, samples, ScaleSearch(rounds=1))
        enable(product)
        weights = exponentials(scores)
        given = (weights, v, weights.sum(-1, keepdim=True)) if divides else (scores.softmax(-1), v)
        errors[divides] = float((product(*given) - scores.softmax(-1) @ v).norm())
    torch.testing.assert_close(torch.stack(product.left.limits()).unique(), torch.tensor([0.0, 1.0]))
    assert errors[True] < 0.7 * errors[False]


@pytest.mark.parametrize("family", ["vit", "swin"])
@pytest.mark.parametrize("softmax", ["probabilities", "exponentials"])
def test_a_recipe_chooses_what_of_the_softmax_becomes_integers(
    request: pytest.FixtureRequest, family: str, softmax: str
) -> None:
    recipe = short("w6a6", "fast", activations__softmax=softmax)
    work = searched(request.getfixturevalue(family)(), recipe)
    for _, attention in open_attentions(work.student):
        assert attention.pv.divides == (softmax == "exponentials")
        assert not attention.qk.divides
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
