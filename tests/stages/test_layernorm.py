from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.engine.hooks import watch_inputs
from aphq.engine.workspace import Workspace
from aphq.stages.layernorm import LARGEST_RATIO, ratio_and_shift, reparameterise_norms

from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
NO_VALUES: dict[str, Any] = {"layernorm_reparameterisation__values": False}  # they have biases of their own to change


def reparameterise(work: Workspace) -> None:
    reparameterise_norms(work, work.recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]


def inputs_of(work: Workspace) -> dict[str, Tensor]:
    """What each layer behind a LayerNorm gets from the student, [tokens, channels]."""
    layers = {pair.linear: work.student.get_submodule(pair.linear) for unit in work.units for pair in unit.norms}
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), watch_inputs(layers, lambda name, x: seen.update({name: x[0].flatten(0, -2)})):
        work.student(all_images(work))
    return seen


def unevenness(x: Tensor) -> float:
    """The widest channel over the narrowest."""
    spans = x.amax(0) - x.amin(0)
    return float(spans.max() / spans.min())


@pytest.mark.parametrize("bits", ["w4a4", "w4a8", "w8a4"])
@pytest.mark.parametrize(
    ("family", "arguments"),
    [("vit", {}), ("vit", {"qkv_bias": False}), ("distilled", {}), ("swin", {}), ("swin", {"window_size": 3})],
)
def test_the_float_function_stays_and_the_channels_become_alike(
    request: pytest.FixtureRequest, family: str, arguments: dict[str, Any], bits: str
) -> None:
    work = workspace(request.getfixturevalue(family)(**arguments), short(bits, "fast"))
    x = all_images(work)
    before = inputs_of(work)
    expected = work.teacher(x)
    reparameterise(work)
    assert torch.allclose(work.student(x), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(work.teacher(x), expected), "the teacher keeps its norms"
    after = inputs_of(work)
    assert before.keys() == after.keys()
    for name in before:
        if not arguments.get("window_size"):  # among padding zeros the spans mean little
            assert unevenness(after[name]) < 0.5 * unevenness(before[name]), name


def test_a_reduction_without_a_bias_gains_one(tiny_swin: nn.Module) -> None:
    work = workspace(tiny_swin)
    reparameterise(work)
    reduction: Any = work.student.get_submodule("layers.1.downsample.reduction")
    assert reduction.bias is not None
    assert reduction.bias.abs().max() > 0
    assert not reduction.bias.requires_grad


def test_behind_zero_padding_channels_are_scaled_but_not_shifted(swin: Build) -> None:
    work = workspace(swin(window_size=3, qkv_bias=False), short(**NO_VALUES))
    reparameterise(work)
    for unit in work.units:
        for pair in unit.norms:
            layer: Any = work.student.get_submodule(pair.linear)
            if not pair.may_shift:
                assert layer.bias is None


def test_symmetric_inputs_are_not_shifted(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short("w4a4", "fast", activations__symmetric=True, **NO_VALUES))
    reparameterise(work)
    for unit in work.units:
        for pair in unit.norms:
            layer, old = (model.get_submodule(pair.linear) for model in (work.student, work.teacher))
            assert torch.equal(layer.bias, old.bias)  # type: ignore[arg-type]
    x = all_images(work)
    assert torch.allclose(work.student(x), work.teacher(x), rtol=1e-3, atol=1e-3)


def test_a_layer_with_float_inputs_is_left_alone(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, short("w4a4", "fast", overrides={"blocks.0.attn.qkv": None}))
    reparameterise(work)
    norms = [work.student.get_parameter(f"blocks.{i}.norm1.weight") for i in (0, 1)]
    assert torch.equal(norms[0], work.teacher.get_parameter("blocks.0.norm1.weight"))
    assert not torch.equal(norms[1], work.teacher.get_parameter("blocks.1.norm1.weight"))


def test_ratio_and_shift_bring_every_channel_to_the_mean_format() -> None:
    scales, zero_points = torch.tensor([0.1, 0.3, 0.2]), torch.tensor([8.0, 2.0, 5.0])
    ratio, shift = ratio_and_shift(scales, zero_points)
    lower = -zero_points * scales / ratio - shift  # where each channel's range begins after the change
    assert torch.allclose(lower, torch.full((3,), -5 * 0.2))
    assert torch.allclose(scales / ratio, torch.full((3,), 0.2))


def test_a_dead_channel_does_not_blow_up(vit: Build) -> None:
    model = vit()
    with torch.no_grad():
        model.get_parameter("blocks.0.norm1.weight")[3] = 0
        model.get_parameter("blocks.0.norm1.bias")[3] = 0
    work = workspace(model, images=pixels(8))
    x = all_images(work)
    reparameterise(work)
    new, old = (m.get_parameter("blocks.0.norm1.weight") for m in (work.student, work.teacher))
    assert torch.isfinite(new).all()
    assert (new.abs() <= old.abs() * LARGEST_RATIO * 1.001).all()
    assert torch.allclose(work.student(x), work.teacher(x), rtol=1e-3, atol=1e-3)
