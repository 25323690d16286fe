"""One channel of a few tokens two hundred times larger than the rest, behind a LayerNorm that divides it away."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aphq.engine.hooks import watch_inputs
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, Value, mlps_of
from aphq.models.distillation import LOGITS
from aphq.models.student import swap_activation
from aphq.quant.layers import quantizers
from aphq.recipe import Override, Recipe, ScaleSearch
from aphq.stages import outliers
from aphq.stages.outliers import SHRINKING, logits_from, outlier_range, shrink_outliers
from aphq.stages.samples import Sample, sample_inputs
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
SITE = "blocks.0.mlp.fc2"
GOES_TO = 5  # the channel that the planted one writes to
SILENT_SHARE = 0.98  # of the tokens that are not huge


@pytest.fixture
def planted(vit: Build) -> nn.Module:
    """One hidden unit of the first MLP that fires hugely for a few tokens and goes to one channel only."""
    model: Any = vit(depth=2)
    fc1, fc2 = model.blocks[0].mlp.fc1, model.blocks[0].mlp.fc2
    with torch.no_grad():
        fc1.weight[0] *= 1000
        fc1.bias[0] = -1500.0
        fc2.weight[:, 0] = 0
        fc2.weight[GOES_TO, 0] = 1.0
    return model


@torch.no_grad()
def bimodal(build: Build, margin: float, **arguments: Any) -> nn.Module:
    """One hidden unit that is huge for the class token, and `margin` or more below zero for nearly all others."""
    model: Any = build(**arguments)
    block, slope, channel = model.blocks[0], 400.0, 7
    mlp, norm = block.mlp, block.norm2
    for parameter in (model.patch_embed.proj.weight, model.patch_embed.proj.bias, block.attn.proj.weight):
        parameter[channel] = 0
    model.pos_embed[..., channel], model.cls_token[..., channel] = 0.0, 30.0  # the class token alone is there
    norm.weight[channel], norm.bias[channel] = 1.0, 0.0
    seen: list[Tensor] = []
    with watch_inputs({"fc1": mlp.fc1}, lambda _, inputs: seen.append(inputs[0])):
        model(all_images(workspace(model)))
    nearest = slope * float(seen[0][:, 1:, channel].quantile(SILENT_SHARE))
    mlp.fc1.weight[0], mlp.fc2.weight[:, 0] = 0, 0
    if mlp.fc1.bias is None:  # so the row must bring its own constant: LayerNorm's bias does, through one channel
        norm.weight[0], norm.bias[0] = 0.0, 1.0
        mlp.fc1.weight[0, 0] = -nearest - margin
    else:
        mlp.fc1.bias[0] = -nearest - margin
    mlp.fc1.weight[0, channel], mlp.fc2.weight[GOES_TO, 0] = slope, 1.0
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
        return float(LOGITS.loss(work.student(x), work.teacher(x))), float(quantizer.limits()[1])


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


def test_a_search_with_outliers_leaves_a_float_model_with_every_quantizer_set(vit: Build) -> None:
    work = searched(bimodal(vit, 500.0), 16)
    assert all(quantizer.calibrated and not quantizer.enabled for quantizer in quantizers(work.student))
    x = all_images(work)
    torch.testing.assert_close(work.student(x), work.teacher(x), rtol=1e-3, atol=1e-3)


def test_shrinking_gains_over_clipping_alone(planted: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    with_shrinking, _ = loss_with_only(searched(planted, 16), SITE)
    monkeypatch.setattr(outliers, "SHRINKING", (1.0,))
    without, _ = loss_with_only(searched(planted, 16), SITE)
    assert with_shrinking < 0.5 * without


def test_weights_that_share_one_coarse_scale_bear_less_shrinking(planted: nn.Module) -> None:
    """The shrunk channel's weights grow by as much and take the range from all others."""
    factors = []
    for bits in (8, 2):
        work = searched(planted, 16, weights__bits=bits, weights__granularity="tensor")
        old, new = (m.get_parameter("blocks.0.mlp.fc1.weight")[0] for m in (work.teacher, work.student))
        factors.append(float((old / new).mean()))
    assert factors[0] > factors[1]


# -- shrinking ---------------------------------------------------------------------------------------------------------


