from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.errors import RecipeError
from aphq.models import architecture_of
from aphq.models.architecture import mlps_of, predict
from aphq.models.student import enable, finalise, make_student, swap_activation
from aphq.presets import preset
from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, QuantizedLinear, QuantizedProduct, quantizers
from aphq.recipe import Activations, Override, Recipe, Weights

from .variants import assert_same, images_for, last_bits

Build = Callable[..., nn.Module]


def student_of(model: nn.Module, recipe: Recipe | None = None) -> Any:
    architecture = architecture_of(model)
    return make_student(model, architecture, architecture.units(model), recipe or Recipe())


def calibrate(student: nn.Module, reach: float = 4.0) -> None:
    for quantizer in quantizers(student):
        quantizer.set_range(torch.full(quantizer.scale.shape, -reach), torch.full(quantizer.scale.shape, reach))


def test_a_fresh_student_is_the_model_bit_by_bit(variant: Any) -> None:
    images = images_for(variant)
    expected, tolerance = predict(variant, images), last_bits(variant)
    architecture_of(variant).open_attention(variant)
    before = {name: tensor.clone() for name, tensor in variant.state_dict().items()}
    student = student_of(variant)
    assert_same(predict(student, images), expected, tolerance)
    assert not student.training
    assert not any(parameter.requires_grad for parameter in student.parameters())
    assert list(variant.state_dict()) == list(before), "the model itself stays as it was"
    assert set(before) <= set(student.state_dict()), "and every tensor keeps its name"


def test_no_plain_layer_is_left(variant: Any) -> None:
    student = student_of(variant)
    assert not [n for n, m in student.named_modules() if type(m) in (nn.Linear, nn.Conv2d)]
    assert all(not q.calibrated and not q.enabled for q in quantizers(student))


def test_the_recipe_decides_bits_and_granularity(tiny_vit: Any) -> None:
    recipe = Recipe(
        weights=Weights(bits=3, symmetric=True),
        activations=Activations(bits=5),
        overrides={"head": None, "*.fc2": Override(activations=8), "blocks.1.attn.pv": Override(activations=None)},
    )
    student = student_of(tiny_vit, recipe)
    proj = student.patch_embed.proj
    assert type(proj) is QuantizedConv2d
    assert proj.weight_quantizer.scale.shape == (32, 1, 1, 1)
    assert (proj.weight_quantizer.bits, proj.weight_quantizer.symmetric) == (3, True)
    assert proj.input_quantizer.bits == 8, "the image has 8 bits"
    qkv = student.blocks[0].attn.qkv
    assert type(qkv) is QuantizedLinear
    assert (qkv.input_quantizer.bits, qkv.input_quantizer.symmetric) == (5, False)
    assert qkv.input_quantizer.scale.shape == (1,)
    assert student.blocks[0].mlp.fc2.input_quantizer.bits == 8
    assert student.blocks[0].mlp.fc2.weight_quantizer.bits == 3
    assert student.head.weight_quantizer is None
    assert student.head.input_quantizer is None
    assert student.blocks[0].attn.pv.left.scale.shape == (2, 1, 1)
    assert student.blocks[1].attn.pv.left is None
    assert student.blocks[1].attn.pv.right is None


def test_scales_per_tensor(tiny_vit: Any) -> None:
    student = student_of(
        tiny_vit, Recipe(weights=Weights(granularity="tensor"), activations=Activations(attention="tensor"))
    )
    assert all(q.scale.numel() == 1 for q in quantizers(student))
    calibrate(student)
    finalise(student)
    assert torch.isfinite(student(torch.randn(1, 3, 32, 32))).all()


def test_a_pattern_that_matches_nothing_is_refused(tiny_vit: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"'blocks.0.mlp.fc3' in overrides matches no layer: did you mean 'blocks.0.mlp.fc"
    ):
        student_of(tiny_vit, Recipe(overrides={"blocks.0.mlp.fc3": None}))


def test_finalising_puts_every_weight_on_its_grid(tiny_swin: Any, images: Tensor) -> None:
    student = student_of(tiny_swin)
    calibrate(student, 1.0)
    enable(student)
    with torch.no_grad():
        before = student(images)
        finalise(student)
        assert torch.equal(student(images), before)
    for module in student.modules():
        if isinstance(module, QuantizedLayer):
            quantizer = module.weight_quantizer
            on_grid = (quantizer.codes(module.weight) - quantizer.zero_point) * quantizer.scale
            assert torch.equal(module.weight, on_grid)


def test_enabling_switches_below_a_module_only(tiny_vit: Any) -> None:
    student = student_of(tiny_vit)
    enable(student.blocks[0])
    assert all(q.enabled for q in quantizers(student.blocks[0]))
    assert not any(q.enabled for q in quantizers(student.blocks[1]))
    enable(student, False)
    assert not any(q.enabled for q in quantizers(student))


def test_swapping_the_activation_touches_one_mlp(tiny_vit: Any) -> None:
    student = student_of(tiny_vit)
    units = architecture_of(tiny_vit).units(tiny_vit)
    swap_activation(student, mlps_of(units)["blocks.1.mlp"])
    assert type(student.blocks[1].mlp.act) is nn.ReLU
    assert type(student.blocks[0].mlp.act) is nn.GELU


def test_float_recipes_give_a_student_without_quantizers(tiny_vit: Any, images: Tensor) -> None:
    student = student_of(tiny_vit, Recipe(weights=Weights(bits=None), activations=Activations(bits=None)))
    assert not list(quantizers(student))
    assert any(isinstance(m, QuantizedProduct) for m in student.modules())
    finalise(student)
    assert torch.equal(student(images), tiny_vit(images))


def test_symmetric_attention_leaves_the_softmax_alone(tiny_vit: nn.Module) -> None:
    architecture = architecture_of(tiny_vit)
    student = make_student(tiny_vit, architecture, architecture.units(tiny_vit), preset("w8a8"))
    attention: Any = student.get_submodule("blocks.0.attn")
    operands = (attention.qk.left, attention.qk.right, attention.pv.left, attention.pv.right)
    assert [operand.symmetric for operand in operands] == [True, True, False, True]
    assert not attention.proj.input_quantizer.symmetric
