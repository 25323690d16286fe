"""Importance maps, and what is known of them: which are exact, which are round-off, and what they estimate."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aphq
from aphq.engine.folder import RunFolder
from aphq.engine.hooks import change_outputs
from aphq.engine.seeds import generator_for
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import run_units, unit_sites
from aphq.models.distillation import LOGITS, softmax_probe
from aphq.models.student import enable
from aphq.recipe import Importance, Views
from aphq.stages.importance import ImportanceMap, Importances, fisher_diagonals, normalised
from aphq.stages.scale_search import search_scales

from ..runs import all_images, pixels, short, workspace

Build = Callable[..., nn.Module]
STAGE = "block_reconstruction"


def visit_of(work: Workspace, name: str) -> Visit:
    return next(visit for visit in work.walk() if visit.unit.name == name)


def map_at(work: Workspace, site: str, unit: str | None = None, **config: Any) -> ImportanceMap:
    importances = Importances(work, Importance(**config))
    return importances.at(site, visit_of(work, unit or site))


def values_of(found: ImportanceMap) -> Tensor | None:
    return found.each.data if found.each is not None else found.shared


def ranks(x: Tensor) -> Tensor:
    return x.flatten().argsort().argsort().double()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


@pytest.mark.parametrize("kind", ["brecq", "ph", "aph", "fisher"])
@pytest.mark.parametrize(
    ("family", "unit", "mlp", "shape"),
    [
        ("vit", "blocks.0", False, (17, 32)),
        ("vit", "blocks.1", True, (17, 32)),
        ("vit", "patch_embed", False, (16, 32)),
        ("swin", "layers.0.blocks.1", False, (8, 8, 16)),
        ("swin", "layers.1.downsample", False, (4, 4, 32)),
        ("swin", "layers.1.blocks.0", True, (16, 32)),
    ],
)
def test_every_kind_gives_finite_non_negative_maps_of_the_outputs_shape(
    request: pytest.FixtureRequest, family: str, unit: str, mlp: bool, shape: tuple[int, ...], kind: str
) -> None:
    work = workspace(request.getfixturevalue(family)(), images=pixels(6))
    if kind == "brecq":  # without quantization there is no error to have a gradient
        search_scales(work, work.recipe.stage("scale_search"))  # type: ignore[arg-type]
        enable(work.student)
    site = f"{unit}.mlp.fc2" if mlp else unit
    found = map_at(work, site, unit, kind=kind)
    values = values_of(found)
    assert values is not None
    assert values.shape == ((6 if kind in ("brecq", "ph") else 1), *shape)
    assert torch.isfinite(values).all()
    assert (values >= 0).all()
    assert values.square().mean().sqrt() == pytest.approx(1, rel=1e-4)
    assert values.std() > 0, "a flat map would be plain MSE"
    error = torch.ones(2, *shape)
    weighed = found.weigh(error, torch.tensor([1, 3]))
    assert torch.equal(weighed, values[[1, 3]] if kind in ("brecq", "ph") else values.expand(2, *shape))


def test_mse_leaves_the_error_as_it_is(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, images=pixels(4))
    error = torch.rand(2, 17, 32)
    assert torch.equal(map_at(work, "blocks.0", kind="mse").weigh(error, torch.tensor([0, 1])), error)


def test_aph_is_the_mean_of_ph(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, images=pixels(6))
    each = values_of(map_at(work, "blocks.0", kind="ph", epsilon=1e-2))
    mean = values_of(map_at(work, "blocks.0", kind="aph", epsilon=1e-2))
    assert each is not None
    assert mean is not None
    assert torch.allclose(normalised(each.mean(0, keepdim=True), ""), mean, rtol=1e-4, atol=1e-5)


def slope(work: Workspace, unit: str, direction: Tensor, epsilon: float) -> float:
    """The largest |J(O + eps d) - J(O - eps d)| / 2 eps over the output O of a unit, by hand."""
    index = [u.name for u in work.units].index(unit)
    images = all_images(work).to(direction.dtype)
    with torch.no_grad():
        output = run_units(work.teacher, work.units[:index], images)
        output = work.units[index].run(work.teacher, output)
        target = _rest(work, index, output)

    def gradient(sign: float) -> Tensor:
        leaf = (output + sign * epsilon * direction).requires_grad_()
        loss = LOGITS.loss(_rest(work, index, leaf), target, 20.0)
        return torch.autograd.grad(loss, leaf)[0]

    return float((gradient(1) - gradient(-1)).abs().max() / (2 * epsilon))


def _rest(work: Workspace, index: int, x: Tensor) -> Tensor:
    return run_units(work.teacher, work.units[index + 1 :], work.units[index].bridge(work.teacher, x))


@pytest.mark.parametrize(("family", "unit"), [("vit", "blocks.0"), ("swin", "layers.0.blocks.0")])
def test_behind_a_layer_norm_the_all_ones_perturbation_is_invisible_but_for_round_off(
    request: pytest.FixtureRequest, family: str, unit: str
) -> None:
    """Why `aph` in float32 is a measure of rounding noise, and `fisher` exists."""
    work = workspace(request.getfixturevalue(family)(), images=pixels(4))
    shape = visit_of(work, unit).teacher_out[slice(0, 4)].shape
    work.teacher.double()
    signs = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).double() * 2 - 1
    seen = slope(work, unit, signs, 1e-3)
    unseen = slope(work, unit, torch.ones(shape, dtype=torch.float64), 1e-3)
    assert unseen < 1e-6 * seen
    work.teacher.float()
    assert slope(work, unit, torch.ones(shape), 1e-6) > 0.01 * seen, "what the published setting sees is noise"


def test_fisher_probes_have_the_covariance_of_the_fisher_matrix() -> None:
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0]]).expand(200_000, -1)
    probes = softmax_probe(logits, torch.Generator().manual_seed(0))
    p = logits[0].softmax(-1)
    assert torch.allclose(probes.T @ probes / len(probes), p.diag() - p[:, None] * p, atol=3e-3)
    assert probes.sum(-1).abs().max() < 1e-5, "a shift of all logits is no direction of the Fisher matrix"


def test_fisher_is_the_diagonal_of_jt_f_j(vit: Build) -> None:
    work = workspace(vit(depth=1), images=pixels(4))
    temperature, unit = 20.0, "blocks.0"
    index = [u.name for u in work.units].index(unit)
    exact = torch.zeros(1, 17, 32)
    for image in all_images(work).split(1):
        with torch.no_grad():
            output = work.units[index].run(work.teacher, run_units(work.teacher, work.units[:index], image))
            p = (_rest(work, index, output)[0] / temperature).softmax(-1)
        jacobian = torch.autograd.functional.jacobian(lambda x: _rest(work, index, x)[0], output).flatten(1)
        fisher = p.diag() - p[:, None] * p
        exact += ((jacobian.T @ fisher) * jacobian.T).sum(1).reshape(exact.shape)
    found = values_of(map_at(work, unit, kind="fisher", probes=200, power=1.0, temperature=temperature))
    assert found is not None
    matters = exact > 1e-9 * exact.max()  # with one block behind it only the class token reaches the head
    assert (found[~matters] <= 1e-6 * found.max()).all()
    assert rank_correlation(found[matters], exact[matters]) > 0.95
    ratio = (found[matters] / found.max()) / (exact[matters] / exact.max())
    assert ratio.median() == pytest.approx(1, abs=0.25)


def test_the_seed_decides_the_fisher_map(tiny_vit: nn.Module) -> None:
    maps = [
        values_of(map_at(workspace(tiny_vit, short(seed=seed), pixels(8)), "blocks.0", kind="fisher", probes=1))
        for seed in (1, 1, 2)
    ]
    assert maps[0] is not None
    assert torch.equal(maps[0], maps[1])  # type: ignore[arg-type]
    assert not torch.equal(maps[0], maps[2])  # type: ignore[arg-type]


def test_the_batch_size_changes_a_fisher_map_only_by_chance(tiny_vit: nn.Module) -> None:
    def found(batch: int, **config: Any) -> Tensor:
        recipe = short(calibration__batch=batch)
        values = values_of(map_at(workspace(tiny_vit, recipe, pixels(8)), "blocks.0", **config))
        assert values is not None
        return values

    many = {"kind": "fisher", "probes": 100}
    assert rank_correlation(found(3, **many), found(8, **many)) > 0.95


def diagonal_by_hand(work: Workspace, config: Importance, site: str) -> Tensor:
    """The same probes, but no other site in the graph."""
    generator, total = generator_for(work.recipe.seed, "fisher"), torch.zeros(())
    for images in all_images(work).split(work.batch):
        leaf: list[Tensor] = []

        def change(_: str, output: Tensor, leaf: list[Tensor] = leaf) -> Tensor:
            leaf.append(output.detach().requires_grad_())
            return leaf[0]

        with change_outputs({site: work.teacher.get_submodule(site)}, change):
            logits = work.teacher(images)
        for _ in range(config.probes):
            direction = softmax_probe(logits.detach() / config.temperature, generator)
            (grad,) = torch.autograd.grad(logits, leaf[0], direction, retain_graph=True)
            total = total + grad.square().sum(0, keepdim=True)
    return total / len(work.images)


@pytest.mark.parametrize(
    ("family", "arguments"), [("vit", {}), ("vit", {"init_values": 0.5}), ("distilled", {}), ("swin", {})]
)
def test_every_site_gets_what_it_would_get_alone(
    request: pytest.FixtureRequest, family: str, arguments: dict[str, Any]
) -> None:
    work = workspace(request.getfixturevalue(family)(**arguments), images=pixels(12))
    config = Importance(kind="fisher", probes=2)
    found = fisher_diagonals(work, config)
    assert set(found) == {s for unit in work.units for s in unit_sites(unit) if s != "head"}
    for site, diagonal in found.items():
        torch.testing.assert_close(diagonal, diagonal_by_hand(work, config, site), rtol=1e-3, atol=1e-12, msg=site)


def test_behind_a_layer_scale_an_mlp_matters_by_its_square(vit: Build) -> None:
    """Without one, output and block output get the same gradient, as one tensor that nobody may change."""
    scaled, plain = (workspace(vit(init_values=value), images=pixels(8)) for value in (0.5, None))
    config = Importance(kind="fisher", probes=1)
    found = fisher_diagonals(scaled, config)
    for block in ("blocks.0", "blocks.1"):
        gamma = scaled.teacher.get_parameter(f"{block}.ls2.gamma")
        torch.testing.assert_close(found[f"{block}.mlp.fc2"], found[block] * gamma.square(), rtol=1e-4, atol=0)
        assert not torch.allclose(found[f"{block}.mlp.fc2"], found[block])
    found = fisher_diagonals(plain, config)
    for block in ("blocks.0", "blocks.1"):
        torch.testing.assert_close(found[f"{block}.mlp.fc2"], found[block], rtol=1e-6, atol=0)


def no_probe(*_: object) -> Tensor:
    raise AssertionError("a backward pass")


def test_fisher_diagonals_are_read_back_from_the_run_folder(
    tiny_vit: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Importance(kind="fisher", probes=2)
    folder = RunFolder(tmp_path)

    def ask(config: Importance) -> dict[str, Tensor]:
        work = workspace(tiny_vit, images=pixels(8))
        work.folder = folder
        return fisher_diagonals(work, config)

    first = ask(config)
    monkeypatch.setattr("aphq.models.distillation.softmax_probe", no_probe)
    for again in (ask(config), ask(replace(config, power=0.7))):  # the power comes later
        assert again.keys() == first.keys()
        assert all(torch.equal(again[site], first[site]) for site in first)
    for other in (replace(config, probes=3), replace(config, temperature=5.0)):
        with pytest.raises(AssertionError, match="a backward pass"):
            ask(other)
    folder.close()


def test_the_stages_of_a_run_share_their_fisher_diagonals(tiny_vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(logits: Tensor, generator: torch.Generator) -> Tensor:
        asked.append(len(logits))
        return softmax_probe(logits, generator)

    monkeypatch.setattr("aphq.models.distillation.softmax_probe", counted)
    recipe = short(steps=1)
    kinds = [recipe.stage(name).importance for name in ("mlp_reconstruction", STAGE)]  # type: ignore[union-attr]
    assert kinds[0] == kinds[1]
    assert kinds[0].kind == "fisher"
    aphq.quantize(tiny_vit, recipe, pixels(16), device="cpu")  # a run folder would have measurements of its own
    assert sum(asked) == 16 * kinds[0].probes


def test_all_sites_of_a_stage_get_what_each_alone_would(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, images=pixels(8))
    together = Importances(work, Importance(kind="fisher"))
    for site in ("blocks.0", "blocks.1"):
        alone = values_of(map_at(work, site, kind="fisher"))
        both = values_of(together.at(site, visit_of(work, site)))
        assert torch.allclose(alone, both, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]


def test_a_map_without_signal_becomes_plain_error_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert torch.equal(normalised(torch.zeros(1, 3), "blocks.0"), torch.ones(1, 3))
    assert torch.equal(normalised(torch.full((1, 3), torch.nan), "blocks.1"), torch.ones(1, 3))
    assert "blocks.0 is zero or not finite" in caplog.text
    tiny = normalised(torch.tensor([1e-30, 2e-30]), "blocks.2")
    assert tiny.square().mean() == pytest.approx(1)
    assert tiny[1] == 2 * tiny[0]


def test_estimating_importance_leaves_the_models_alone(tiny_vit: nn.Module) -> None:
    work = workspace(tiny_vit, images=pixels(4))
    before = all_images(work)
    expected = work.teacher(before)
    for kind in ("ph", "fisher"):
        map_at(work, "blocks.0", kind=kind)
    assert torch.equal(work.teacher(before), expected)
    assert not any(m._forward_hooks for m in work.teacher.modules())
    assert all(p.grad is None for p in work.teacher.parameters())


def test_an_image_counts_the_same_in_a_short_last_batch(tiny_vit: nn.Module) -> None:
    """The distillation loss is a mean over the batch, which must not weight images by the batch they fall into."""

    def size_of_each(batch: int) -> Tensor:
        work = workspace(tiny_vit, short(calibration__batch=batch), pixels(8))
        generator = torch.Generator().manual_seed(0)
        for parameter in work.student.parameters():  # a student that errs has gradients beyond round-off
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        values = values_of(map_at(work, "blocks.0", kind="brecq"))
        assert values is not None
        return values.flatten(1).mean(1)

    assert torch.allclose(size_of_each(8), size_of_each(7), rtol=0.02)  # of 7 + 1 the last image is alone


def test_views_behind_the_images_do_not_count(tiny_vit: nn.Module) -> None:
    """Also where the last batch of images is short and the pool goes on with views."""
    work = workspace(tiny_vit, short(calibration__batch=4), pixels(6))
    alone = map_at(work, "blocks.0", kind="aph").shared
    pool = work.pool(Views(copies=1), STAGE)
    visit = next(visit for visit in work.walk(pool) if visit.unit.name == "blocks.0")
    among_views = Importances(work, Importance(kind="aph")).at("blocks.0", visit).shared
    assert alone is not None
    assert among_views is not None
    assert torch.equal(alone, among_views)
