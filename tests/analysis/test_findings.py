from pathlib import Path

import pytest
import torch
from torch import nn

import aphq
from aphq.analysis import Analysis, analyze
from aphq.analysis.findings import NORMS, SEARCH, SEARCHED, Bench, mixed_recipe
from aphq.analysis.held_out import HeldOut, sides, switched
from aphq.analysis.sensitivity import costs, element_counts
from aphq.engine.progress import Progress
from aphq.errors import DataError, RecipeError
from aphq.models.attention import open_attentions
from aphq.models.student import enable
from aphq.quant.layers import quantized_sites
from aphq.recipe import LayerNormReparameterisation, Recipe, ScaleSearch

from ..conftest import Build
from ..models.variants import family
from ..runs import pixels


@pytest.fixture(scope="module")
def found(vit: Build) -> Analysis:
    return analyze(vit(), pixels(24), target_bits=4.5, effort="fast", images=8, device="cpu")


def bench(model: nn.Module) -> Bench:
    return Bench(model, pixels(24), 8, None, torch.device("cpu"), 3407, Progress())


def test_classifiers_of_transformers_are_ranked_too() -> None:
    pytest.importorskip("transformers")
    found = analyze(family("transformers vit"), pixels(8), target_bits=4, effort="fast", images=4, device="cpu")
    assert "vit.layers.1.mlp.fc2" in {site.name for site in found.sites}
    assert found.proposal is not None


def test_every_site_is_ranked(found: Analysis, tiny_vit: nn.Module) -> None:
    names = {name for name, _ in quantized_sites(bench(tiny_vit).searched(aphq.preset("w4a4", "fast")).work.student)}
    assert {site.name for site in found.sites} == names
    assert [site.alone.kl for site in found.sites] == sorted((site.alone.kl for site in found.sites), reverse=True)
    assert found.bits == "w5a5"
    assert found.images == 8
    assert all(0 <= site.without.agreement <= 100 for site in found.sites)