def first_block(model: nn.Module, relu: bool = False, **changes: Any) -> tuple[Workspace, Unit, Rows, ScaleSearch]:
    """A workspace, and what `shrink_outliers` wants to know of its first block; no copies unless asked for."""
    work = workspace(model, short("w8a4", "fast", **{"scale_search__outlier_copies": 1, **changes}))
    if relu:
        swap_activation(work.student, mlps_of(work.units)["blocks.0.mlp"])
    unit, rows = next((unit, rows) for unit, rows in work.walk_one(work.student) if unit.name == "blocks.0")
    config = work.recipe.stage("scale_search")
    assert isinstance(config, ScaleSearch)
    return work, unit, rows, config


Judge = Callable[[list[Value], list[int]], float]


def preferring(factor: float, copied: float = 2.0) -> Judge:
    """A judge that likes this one of the factors, which come in their order, and then says what copies lose."""
    losses = iter([0.5 if tried == factor else 1.0 + tried for tried in SHRINKING])
    return lambda _, held: next(losses, copied if len(held) > 1 else torch.nan)


def never(*_: Any) -> float:
    raise AssertionError("there is nothing to judge")


def state(work: Workspace) -> dict[str, Tensor]:
    return {name: tensor.nan_to_num().clone() for name, tensor in work.student.state_dict().items()}


