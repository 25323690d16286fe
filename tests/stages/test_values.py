from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aphq
from aphq.engine.hooks import watch_inputs
from aphq.engine.workspace import Workspace
from aphq.models.attention import OpenAttention
from aphq.recipe import Override
from aphq.stages.layernorm import reparameterise_norms
from aphq.stages.values import LARGEST_RATIO

from ..models.variants import images_for
from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
LAYERS = ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias")


def reparameterised(model: nn.Module, values: bool = True, **changes: Any) -> Workspace:
    work = workspace(model, short("w4a4", "fast", layernorm_reparameterisation__values=values, **changes))
    reparameterise_norms(work, work.recipe.stage("layernorm_reparameterisation"))  # type: ignore[arg-type]
    return work


def attentions(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, OpenAttention)}


def seen_by(work: Workspace, child: str) -> dict[str, Tensor]:
    """The input of a child of every attention, [tokens, channels]; of `pv` that is the values."""
    modules = {name: attention.get_submodule(child) for name, attention in attentions(work.student).items()}
    seen: dict[str, Tensor] = {}
    with torch.no_grad(), watch_inputs(modules, lambda name, inputs: seen.update({name: inputs[child == "pv"]})):
        work.student(all_images(work))
    return {name: (x.transpose(1, 2).flatten(2) if x.ndim == 4 else x).flatten(0, -2) for name, x in seen.items()}


def unevenness(x: Tensor) -> float:
    """The widest channel over the narrowest."""
    spans = x.amax(0) - x.amin(0)
    return float(spans.max() / spans.min())


def same_function(work: Workspace) -> bool:
    with torch.no_grad():
        x = all_images(work)
        expected = work.teacher(x)
        return bool((work.student(x) - expected).abs().max() < 1e-4 * expected.abs().max())


def state(work: Workspace) -> dict[str, Tensor]:
    return {name: tensor.nan_to_num() for name, tensor in work.student.state_dict().items()}


def differing(left: Workspace, right: Workspace) -> set[str]:
    """Names of the tensors of two students that are not equal, or that only one of them has."""
    ours, theirs = state(left), state(right)
    both = ours.keys() & theirs.keys()
    return (ours.keys() ^ theirs.keys()) | {name for name in both if not torch.equal(ours[name], theirs[name])}