@pytest.mark.parametrize(("effort", "late"), [("fast", True), ("balanced", False)])
def test_costs_are_of_the_softmax_that_the_proposal_has(
    tiny_vit: nn.Module, effort: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: dict[str, bool] = {}
    searched = Bench.searched

    def watched(self: Bench, recipe: Recipe, count: int | None = None) -> HeldOut:
        held_out = searched(self, recipe, count)
        tried[recipe.name] = all(one.pv.divides for _, one in open_attentions(held_out.work.student))
        return held_out

    monkeypatch.setattr(Bench, "searched", watched)
    found = analyze(tiny_vit, pixels(24), target_bits=4.5, effort=effort, images=8, device="cpu")
    assert found.proposal is not None
    assert (found.proposal.recipe.activations.softmax == "exponentials") == late
    assert len(tried) == 3  # of 3 to 5 bits
    assert set(tried.values()) == {late}


def test_measuring_from_a_unit_on_is_measuring_the_whole_model(tiny_vit: nn.Module) -> None:
    held_out = bench(tiny_vit).searched(aphq.preset("w3a3", "fast"))
    student = held_out.work.student
    for everything_on in (False, True):
        enable(student, everything_on)
        held_out.walk()
        for name in ("patch_embed.proj", "blocks.1.attn.pv", "blocks.1.mlp.fc2", "head"):
            quantizers = [q for side in sides(student.get_submodule(name)).values() for q in side]  # type: ignore[arg-type]
            with switched(quantizers, not everything_on):
                partly = held_out.from_site(name)
                with torch.no_grad():
                    whole = held_out.work.distillation.loss(student(held_out.images), held_out.logits)
            assert partly.kl == pytest.approx(float(whole), rel=1e-4, abs=1e-7)
            assert partly.kl > 0


def test_fewer_bits_cost_more(tiny_vit: nn.Module) -> None:
    table = bench(tiny_vit)
    totals = [sum(c.kl for c in costs(table.searched(aphq.preset(f"w{b}a{b}", "fast")), b)) for b in (2, 4, 8)]
    assert totals[0] > totals[1] > totals[2]


def test_the_image_is_left_at_its_bits(tiny_vit: nn.Module) -> None:
    measured = {(c.name, c.side) for c in costs(bench(tiny_vit).searched(aphq.preset("w4a4", "fast")), 4)}
    assert ("patch_embed.proj", "weights") in measured
    assert ("patch_embed.proj", "activations") not in measured


def test_elements_are_parameters_and_activations_of_one_image(tiny_vit: nn.Module) -> None:
    counts = element_counts(bench(tiny_vit).searched(aphq.preset("w4a4", "fast")).work)
    assert counts["blocks.0.mlp.fc1", "weights"] == 32 * 128
    assert counts["blocks.0.mlp.fc1", "activations"] == 17 * 32
    assert counts["blocks.0.attn.qk", "activations"] == 2 * 17 * 32
    assert ("blocks.0.attn.qk", "weights") not in counts


def test_the_proposal_keeps_the_budget_and_can_be_run(found: Analysis, tiny_vit: nn.Module, tmp_path: Path) -> None:
    proposal = found.proposal
    assert proposal is not None
    assert 4 < proposal.weight_bits <= 4.5 + 1e-6
    assert 4 < proposal.activation_bits <= 4.5 + 1e-6
    assert proposal.recipe.overrides
    file = tmp_path / "mixed.yaml"
    file.write_text(proposal.recipe.to_yaml())
    assert Recipe.load(file) == proposal.recipe
    recipe = proposal.recipe.with_value("scale_search.candidates", 4).with_value("scale_search.images", 8)
    run = aphq.quantize(tiny_vit, recipe, pixels(), device="cpu")
    bits = sum(row.weight_bits * row.parameters for row in run.coverage if row.weight_bits)
    assert bits / sum(row.parameters for row in run.coverage) == pytest.approx(proposal.weight_bits)


def test_scales_are_searched_in_the_way_of_a_run() -> None:
    norms, search, *_ = aphq.preset("w4a4", "fast").stages
    assert isinstance(norms, LayerNormReparameterisation)
    assert isinstance(search, ScaleSearch)
    assert (NORMS.values, SEARCH.method, SEARCH.rounds) == (norms.values, search.method, search.rounds)


def test_only_what_differs_is_overridden() -> None:
    chosen = {("a", "weights"): 4, ("a", "activations"): 5, ("b", "weights"): 4, ("b", "activations"): 4}
    recipe = mixed_recipe(chosen, 4.2, 4, "fast", 3407)
    assert list(recipe.overrides) == ["a"]
    assert recipe.bits_for("a") == (4, 5)
    assert recipe.name == "mixed-4.2-fast"


@pytest.mark.parametrize("target", [1.0, 9.0])
def test_impossible_targets_are_refused(tiny_vit: nn.Module, target: float) -> None:
    with pytest.raises(RecipeError, match="between 2 and 8"):
        analyze(tiny_vit, pixels(4), target_bits=target, device="cpu")


def test_one_image_is_not_enough(tiny_vit: nn.Module) -> None:
    with pytest.raises(DataError, match="at least two images"):
        analyze(tiny_vit, pixels(1), device="cpu")


@pytest.mark.parametrize(("there", "wanted", "kept"), [(60, 40, 40), (56, 40, 40), (20, 40, 10), (20, 2, 2), (2, 8, 1)])
def test_images_are_held_out_as_wanted_or_by_half(tiny_vit: nn.Module, there: int, wanted: int, kept: int) -> None:
    found = Bench(tiny_vit, pixels(there), wanted, None, torch.device("cpu"), 3407, Progress())
    assert len(found.images) == kept
    assert len(found.seen) == min(there, SEARCHED + wanted) - kept


def test_the_callers_model_is_left_alone(tiny_swin: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in tiny_swin.state_dict().items()}
    kinds = [type(module) for module in tiny_swin.modules()]
    found = analyze(tiny_swin, pixels(8), images=4, device="cpu")
    assert found.proposal is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny_swin.state_dict().items())
    assert [type(module) for module in tiny_swin.modules()] == kinds
