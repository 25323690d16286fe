"""From a float model to the student: the same model with every product ready to be quantized."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from aphq.errors import RecipeError
from aphq.models.architecture import Architecture, Mlp, Unit, replace_module
from aphq.models.attention import open_attentions
from aphq.quant.layers import (
    QuantizedConv2d,
    QuantizedConvTranspose2d,
    QuantizedLayer,
    QuantizedLinear,
    QuantizedProduct,
    quantized_sites,
    quantizers,
)
from aphq.quant.quantizer import Quantizer
from aphq.recipe import Activations, Recipe
from aphq.typed import nearest

LAYERS: dict[type, Any] = {
    nn.Linear: QuantizedLinear,
    nn.Conv2d: QuantizedConv2d,
    nn.ConvTranspose2d: QuantizedConvTranspose2d,
}
SOFTMAX_PRODUCT = ".pv"  # what `OpenAttention` calls softmax times v


def opened_copy(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The teacher: a float32 copy in eval mode; its attention is open, so its modules are named as the student's."""
    teacher = copy.deepcopy(model).float().eval().requires_grad_(False)
    architecture.open_attention(teacher)
    return teacher


def built_again(architecture: Architecture, arguments: dict[str, Any]) -> nn.Module:
    """An untrained model of a description, with its attention open."""
    with torch.random.fork_rng(devices=[]):  # building draws initial weights; that is nobody else's business
        model = architecture.build(arguments)
    architecture.open_attention(model)
    return model


def make_student(model: nn.Module, architecture: Architecture, units: Sequence[Unit], recipe: Recipe) -> nn.Module:
    """A copy of `model` whose linear layers, convolutions and attention products hold the recipe's quantizers.

    Quantizers start disabled and without scales: the student still computes exactly what the model does.
    """
    student = copy.deepcopy(model)
    architecture.open_attention(student)
    equip(student, units, recipe)
    return student.requires_grad_(False).eval()


def equip(student: nn.Module, units: Sequence[Unit], recipe: Recipe) -> None:
    """Give a model whose attention is open the recipe's quantizers, in place."""
    image_modules = next((unit.modules for unit in units if unit.kind == "patch_embed"), ())
    for name, module in list(student.named_modules()):
        sees_image = any(f"{name}.".startswith(f"{prefix}.") for prefix in image_modules)
        if type(module) in LAYERS:
            replace_module(student, name, _quantized_layer(module, name, recipe, sees_image))
        elif isinstance(module, QuantizedProduct):
            _, bits = recipe.bits_for(name)
            shape = (module.heads, 1, 1) if recipe.activations.attention == "head" else (1,)
            if bits is not None:
                module.left, module.right = _operands(recipe.activations, name, bits, shape)
    for _, attention in open_attentions(student):
        late = recipe.activations.softmax == "exponentials" and attention.averages
        attention.pv.divides = late and attention.pv.left is not None
    _check_patterns(student, recipe)


def _operands(settings: Activations, name: str, bits: int, shape: tuple[int, ...]) -> tuple[Quantizer, Quantizer]:
    """Of an attention product; the softmax is the left operand of the second one."""
    plain = settings.symmetric or settings.attention_symmetric
    left = settings.symmetric if name.endswith(SOFTMAX_PRODUCT) else plain  # half its codes would never be used
    return Quantizer(bits, left, shape), Quantizer(bits, plain, shape)


def _quantized_layer(module: Any, name: str, recipe: Recipe, sees_image: bool) -> QuantizedLayer:
    weight_bits, input_bits = recipe.bits_for(name, sees_image=sees_image)
    layer = LAYERS[type(module)]
    shape = [1] * module.weight.ndim
    if recipe.weights.granularity == "channel":
        shape[layer.out_dim] = module.weight.shape[layer.out_dim]
    weights = None if weight_bits is None else Quantizer(weight_bits, recipe.weights.symmetric, tuple(shape))
    inputs = None if input_bits is None else Quantizer(input_bits, recipe.activations.symmetric, (1,))
    return layer(module, weights, inputs)


def _check_patterns(student: nn.Module, recipe: Recipe) -> None:
    names = [name for name, _ in quantized_sites(student)]
    for pattern in recipe.overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                f"recipe: the pattern {pattern!r} in overrides matches no layer: {nearest(pattern, names)}"
            )


def swap_activation(model: nn.Module, mlp: Mlp) -> None:
    """The MLP uses ReLU from here on."""
    replace_module(model, mlp.act, nn.ReLU())


def enable(module: nn.Module, on: bool = True) -> None:
    """Switch every quantizer below `module`."""
    for quantizer in quantizers(module):
        quantizer.enabled = on


def finalise(student: nn.Module) -> None:
    """Weights onto the integer grid, every quantizer on: the quantized model."""
    for module in student.modules():
        if isinstance(module, QuantizedLayer):
            module.bake()
    enable(student)
