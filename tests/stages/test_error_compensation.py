import copy
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.errors import RecipeError
from aphq.models.student import finalise
from aphq.quant.layers import QuantizedLayer
from aphq.recipe import ErrorCompensation
from aphq.stages.error_compensation import compensate_errors

from ..runs import all_images, pixels, short
from .test_joint_tuning import searched

CONFIG = ErrorCompensation(images=16, tokens=1024)


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_the_quantized_model_comes_closer_to_its_teacher(family: str, request: pytest.FixtureRequest) -> None:
    work = searched(request.getfixturevalue(family), "w3a8")
    nearest = copy.deepcopy(work.student)
    finalise(nearest)
    compensate_errors(work, CONFIG)
    finalise(work.student)
    x = all_images(work)
    expected = work.teacher(x)
    assert (work.student(x) - expected).norm() < 0.9 * (nearest(x) - expected).norm()


def test_weights_are_on_their_grid_and_layers_in_float_are_left_alone(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, overrides={"blocks.1.mlp.fc1": {"weights": None}})
    before = copy.deepcopy(work.student)
    compensate_errors(work, CONFIG)
    for name, layer in work.student.named_modules():
        old: Any = before.get_submodule(name)
        if isinstance(layer, QuantizedLayer) and layer.weight_quantizer is None:
            assert torch.equal(layer.weight, old.weight)
            assert torch.equal(layer.bias, old.bias)
        elif isinstance(layer, QuantizedLayer):
            assert torch.allclose(layer.weight_quantizer(layer.weight), layer.weight, atol=1e-6)
            assert not torch.equal(layer.weight, old.weight)


def test_one_of_the_two_that_round_is_enough() -> None:
    with pytest.raises(RecipeError, match="error_compensation and block_reconstruction both round"):
        short(effort="balanced").including(CONFIG)


def test_it_is_part_of_a_run(tiny_vit: nn.Module, tmp_path: Any) -> None:
    recipe = short("w4a8", "fast").including(CONFIG)
    run = aphq.quantize(tiny_vit, recipe, pixels(), out=tmp_path / "run", device="cpu")
    assert "error_compensation" in run.seconds
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(aphq.load(tmp_path / "run")(x), run.model(x))
