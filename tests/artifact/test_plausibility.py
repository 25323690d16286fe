"""What a description may ask for, given what its file holds."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from aphq.artifact import plausibility
from aphq.artifact.plausibility import (
    check_depth,
    check_derived,
    check_dtypes,
    check_finite,
    check_input,
    limited_modules,
)
from aphq.errors import ModelError

Build = Callable[..., nn.Module]


@pytest.mark.parametrize(
    "arguments",
    [
        {"depth": 11},
        {"depths": [2, 2, 7]},
        {"depths": [0] * 11},
        {"nested": {"num_hidden_layers": 11}},
        {"depth": 1e400},
    ],
)
def test_more_blocks_than_tensors_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="more blocks than there are tensors"):
        check_depth(arguments, 10)


@pytest.mark.parametrize("arguments", [{"depth": 10}, {"depths": [2, 2, 6]}, {"width": 11}, {"depth": None}, {}])
def test_as_many_blocks_as_tensors_pass(arguments: dict[str, Any]) -> None:
    check_depth(arguments, 10)


def test_modules_are_counted_while_they_are_built(vit: Build) -> None:
    with limited_modules(100):
        vit()
    with pytest.raises(ModelError, match="more modules than 1 tensors can belong to"), limited_modules(1):
        vit(depth=100)
    vit(depth=100)  # and not afterwards


def test_masks_and_indices_are_weighed(swin: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = swin(img_size=4096)
    with pytest.raises(ModelError, match="GB of masks and indices"):
        check_derived(swin_layout(100_000, swin), {})
    check_derived(model, {})
    monkeypatch.setattr(plausibility, "DERIVED_BYTES", 1)
    with pytest.raises(ModelError, match="masks and indices"):
        check_derived(model, {})
    check_derived(model, {"big": torch.empty(2**28, device="meta")})


def swin_layout(size: int, swin: Build) -> nn.Module:
    with torch.device("meta"):
        return swin(img_size=size)


def test_numbers_of_another_type_are_named(tiny_vit: nn.Module) -> None:
    state = dict(tiny_vit.state_dict())
    check_dtypes(tiny_vit, state)
    state["head.bias"] = state["head.bias"].half()
    with pytest.raises(ModelError, match=r"head.bias is stored as torch.float16 instead of torch.float32"):
        check_dtypes(tiny_vit, state)


def test_parameters_that_are_not_numbers_are_named(tiny_vit: nn.Module) -> None:
    check_finite(tiny_vit)
    tiny_vit.get_parameter("norm.bias")[0] = torch.inf
    with pytest.raises(ModelError, match=r"norm.bias holds NaN or infinite"):
        check_finite(tiny_vit)


def test_images_of_another_size_than_the_models(tiny_vit: nn.Module, vit: Build) -> None:
    check_input(tiny_vit, SimpleNamespace(size=(32, 32)))
    with pytest.raises(ModelError, match=r"takes images of \(32, 32\), its preprocessing makes \(64, 64\)"):
        check_input(tiny_vit, SimpleNamespace(size=(64, 64)))
    check_input(vit(dynamic_img_size=True), SimpleNamespace(size=(64, 64)))