@torch.no_grad()
def hidden_and_output(work: Workspace) -> tuple[Tensor, Tensor]:
    """What the first MLP says, and before that what its planted channel adds to it; [images, tokens, ...]."""
    mlp: Any = work.student.get_submodule("blocks.0.mlp")
    seen: dict[str, Tensor] = {}
    with watch_inputs({"fc2": mlp.fc2, "mlp": mlp}, lambda name, inputs: seen.update({name: inputs[0]})):
        work.student(all_images(work))
    return seen["fc2"][..., 0] * mlp.fc2.weight[GOES_TO, 0], mlp(seen["mlp"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", SHRINKING)
@pytest.mark.parametrize("margin", [-20.0, 5.0, 500.0])
def test_a_relu_mlp_computes_exactly_what_it_did(vit: Build, margin: float, factor: float, bias: bool) -> None:
    work, unit, rows, config = first_block(bimodal(vit, margin, proj_bias=bias), relu=True)
    before = hidden_and_output(work)
    assert shrink_outliers(work, unit, rows, config, preferring(factor))
    assert all(torch.equal(old, new) for old, new in zip(before, hidden_and_output(work), strict=True))
    new, old = (m.get_parameter("blocks.0.mlp.fc1.weight")[0] for m in (work.student, work.teacher))
    assert torch.equal(new * factor, old)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", SHRINKING)
@pytest.mark.parametrize(("margin", "error"), [(500.0, 1e-5), (5.0, 0.1)])
def test_a_gelu_mlp_computes_nearly_what_it_did(
    vit: Build, margin: float, error: float, factor: float, bias: bool
) -> None:
    work, unit, rows, config = first_block(bimodal(vit, margin, proj_bias=bias))
    added, said = hidden_and_output(work)
    assert shrink_outliers(work, unit, rows, config, preferring(factor))
    adds, says = hidden_and_output(work)
    assert added[:, 0].min() > 1000, "the class token's"
    torch.testing.assert_close(adds[:, 0], added[:, 0], rtol=0.05 * error, atol=0)
    assert added[:, 1:].abs().quantile(SILENT_SHARE) < 1e-3
    assert adds[:, 1:].abs().quantile(SILENT_SHARE) < error + 1e-3, "what was silent stays so"
    others = [c for c in range(said.shape[-1]) if c != GOES_TO]
    torch.testing.assert_close(says[..., others], said[..., others])


@pytest.mark.parametrize("factor", SHRINKING)
def test_the_factor_with_the_least_judged_loss_is_kept(
    vit: Build, factor: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "aphq")
    work, unit, rows, config = first_block(bimodal(vit, 500.0))
    assert shrink_outliers(work, unit, rows, config, preferring(factor))
    new, old = (m.state_dict() for m in (work.student, work.teacher))
    assert torch.equal(new[f"{unit.mlp.fc1}.weight"][0] * factor, old[f"{unit.mlp.fc1}.weight"][0])
    assert f"blocks.0: 1 massive hidden channels divided by {factor:g}" in caplog.text


def test_the_judge_sees_each_factor_in_place_and_the_logits_from_before(vit: Build) -> None:
    work, unit, rows, config = first_block(bimodal(vit, 500.0), scale_search__outlier_images=6)
    expected = work.teacher(all_images(work)[:6])
    weight = work.student.get_parameter("blocks.0.mlp.fc1.weight")
    slope, seen = float(weight[0, 7]), []

    def judge(target: Any, _: list[int]) -> float:
        torch.testing.assert_close(target, [expected], rtol=1e-4, atol=1e-4)
        seen.append(slope / float(weight[0, 7]))
        return 0.0

    assert shrink_outliers(work, unit, rows, config, judge)
    assert seen == list(SHRINKING)


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", SHRINKING)
def test_rejected_factors_leave_no_trace(
    vit: Build, factor: float, bias: bool, relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bimodal(vit, 5.0, proj_bias=bias)
    work, unit, rows, config = first_block(model, relu)
    shrink_outliers(work, unit, rows, config, preferring(factor))
    alone, *arguments = first_block(model, relu)
    monkeypatch.setattr(outliers, "SHRINKING", (factor,))
    shrink_outliers(alone, *arguments, lambda *_: 0.0)
    left, right = state(work), state(alone)
    if factor == 1 and not bias:  # a bias of nothing may stay
        assert not left.pop("blocks.0.mlp.fc1.bias").any()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_what_a_judge_does_to_the_scales_is_undone(vit: Build) -> None:
    work, unit, rows, config = first_block(bimodal(vit, 500.0))
    quantizer: Any = work.student.get_submodule(f"{SITE}.input_quantizer")

    def judge(*_: Any) -> float:
        assert not quantizer.calibrated
        quantizer.set_range(torch.zeros(1), torch.ones(1))
        return 0.0

    assert shrink_outliers(work, unit, rows, config, judge)
    assert not quantizer.calibrated


@pytest.mark.parametrize(
    ("outlying", "changes"),
    [
        (False, {}),
        (True, {"scale_search__outlier_candidates": 0}),
        (True, {"scale_search__method": "self_mse"}),
        (True, {"scale_search__outlier_ratio": 1e6}),
    ],
)
def test_without_outliers_or_unasked_nothing_is_touched(vit: Build, outlying: bool, changes: dict[str, Any]) -> None:
    work, unit, rows, config = first_block(bimodal(vit, 500.0) if outlying else vit(), **changes)
    before = state(work)
    assert not shrink_outliers(work, unit, rows, config, never)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(work).items())


def test_a_norm_inside_the_mlp_forbids_shrinking_but_outliers_are_told_of(vit: Build) -> None:
    work, unit, rows, config = first_block(vit(scale_mlp_norm=True), scale_search__outlier_ratio=0.5)
    before = state(work)
    assert shrink_outliers(work, unit, rows, config, never)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(work).items())


def test_a_unit_without_an_mlp_has_nothing_to_shrink(tiny_vit: nn.Module) -> None:
    work, _, _, config = first_block(tiny_vit)
    assert not shrink_outliers(work, work.units[0], work.image_rows(), config, never)


def test_an_input_left_in_float_is_not_shrunk(vit: Build) -> None:
    work = searched(bimodal(vit, 500.0), 16, overrides={SITE: Override(activations=None)})
    for name in ("fc1.weight", "fc1.bias", "fc2.weight"):
        new, old = (m.get_parameter(f"blocks.0.mlp.{name}") for m in (work.student, work.teacher))
        assert torch.equal(new, old)


# -- copies ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def mlp_outputs(work: Workspace) -> Tensor:
    """[images, tokens, channels] of the first MLP."""
    mlp: Any = work.student.get_submodule("blocks.0.mlp")
    seen: list[Tensor] = []
    with watch_inputs({"mlp": mlp}, lambda _, inputs: seen.append(inputs[0])):
        work.student(all_images(work))
    return mlp(seen[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_copies_share_a_massive_channel_in_the_places_of_those_that_say_least(
    vit: Build, relu: bool, bias: bool
) -> None:
    model: Any = bimodal(vit, 500.0, proj_bias=bias)
    quiet = [9, 17]  # 2 % of 128, and so no more of the 7 copies that are asked for
    with torch.no_grad():
        model.blocks[0].mlp.fc1.weight[quiet] *= 1e-3
    work, unit, rows, config = first_block(model, relu, scale_search__outlier_copies=8)
    before = mlp_outputs(work)
    assert shrink_outliers(work, unit, rows, config, preferring(4.0, copied=0.1)) in ([0, 9, 17], [0, 17, 9])
    torch.testing.assert_close(mlp_outputs(work), before, rtol=1e-4, atol=3e-3)
    fc1, fc2 = (work.student.get_parameter(f"blocks.0.mlp.{name}.weight") for name in ("fc1", "fc2"))
    assert torch.equal(fc1[quiet], fc1[[0, 0]])
    assert torch.equal(fc2[:, quiet], fc2[:, [0, 0]])
    torch.testing.assert_close(fc1[0] * 4, work.teacher.get_parameter("blocks.0.mlp.fc1.weight")[0])
    torch.testing.assert_close(fc2[GOES_TO, 0], torch.tensor(4 / 3), rtol=0.01, atol=0)


@pytest.mark.parametrize("copied", [2.0, 0.4])  # 0.5 without them
def test_copies_that_gain_nothing_to_speak_of_are_not_made(vit: Build, copied: float) -> None:
    states = []
    for copies in (1, 4):
        work, unit, rows, config = first_block(bimodal(vit, 500.0), scale_search__outlier_copies=copies)
        assert shrink_outliers(work, unit, rows, config, preferring(8.0, copied)) == [0]
        states.append(state(work))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_coarse_weights_gain_from_copies(planted: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one channel takes in range from the weights of all others, several need not."""
    monkeypatch.setattr(outliers, "WORTH_COPIES", 1.0)  # the channels of a random model all say about as much
    losses = []
    for copies in (1, 8):
        work = searched(
            planted, 16, weights__bits=3, scale_search__outlier_copies=copies, scale_search__outlier_fit=False
        )
        layer: Any = work.student.get_submodule(SITE)
        layer.weight_quantizer.enabled = True
        losses.append(loss_with_only(work, SITE)[0])
    assert losses[1] < losses[0]


# -- the range ---------------------------------------------------------------------------------------------------------


def ask_range(model: nn.Module, **changes: Any) -> tuple[Any, Workspace, Callable[[Tensor, Tensor], float]]:
    """(what `outlier_range` says of the first fc2, the workspace, the KL with its input cut to any range)"""
    work, unit, rows, config = first_block(model, scale_search__outlier_candidates=16, **changes)
    layer: Any = work.student.get_submodule(SITE)
    sample: Sample = sample_inputs(work, unit, rows, {SITE: layer}, {SITE: (1,)}, 256)[SITE][0]
    with torch.no_grad():
        target = logits_from(work, unit, rows, config)
    found = outlier_range(work, unit, rows, layer, sample, target, config)

    @torch.no_grad()
    def loss_at(lower: Tensor, upper: Tensor) -> float:
        layer.input_quantizer.set_range(lower, upper)
        layer.input_quantizer.enabled = True
        return float(LOGITS.loss(work.student(all_images(work)), target[0]))

    return found, work, loss_at


def test_the_range_comes_with_its_loss_which_is_the_least(planted: nn.Module) -> None:
    (found, loss), work, loss_at = ask_range(planted)
    assert all(not quantizer.enabled for quantizer in quantizers(work.student))
    widest = hidden_and_output(work)[0].max().reshape(1)
    assert loss_at(found.lower, found.upper) == pytest.approx(loss, rel=1e-3)
    losses = [loss_at(found.lower, widest * share) for share in torch.logspace(0, -2.3, 16)]
    assert min(losses) > 0.9 * loss
    assert losses[0] > 2 * loss


def test_the_range_that_fits_the_other_channels_is_tried_too(planted: nn.Module) -> None:
    """Between two candidates of a coarse grid."""
    losses = {
        fit: loss_with_only(searched(planted, 2, scale_search__outlier_fit=fit), SITE)[0] for fit in (False, True)
    }
    assert losses[True] < 0.9 * losses[False]


def test_a_float_input_has_no_range(planted: nn.Module) -> None:
    found, _, _ = ask_range(planted, overrides={SITE: Override(activations=None)})
    assert found is None
