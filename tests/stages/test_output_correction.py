import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from aphq.engine.folder import RunFolder
from aphq.engine.workspace import Workspace
from aphq.models.student import enable, finalise
from aphq.quant.layers import QuantizedLayer
from aphq.recipe import OutputCorrection
from aphq.stages.output_correction import correct_outputs, moments
from aphq.stages.scale_search import search_scales

from ..runs import pixels, short, workspace


def searched(model: nn.Module, **changes: Any) -> Workspace:
    work = workspace(model, short("w6a6", "fast", **changes), pixels(32))
    search_scales(work, work.recipe.stage("scale_search"))  # type: ignore[arg-type]
    enable(work.student)
    return work


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_means_and_spreads_of_what_is_written_become_the_teachers(request: Any, family: str) -> None:
    work = searched(request.getfixturevalue(f"tiny_{family}"))
    before = copy.deepcopy(work.student)
    correct_outputs(work, OutputCorrection())
    for visit in work.walk():
        for name in visit.unit.writers:
            got, expected, spread, together = moments(work, visit, name)
            assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max())), name
            inside = ((together / spread) - 1).abs() < 1e-3  # the best factor is 1, unless the fit was cut off
            assert inside.float().mean() > 0.9, name
    codes = [
        [m.weight_quantizer.codes(m.weight) for m in model.modules() if isinstance(m, QuantizedLayer)]
        for model in (before, work.student)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*codes, strict=True)), "no weight is rounded anew"


def test_without_factors_the_scales_stay(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    before = copy.deepcopy(work.student)
    correct_outputs(work, OutputCorrection(factors=False))
    for name, parameter in work.student.named_parameters():
        moved = not torch.equal(parameter, before.get_parameter(name))
        assert moved == (name in {f"{w}.bias" for unit in work.units for w in unit.writers}), name


def test_one_scale_for_a_layer_takes_constants_alone(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, weights__granularity="tensor")
    before = copy.deepcopy(work.student)
    correct_outputs(work, OutputCorrection())
    name = "blocks.0.mlp.fc2"
    assert torch.equal(work.student.get_parameter(f"{name}.weight"), before.get_parameter(f"{name}.weight"))
    assert not torch.equal(work.student.get_parameter(f"{name}.bias"), before.get_parameter(f"{name}.bias"))


def test_a_float_model_needs_no_correction(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short("w3a3", "fast", overrides={"*": None}), pixels(16))
    correct_outputs(work, OutputCorrection())
    x = work.image_rows()[slice(None)]
    assert torch.allclose(work.student(x), work.teacher(x), atol=1e-5)


def test_a_run_that_goes_on_ends_alike(tiny_vit: nn.Module, tmp_path: Path) -> None:
    whole = searched(tiny_vit)
    correct_outputs(whole, OutputCorrection())
    stopped = searched(tiny_vit)
    stopped.folder = RunFolder(tmp_path)
    save, saved = stopped.save_unit, []

    def until_the_second(stage: str, unit: Any) -> None:
        save(stage, unit)
        saved.append(unit.name)
        if len(saved) == 2:
            raise KeyboardInterrupt

    stopped.save_unit = until_the_second  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        correct_outputs(stopped, OutputCorrection())
    again = searched(tiny_vit)
    again.folder = stopped.folder
    correct_outputs(again, OutputCorrection())
    again.folder.close()
    for work in (whole, again):
        finalise(work.student)
    x = whole.image_rows()[slice(None)]
    assert torch.equal(whole.student(x), again.student(x))
