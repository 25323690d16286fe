from pathlib import Path

import pytest

from aphq.cli.options import model_arguments, parse_changes, recipe_from
from aphq.errors import ModelError, RecipeError
from aphq.presets import preset


def test_values_are_yaml() -> None:
    found = parse_changes(["steps=500", "overrides.head=null", "calibration.augment=true", "x=1e-3", "y=a=b", "z="])
    assert found == {
        "steps": 500,
        "overrides.head": None,
        "calibration.augment": True,
        "x": "1e-3",
        "y": "a=b",
        "z": None,
    }
    assert parse_changes(None) == {}


@pytest.mark.parametrize("word", ["steps", "=3", "", "x=[1"])
def test_what_is_no_pair_is_refused(word: str) -> None:
    with pytest.raises(RecipeError, match=r"NAME=VALUE|cannot read the value"):
        parse_changes([word])


def test_lists_become_tuples_for_timm() -> None:
    assert model_arguments(["num_heads=[2, 4]", "embed_dim=64"]) == {"num_heads": (2, 4), "embed_dim": 64}


def test_changes_come_on_top_of_a_preset_or_a_file(tmp_path: Path) -> None:
    wanted = preset("w4a4", "fast", seed=5).with_value("calibration.images", 9).with_value("weights.bits", 3)
    assert recipe_from("w4a4", "fast", 5, 9, {"weights.bits": 3}, None) == wanted
    file = tmp_path / "recipe"  # any name will do
    file.write_text(preset("w3a3").to_yaml())
    found = recipe_from(str(file), None, None, None, {}, ["mlp_reconstruction"])
    assert found == preset("w3a3").without("mlp_reconstruction")


def test_an_explicit_change_wins_over_the_short_option() -> None:
    assert recipe_from("w4a4", "fast", 5, None, {"seed": 6}, None).seed == 6


def test_small_numbers_are_written_as_people_write_them() -> None:
    recipe = recipe_from("w4a4", "balanced", None, None, parse_changes(["block_reconstruction.scale_lr=1e-5"]), None)
    assert recipe.stage("block_reconstruction").scale_lr == 1e-5  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("num_classes=7", "--num-classes"),
        ("weights=x.pth", "--weights"),
        ("pretrained=true", "--weights"),
        ("name=x", "name"),
    ],
)
def test_a_model_argument_that_has_an_option_is_refused_by_that(pair: str, says: str) -> None:
    with pytest.raises(ModelError, match=rf"--model-arg {pair.split('=')[0]}=.*: that is said by .*{says}"):
        model_arguments(["embed_dim=64", pair])
