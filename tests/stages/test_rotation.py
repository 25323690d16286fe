import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aphq
from aphq.models.architecture import architecture_of
from aphq.models.attention import open_attentions
from aphq.recipe import Rotation
from aphq.stages.rotation import (
    orthogonal_beside_ones,
    random_orthogonal,
    rotate,
    turn_heads,
    turn_stream,
)

from ..models.variants import SWINS, VITS, images_for
from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
FIXED = {"max pooling", "avgmax pooling", "map pooling", "no final norm", "pre norm", "norm in the embedding"}


@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_random_matrices_are_orthogonal_and_some_leave_the_ones_alone(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    free, beside = random_orthogonal(size, generator), orthogonal_beside_ones(size, generator)
    ones = torch.ones(size, dtype=torch.float64)
    for turn in (free, beside):
        assert torch.allclose(turn @ turn.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(beside @ ones, ones)
    if size > 2:
        assert (beside - torch.eye(size)).abs().max() > 0.1, "it turns something"


def turned(model: nn.Module, **kind: bool) -> nn.Module:
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    if kind.get("stream", True):
        for stream in architecture_of(model).streams(model):
            turn_stream(copied, stream, generator)
    if kind.get("heads", True):
        architecture_of(model).open_attention(copied)
        for _, attention in open_attentions(copied):
            turn_heads(attention, generator)
    return copied


def assert_same_function(model: nn.Module, other: nn.Module) -> None:
    x = images_for(model)
    expected = model(x)
    assert torch.allclose(other(x), expected, atol=2e-5 * float(expected.abs().max()) + 1e-5)


@pytest.mark.parametrize("name", VITS)
def test_a_turned_vit_computes_what_it_did(vit: Build, name: str) -> None:
    model = vit(**VITS[name])
    assert len(architecture_of(model).streams(model)) == (0 if name in FIXED else 1)
    assert_same_function(model, turned(model))


def test_a_turned_distilled_vit_computes_what_it_did(distilled: Build) -> None:
    model = distilled()
    assert_same_function(model, turned(model))


@pytest.mark.parametrize("name", SWINS)
def test_a_turned_swin_computes_what_it_did(swin: Build, name: str) -> None:
    model = swin(**SWINS[name])
    assert_same_function(model, turned(model))


def test_a_swin_is_turned_from_its_first_merging_on_unless_windows_are_padded(swin: Build) -> None:
    plain, padded = swin(**SWINS["three stages"]), swin(**SWINS["padded"])
    assert len(architecture_of(plain).streams(plain)) == 2
    assert architecture_of(padded).streams(padded) == ()


def test_every_weight_on_the_stream_changes_and_norms_become_plain(tiny_vit: nn.Module) -> None:
    other = turned(tiny_vit)
    for name, parameter in other.named_parameters():
        before = tiny_vit.get_parameter(name)
        if "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, float(name.endswith("weight"))))
        elif not name.endswith(("fc1.bias", "head.bias")):
            assert not torch.allclose(parameter, before), name


def test_an_outlying_channel_is_spread_over_all(vit: Build) -> None:
    model: Any = vit(embed_dim=64)
    model.blocks[0].mlp.fc2.weight.data[7] *= 50
    model.blocks[0].mlp.fc2.bias.data[7] = 100.0
    seen: dict[str, float] = {}

    def spread(name: str, model: Any) -> float:
        hook = model.blocks[1].norm1.register_forward_hook(
            lambda m, i, out: seen.update({name: float(out.abs().amax() / out.std())})
        )
        model(images_for(model))
        hook.remove()
        return seen[name]

    assert spread("turned", turned(model)) < 0.75 * spread("as it was", model)


def test_teacher_and_student_turn_together_and_again_alike(tiny_vit: nn.Module) -> None:
    recipe = short().including(Rotation())
    first, again = workspace(copy.deepcopy(tiny_vit), recipe), workspace(copy.deepcopy(tiny_vit), recipe)
    for work in (first, again):
        rotate(work, Rotation())
    x = all_images(first)
    unit = first.units[1]
    rows = first.units[0].bridge(first.teacher, first.units[0].run(first.teacher, x))
    assert torch.allclose(unit.run(first.student, rows), unit.run(first.teacher, rows), atol=1e-4)
    for mine, other in ((first.teacher, again.teacher), (first.student, again.student)):
        pairs = [(a, other.get_parameter(name)) for name, a in mine.named_parameters() if "quantizer" not in name]
        assert all(torch.equal(a, b) for a, b in pairs if a.isfinite().all())  # scales are NaN before the search


@pytest.mark.parametrize("kind", ["stream", "heads"])
def test_each_kind_can_be_left_out(kind: str, tiny_vit: nn.Module) -> None:
    work = workspace(copy.deepcopy(tiny_vit))
    rotate(work, Rotation(**{kind: False}))
    turned_stream = not torch.equal(work.student.get_parameter("pos_embed"), tiny_vit.get_parameter("pos_embed"))
    assert turned_stream == (kind == "heads")


def test_a_model_without_biases_is_saved_and_loaded_with_those_it_gained(vit: Build, tmp_path: Any) -> None:
    recipe = short("w8a8", "fast").including(Rotation())
    model = vit(**VITS["no biases"])
    made = aphq.quantize(model, recipe, pixels(), out=tmp_path / "run", device="cpu")
    x = all_images(workspace(model, recipe))
    assert torch.equal(aphq.load(tmp_path / "run")(x), made.model(x))
    assert (made.model(x) - model(x)).norm() < 0.2 * model(x).norm()
