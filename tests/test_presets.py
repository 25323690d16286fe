from typing import get_args

import pytest

from aphq.errors import RecipeError
from aphq.presets import PRESETS, Effort, preset, round_to_nearest
from aphq.recipe import BlockReconstruction, LayerNormReparameterisation, Recipe, ScaleSearch


@pytest.mark.parametrize("effort", get_args(Effort))
@pytest.mark.parametrize("bits", [*PRESETS, *(f"w{w}a{a}" for w in range(2, 9) for a in range(2, 9))])
def test_every_preset_is_a_recipe_of_those_bits_that_survives_a_file(bits: str, effort: str) -> None:
    recipe = preset(bits, effort)
    assert (recipe.weights.bits, recipe.activations.bits) == (int(bits[1]), int(bits[3]))
    assert recipe.stage("scale_search") is not None
    assert Recipe.from_text(recipe.to_yaml()) == recipe


def test_efforts_differ_in_work() -> None:
    stages = {effort: {s.NAME: s for s in preset("w4a4", effort).stages} for effort in get_args(Effort)}
    assert "block_reconstruction" not in stages["fast"]
    steps = [stages[effort]["block_reconstruction"].steps for effort in ("balanced", "best", "paper")]
    assert 0 < steps[0] < steps[1] < steps[2]
    assert preset("w4a4", "paper").calibration.augment


def test_weights_of_few_bits_go_to_any_code_but_in_the_published_recipe() -> None:
    blocks = {}
    for effort in ("balanced", "paper", "best"):
        for bits in ("w3a3", "w4a8", "w6a6", "w8a4"):
            (blocks[effort, bits],) = (s for s in preset(bits, effort).stages if isinstance(s, BlockReconstruction))
    straight = {(effort, bits) for effort in ("balanced", "best") for bits in ("w3a3", "w4a8")}
    assert {key for key, stage in blocks.items() if stage.weight_lr > 0} == straight
    assert {key for key, stage in blocks.items() if stage.input_quantized_share == 0.25} == straight
    assert {key for key, stage in blocks.items() if stage.settling > 0} == {(e, b) for e, b in straight if b == "w4a8"}
    assert {bits: blocks["best", bits].steps for bits in ("w3a3", "w4a8", "w6a6", "w8a4")} == {
        "w3a3": 2000, "w4a8": 2000, "w6a6": 10_000, "w8a4": 10_000,
    }  # fmt: skip


def test_without_gradients_few_bits_are_compensated_for() -> None:
    names = {bits: [s.NAME for s in preset(bits, "fast").stages] for bits in ("w3a3", "w4a8", "w6a6", "w8a4")}
    compensated = {bits: "error_compensation" in stages for bits, stages in names.items()}
    assert compensated == {"w3a3": True, "w4a8": True, "w6a6": True, "w8a4": False}


def test_exponentials_where_nothing_learns_and_levels_are_not_few() -> None:
    chosen = {
        (bits, effort)
        for bits in (*PRESETS, "w5a5", "w8a4")
        for effort in get_args(Effort)
        if preset(bits, effort).activations.softmax == "exponentials"
    }
    assert chosen == {("w8a8", "fast"), ("w6a6", "fast"), ("w5a5", "fast")}
    assert round_to_nearest("w8a8").activations.softmax == "probabilities"


def test_attention_values_are_reparameterised_but_for_the_published_recipe() -> None:
    values = {}
    for effort in get_args(Effort):
        (stage,) = (s for s in preset("w4a4", effort).stages if isinstance(s, LayerNormReparameterisation))
        values[effort] = stage.values
    assert values == {"fast": True, "balanced": True, "paper": False, "best": True}


@pytest.mark.parametrize("bits", ["w3a3", "w4a8"])
def test_the_best_effort_turns_the_model_first_and_tunes_it_last(bits: str) -> None:
    stages = preset(bits, "best").stages
    assert [stages[0].NAME, stages[-1].NAME] == ["rotation", "joint_tuning"]
    assert preset(bits, "best").wants_views
    assert not preset(bits, "paper").wants_views


def test_gelu_stays_where_activations_have_levels_enough() -> None:
    assert preset("w4a4").stage("mlp_reconstruction") is not None
    assert preset("w3a8").stage("mlp_reconstruction") is None


def test_names_in_capitals_and_seeds_are_taken() -> None:
    assert preset("W4A8", seed=7) == preset("w4a8", seed=7)
    assert preset("w4a8", seed=7).seed == 7


@pytest.mark.parametrize(
    ("bits", "effort", "message"),
    [
        ("w4a", "fast", "no preset 'w4a': did you mean 'w4a[48]'"),
        ("int8", "fast", "any wXaY with X and Y from 2 to 8"),
        ("w1a4", "fast", "no preset 'w1a4'"),
        ("w4a16", "fast", "no preset 'w4a16'"),
        ("w4a4", "papper", "no effort 'papper': did you mean 'paper'"),
        ("w4a4", "zzz", "valid names: balanced, best, fast, paper"),
    ],
)
def test_unknown_names_get_a_helpful_error(bits: str, effort: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        preset(bits, effort)


def test_round_to_nearest_only_reads_ranges() -> None:
    recipe = round_to_nearest("w4a4")
    assert recipe.stages == (ScaleSearch(method="minmax"),)
    assert recipe.name == "w4a4-rtn"


def test_eight_bits_fit_integer_kernels() -> None:
    """Weights beside a zero-point of their own would not fit in eight signed bits; below, every level counts."""
    eight, four = preset("w8a8"), preset("w4a4")
    assert eight.weights.symmetric
    assert (eight.activations.attention, eight.activations.attention_symmetric) == ("tensor", True)
    assert not four.weights.symmetric
    assert (four.activations.attention, four.activations.attention_symmetric) == ("head", False)
    assert preset("w4a8").activations == eight.activations
