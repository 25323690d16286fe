import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.models.distillation import LOGITS
from aphq.models.student import enable
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer
from aphq.recipe import JointTuning, Views
from aphq.stages.joint_tuning import outputs, relative_error, tune_jointly
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace

AS_THEY_ARE = Views(every=0)


def searched(model: nn.Module, bits: str = "w4a4", **changes: Any) -> Any:
    """A workspace whose student has scales and nothing learned."""
    work = workspace(copy.deepcopy(model), short(bits, "fast", **changes), pixels(16))
    reparameterise_norms(work, work.recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]
    search_scales(work, work.recipe.stage("scale_search"))  # type: ignore[arg-type]
    enable(work.student)
    return work


def divergence(work: Any, x: Tensor) -> float:
    with torch.no_grad():
        return float(LOGITS.loss(work.student(x), work.teacher(x)))


def assert_on_grid(work: Any) -> None:
    for module in work.student.modules():
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None:
            assert module.rounding is None
            assert torch.allclose(module.weight_quantizer(module.weight), module.weight)


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
@pytest.mark.parametrize("weight_lr", [0.0, 0.02])
def test_the_network_comes_closer_to_its_teacher(family: str, weight_lr: float, request: pytest.FixtureRequest) -> None:
    work = searched(request.getfixturevalue(family), "w3a3")
    x = all_images(work)
    before = divergence(work, x)
    tune_jointly(
        work, JointTuning(steps=80, batch=8, scale_lr=1e-2, float_lr=3e-3, weight_lr=weight_lr, views=AS_THEY_ARE)
    )
    assert divergence(work, x) < 0.8 * before


def test_weights_without_a_rate_stay_where_they_are(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    layer: Any = work.student.get_submodule("blocks.0.attn.qkv")
    before = layer.weight_quantizer(layer.weight)
    tune_jointly(work, JointTuning(steps=10, batch=8, scale_lr=0.1, views=AS_THEY_ARE))
    assert torch.equal(layer.weight, before)


def test_what_is_left_alone_stays_as_it_was(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    before = copy.deepcopy(work.student)
    tune_jointly(work, JointTuning(steps=3, batch=8, scale_lr=0.01, float_lr=0.0, views=AS_THEY_ARE))
    for name, module in work.student.named_modules():
        old: Any = before.get_submodule(name)
        if isinstance(module, QuantizedLayer):
            assert torch.equal(module.bias, old.bias), name
        if isinstance(module, nn.LayerNorm):
            assert torch.equal(module.weight, old.weight), name
        if isinstance(module, Quantizer):
            assert torch.equal(module.scale, old.scale) == name.endswith("weight_quantizer"), name


def test_afterwards_every_weight_is_on_its_grid_and_nothing_learns(tiny_swin: nn.Module) -> None:
    work = searched(tiny_swin)
    tune_jointly(work, JointTuning(steps=4, batch=8, weight_lr=0.05, views=Views(every=2, mixup=0.5)))
    assert_on_grid(work)
    assert not any(p.requires_grad for p in work.student.parameters())


def test_fresh_views_are_drawn_as_often_as_asked(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    work = searched(tiny_vit)
    drawn: list[tuple[str, ...]] = []
    views = type(work).views

    def noting(self: Any, config: Views, *purpose: str, **options: Any) -> Any:
        drawn.append(purpose)
        return views(self, config, *purpose, **options)

    monkeypatch.setattr(type(work), "views", noting)
    tune_jointly(work, JointTuning(steps=7, batch=8, views=Views(every=3)))
    assert [purpose[-1] for purpose in drawn] == ["0", "3", "6"]


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_the_outputs_are_those_of_the_units_and_end_with_the_logits(
    family: str, request: pytest.FixtureRequest
) -> None:
    work = workspace(request.getfixturevalue(family))
    x = all_images(work)
    found = outputs(work, work.teacher, x)
    assert len(found) == len(work.units)
    assert torch.allclose(found[-1], work.teacher(x), atol=1e-5)


def test_an_error_as_large_as_the_variation_is_one() -> None:
    x = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    assert float(relative_error(x, x)) == 0
    assert float(relative_error(torch.full_like(x, float(x.mean())), x)) == pytest.approx(1, rel=0.01)
    assert torch.isfinite(relative_error(x, torch.ones_like(x)))


def happened(work: Any) -> list[dict[str, Any]]:
    """What the stage is going to tell of the whole network."""
    told: list[dict[str, Any]] = []
    work.folder.event = lambda _, **data: told.append(data)
    return told


@pytest.mark.parametrize("weight_lr", [0.0, 0.05])
@pytest.mark.parametrize("float_lr", [10.0, float("nan")])
def test_what_takes_the_calibration_images_further_from_the_teacher_is_put_back(
    weight_lr: float, float_lr: float, tiny_vit: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    work = searched(tiny_vit)
    told = happened(work)
    x = all_images(work)
    before, state = divergence(work, x), copy.deepcopy(work.student.state_dict())
    tune_jointly(
        work, JointTuning(steps=5, batch=8, scale_lr=1e-9, float_lr=float_lr, weight_lr=weight_lr, views=AS_THEY_ARE)
    )
    assert [event["put_back"] for event in told] == [True]
    assert "put back" in caplog.text
    assert divergence(work, x) == pytest.approx(before, rel=1e-4)
    for name, tensor in work.student.state_dict().items():
        if name.endswith(("bias", "norm1.weight", "scale")):
            assert torch.equal(tensor, state[name]), name
    assert_on_grid(work)


def test_how_far_it_came_is_written_down(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit, "w3a3")
    told = happened(work)
    tune_jointly(work, JointTuning(steps=40, batch=8, scale_lr=1e-2, float_lr=3e-3, views=AS_THEY_ARE))
    (event,) = told
    assert event["divergence_after"] < event["divergence_before"]
    assert not event["put_back"]
    assert event["divergence_after"] == pytest.approx(divergence(work, all_images(work)), rel=1e-3)


def test_nothing_learned_is_nothing_to_judge(tiny_vit: nn.Module) -> None:
    work = searched(tiny_vit)
    told = happened(work)
    tune_jointly(work, JointTuning(steps=0, views=AS_THEY_ARE))
    assert not told