def planted(model: nn.Module) -> nn.Module:
    """Some channels of the values thirty times wider than others, and far from zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("qkv.weight"):
            rows = parameter.data[-len(parameter) // 3 :]
            rows *= torch.logspace(0, 1.5, len(rows))[torch.randperm(len(rows), generator=generator), None]
        elif name.endswith("qkv.bias"):
            parameter.data[-len(parameter) // 3 :] += 3
    return model


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("vit", {}),
    ("vit", {"num_heads": 1}),
    ("vit", {"num_heads": 4}),
    ("vit", {"qkv_bias": False}),
    ("vit", {"qkv_bias": False, "proj_bias": False}),
    ("vit", {"qk_norm": True}),
    ("swin", {}),
    ("swin", {"qkv_bias": False, "num_heads": (1, 4)}),
    ("swin", {"window_size": 3}),
]


@pytest.mark.parametrize(("family", "arguments"), MODELS)
@pytest.mark.parametrize("attention", ["head", "tensor"])
def test_in_float_nothing_changes_and_the_values_become_even_and_centred(
    request: pytest.FixtureRequest, family: str, arguments: dict[str, Any], attention: str
) -> None:
    model = planted(request.getfixturevalue(family)(**arguments))
    before = reparameterised(model, values=False)
    after = reparameterised(model, activations__attention=attention)
    assert same_function(after)
    old, new = seen_by(before, "pv"), seen_by(after, "pv")
    for name, values in new.items():
        assert unevenness(old[name]) > 10
        assert unevenness(values) < 3, name
    old, new = seen_by(before, "proj"), seen_by(after, "proj")
    for name, mixed in new.items():
        assert old[name].mean(0).abs().max() > 0.1 * old[name].std(0).max()
        assert (mixed.mean(0).abs() < 1e-4 * mixed.std(0).max()).all(), name


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_models_as_they_come_keep_their_function_too(request: pytest.FixtureRequest, family: str) -> None:
    work = reparameterised(request.getfixturevalue(family))
    assert same_function(work)
    assert differing(work, reparameterised(request.getfixturevalue(family), values=False))


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_only_values_and_projection_change_and_queries_and_keys_stay(
    request: pytest.FixtureRequest, family: str
) -> None:
    model = request.getfixturevalue(family)
    without, work = reparameterised(model, values=False), reparameterised(model)
    names = [f"{name.removesuffix('attn')}{layer}" for name in attentions(work.student) for layer in LAYERS]
    # later blocks see the same inputs up to round-off only, so their LayerNorms may differ in the last bits
    left, right = state(work), state(without)
    for name in left:
        if name not in names:
            torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-4, msg=name)
        elif ".qkv." in name:
            queries_and_keys = 2 * len(left[name]) // 3
            torch.testing.assert_close(
                left[name][:queries_and_keys], right[name][:queries_and_keys], rtol=1e-4, atol=1e-4
            )
    assert set(names) <= differing(work, without)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ({"scale_attn_norm": True}, {}),
        ({}, {"overrides": {"*.attn.pv": None, "*.attn.qk": None}}),
        ({}, {"overrides": {"*.attn.pv": None}}),
        ({}, {"overrides": {"*.attn.proj": Override(activations=None)}}),
        ({}, {"activations__bits": None}),
    ],
)
def test_where_it_does_not_fit_or_nothing_would_gain_the_attention_is_left_alone(
    vit: Build, arguments: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = vit(**arguments)
    assert not differing(reparameterised(model, **changes), reparameterised(model, values=False, **changes))


def test_one_attention_in_float_does_not_keep_the_next_from_changing(tiny_vit: nn.Module) -> None:
    work = reparameterised(tiny_vit, overrides={"blocks.0.attn.pv": None})
    old, new = (model.state_dict() for model in (work.teacher, work.student))
    assert torch.equal(new["blocks.0.attn.proj.weight"], old["blocks.0.attn.proj.weight"])
    assert not torch.equal(new["blocks.1.attn.proj.weight"], old["blocks.1.attn.proj.weight"])
    assert same_function(work)


@pytest.mark.parametrize("family", ["tiny_vit", "tiny_swin"])
def test_switched_off_the_values_see_nothing_but_the_layer_norms_part(
    request: pytest.FixtureRequest, family: str
) -> None:
    work = reparameterised(request.getfixturevalue(family), values=False)
    for name in attentions(work.student):
        block, parts = name.removesuffix("attn"), (*LAYERS, "norm1.weight", "norm1.bias")
        old, new = ({k: m.get_parameter(block + k).data for k in parts} for m in (work.teacher, work.student))
        assert torch.equal(old["attn.proj.weight"], new["attn.proj.weight"])
        assert torch.equal(old["attn.proj.bias"], new["attn.proj.bias"])
        ratio = old["norm1.weight"] / new["norm1.weight"]
        shift = old["norm1.bias"] / ratio - new["norm1.bias"]
        values = slice(-len(ratio), None)
        weight = old["attn.qkv.weight"][values] * ratio
        torch.testing.assert_close(new["attn.qkv.weight"][values], weight)
        bias = old["attn.qkv.bias"][values] + weight @ shift
        torch.testing.assert_close(new["attn.qkv.bias"][values], bias, rtol=1e-4, atol=1e-4)


def test_a_dead_channel_does_not_blow_up(tiny_vit: nn.Module) -> None:
    qkv: Any = tiny_vit.get_submodule("blocks.0.attn.qkv")
    qkv.weight.data[-5] = 0
    work = reparameterised(tiny_vit)
    assert same_function(work)
    old, new = (m.get_parameter("blocks.0.attn.proj.weight") for m in (work.teacher, work.student))
    ratio = new / old
    assert ratio.isfinite().all()
    torch.testing.assert_close(ratio[:, -5], torch.full_like(ratio[:, -5], 1 / LARGEST_RATIO))


def test_attention_that_pools_has_no_such_values(vit: Build) -> None:
    work = reparameterised(vit(global_pool="map", class_token=False))
    pool = {name: tensor for name, tensor in work.student.state_dict().items() if name.startswith("attn_pool.")}
    old = work.teacher.state_dict()
    assert all(torch.equal(tensor, old[name]) for name, tensor in pool.items() if name in old)
    assert same_function(work)


def test_biases_gained_on_the_way_are_saved_and_loaded(vit: Build, tmp_path: Path) -> None:
    model = vit(qkv_bias=False, proj_bias=False)
    run = aphq.quantize(model, short("w4a4", "fast"), pixels(), out=tmp_path / "run", device="cpu")
    assert run.model.get_parameter("blocks.0.attn.proj.bias").abs().max() > 0
    x = images_for(model)
    assert torch.equal(aphq.load(tmp_path / "run")(x), run.model(x))
