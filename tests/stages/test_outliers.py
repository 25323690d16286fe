"""One channel of a few tokens two hundred times larger than the rest, behind a LayerNorm that divides it away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aphq.engine.workspace import Workspace
from aphq.recipe import Recipe
from aphq.stages.distillation import distillation_loss
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
SITE = "blocks.0.mlp.fc2"


@pytest.fixture
def planted(vit: Build) -> nn.Module:
    """One hidden unit of the first MLP that fires hugely for a few tokens and goes to one channel only."""
    model: Any = vit(depth=2)
    fc1, fc2 = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    with torch.no_grad():
        fc1.weight[0] *= 1000
        fc1.bias[0] = -1500.0
        fc2.weight[:, 0] = 0
        fc2.weight[5, 0] = 1.0
    return model


def searched(model: nn.Module, candidates: int, **changes: Any) -> Workspace:
    recipe: Recipe = short("w8a4", "fast", scale_search__outlier_candidates=candidates, **changes)
    work = workspace(model, recipe.without("layernorm_reparameterisation"), pixels(24))
    search_scales(work, work.recipe.stage("scale_search"))  # type: ignore[arg-type]
    return work


def loss_with_only(work: Workspace, site: str) -> tuple[float, float]:
    """(KL at the logits with this one input quantized, the top of its range)."""
    quantizer: Any = work.student.get_submodule(f"{site}.input_quantizer")
    quantizer.enabled = True
    x = all_images(work)
    with torch.no_grad():
        return float(distillation_loss(work.student(x), work.teacher(x))), float(quantizer.limits()[1])


def test_outliers_are_clipped_where_the_prediction_gains(planted: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aphq")
    plain, clipped = searched(planted, 0), searched(planted, 16)
    (loss, top), (better, lower_top) = (loss_with_only(work, SITE) for work in (plain, clipped))
    assert lower_top < 0.5 * top
    assert better < 0.8 * loss
    assert "blocks.0: outliers up to" in caplog.text


def test_inputs_without_outliers_are_searched_as_ever(tiny_vit: nn.Module) -> None:
    plain, with_search = searched(tiny_vit, 0), searched(tiny_vit, 16)
    left, right = plain.student.state_dict(), with_search.student.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_only_the_output_search_asks_the_prediction(planted: nn.Module) -> None:
    tops = [loss_with_only(searched(planted, count, scale_search__method="minmax"), SITE)[1] for count in (0, 16)]
    assert tops[0] == tops[1]
