import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from aphq.errors import RecipeError
from aphq.presets import preset
from aphq.recipe import (
    STAGES,
    Activations,
    BlockReconstruction,
    Importance,
    JointTuning,
    LayerNormReparameterisation,
    MlpReconstruction,
    Override,
    Recipe,
    Rotation,
    ScaleSearch,
    Stage,
    Weights,
    differences,
)

PAPER = Recipe(stages=(MlpReconstruction(), LayerNormReparameterisation(), ScaleSearch(), BlockReconstruction()))

bits = st.none() | st.integers(2, 8)
overrides = st.none() | st.builds(Override, bits | st.just("recipe"), bits | st.just("recipe"))
recipes = st.builds(
    Recipe,
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
    seed=st.integers(0, 2**62),
    weights=st.builds(Weights, bits, st.booleans(), st.sampled_from(["channel", "tensor"])),
    activations=st.builds(Activations, bits, st.booleans(), st.sampled_from(["head", "tensor"]), bits),
    overrides=st.dictionaries(st.text("abc.*0", min_size=1), overrides, max_size=4),
    stages=st.tuples(
        st.builds(MlpReconstruction, steps=st.integers(0, 10**6), learning_rate=st.floats(1e-300, 1e300)),
        st.builds(ScaleSearch, method=st.sampled_from(["minmax", "self_mse"]), percentile=st.floats(1e-9, 1)),
        st.builds(BlockReconstruction, importance=st.builds(Importance, temperature=st.floats(1e-5, 1e5))),
    ),
)


@settings(max_examples=50, deadline=None)
@given(recipes)
def test_yaml_and_json_give_the_same_recipe_back(recipe: Recipe) -> None:
    for text in (recipe.to_yaml(), recipe.to_json()):
        again = Recipe.from_text(text)
        assert again == recipe
        assert list(again.overrides) == list(recipe.overrides), "the order of patterns decides which one wins"


def test_json_indented_by_tabs_is_read() -> None:
    assert Recipe.from_text(json.dumps(PAPER.to_dict(), indent="\t")) == PAPER


def test_the_file_of_a_recipe_is_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(PAPER.to_yaml(), encoding="utf-8")
    assert Recipe.load(file) == PAPER


def test_fields_left_out_take_their_defaults() -> None:
    recipe = Recipe.from_text("weights: {bits: 3}\nstages: [{kind: scale_search, percentile: 1e-1}]")
    assert recipe == Recipe(weights=Weights(bits=3), stages=(ScaleSearch(percentile=0.1),))


def test_no_stage_equals_another_stage_of_the_same_numbers() -> None:
    assert {cls.NAME: cls().kind for cls in STAGES.values()} == {name: name for name in STAGES}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weigths: {bits: 4}", "unknown key 'weigths': did you mean 'weights'"),
        ("weights: {bit: 4}", "unknown key 'weights.bit': did you mean 'bits'"),
        ("stages: [{kind: scale_search, candidate: 4}]", r"'stages\[0\].candidate': did you mean 'candidates'"),
        ("stages: [{kind: scale_serch}]", r"stages\[0\].kind.*'scale_serch': did you mean 'scale_search'"),
        ("stages: [{method: minmax}]", r"stages\[0\] must be a mapping with a 'kind'"),
        ("stages: [scale_search]", r"stages\[0\] must be a mapping with a 'kind'"),
        ("stages: 4", "recipe: "),
        ("stages: [{kind: scale_search, method: min_max}]", r"stages\[0\].method cannot be 'min_max': .*'minmax'"),
        ("stages: [{kind: block_reconstruction, importance: {kind: hph}}]", r"stages\[0\].importance.kind .*'hph'"),
        ("stages: [{kind: scale_search, rounds: 1.5}]", r"stages\[0\].rounds must be of type int, got 1.5"),
        ("weights: {bits: four}", "weights.bits must be of type int, got 'four'"),
        ("weights: {symmetric: 1}", "weights.symmetric must be of type bool"),
        ("seed: abc", "seed must be of type int, got 'abc'"),
        ("overrides: {head: {weights: 4, bias: 8}}", "unknown key 'overrides.head.bias'"),
        ("overrides: {head: 8}", "overrides.head must be a mapping of fields, got 8"),
        ("overrides: {8: null}", "a key of overrides must be of type str, got 8"),
        ("version: 2", "version 2 is not supported; this aphq reads version 1"),
        ("[1, 2]", "must be a mapping of fields, got list"),
        ("", "must be a mapping of fields, got NoneType"),
        ("a: [", "neither YAML nor JSON"),
        ("[" * 5000, "neither YAML nor JSON|nested too deeply"),
        ("!!python/object/apply:os.system ['true']", "neither YAML nor JSON"),
    ],
)
def test_a_recipe_that_cannot_be_read_says_where_and_why(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe.from_text(text)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for name in ("missing.yaml", "binary"):
        with pytest.raises(RecipeError, match=name):
            Recipe.load(tmp_path / name)


@pytest.mark.parametrize("number", [1, 9, 0, -4, 32])
@pytest.mark.parametrize("place", ["weights.bits", "activations.bits", "activations.image_bits"])
def test_bits_are_2_to_8(place: str, number: int) -> None:
    with pytest.raises(RecipeError, match=f"{place} must be 2 to 8, or null for float; got {number}"):
        PAPER.with_value(place, number)


def test_bits_of_an_override_are_2_to_8() -> None:
    with pytest.raises(RecipeError, match=r"overrides.head\*.weights must be 2 to 8.*got 1"):
        Recipe(overrides={"head*": Override(weights=1)})


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((ScaleSearch(), ScaleSearch(rounds=1)), "only once"),
        (
            (ScaleSearch(), MlpReconstruction()),
            "in the order rotation, mlp_reconstruction, ",
        ),
        ((BlockReconstruction(), ScaleSearch()), "in the order"),
        ((MlpReconstruction(),), "needs the stage scale_search"),
    ],
)
def test_stages_that_make_no_sense_together_are_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Recipe(stages=stages)


def test_a_float_recipe_needs_no_scales() -> None:
    Recipe(weights=Weights(bits=None), activations=Activations(bits=None), stages=(MlpReconstruction(),))


NUMBERS = [
    (cls.NAME, f.name)
    for cls in STAGES.values()
    for f in dataclasses.fields(cls)
    if isinstance(f.default, float) and f.name != "kind"
]


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf", "1e400"])
@pytest.mark.parametrize(("stage", "name"), NUMBERS)
def test_no_number_may_be_nan_or_infinite(stage: str, name: str, text: str) -> None:
    search = "" if stage == "scale_search" else "{kind: scale_search}"
    mine = f"{{kind: {stage}, {name}: {text}}}"
    order = [mine, search] if stage == "mlp_reconstruction" else [search, mine]
    with pytest.raises(RecipeError, match=rf"{stage}\.{name} must be finite"):
        Recipe.from_text(f"stages: [{', '.join(filter(None, order))}]")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("importance.temperature", float("nan"), "importance.temperature must be finite"),
        ("importance.probes", 0, "importance.probes must be positive"),
        ("block_reconstruction.batch", 0, "block_reconstruction.batch must be positive"),
        ("block_reconstruction.warmup", 1.5, "block_reconstruction.warmup must be at most 1"),
        ("mlp_reconstruction.percentile", 99.0, "mlp_reconstruction.percentile must be at most 1"),
        ("steps", -1, "steps must be positive"),
        ("calibration.images", 0, "calibration.images must be at least 1"),
        ("calibration.batch", -2, "calibration.batch must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PAPER.with_value(path, value)


# -- changing a recipe -------------------------------------------------------------------------------------------------


def test_with_value_changes_one_field_and_leaves_the_original() -> None:
    changed = PAPER.with_value("weights.bits", 3)
    assert changed.weights == Weights(bits=3)
    assert PAPER.weights == Weights()
    assert differences(PAPER.to_dict(), changed.to_dict()) == ["weights.bits: 4 -> 3"]


def test_with_value_reaches_one_stage_or_every_stage() -> None:
    one = PAPER.with_value("block_reconstruction.importance.kind", "mse")
    assert one.stage("block_reconstruction") == BlockReconstruction(importance=Importance(kind="mse"))
    assert one.stage("mlp_reconstruction") == MlpReconstruction()
    every = PAPER.with_value("importance.kind", "mse").with_value("steps", 7)
    assert every.stage("block_reconstruction") == BlockReconstruction(steps=7, importance=Importance(kind="mse"))
    assert every.stage("mlp_reconstruction") == MlpReconstruction(steps=7, importance=Importance(kind="mse"))
    assert every.stage("scale_search") == ScaleSearch()


@pytest.mark.parametrize("value", [{"weights": 8}, Override(weights=8)])
def test_with_value_adds_an_override(value: Any) -> None:
    recipe = PAPER.with_value("overrides.blocks.0.attn.qkv", value).with_value("overrides.head", None)
    assert recipe.overrides == {"blocks.0.attn.qkv": Override(weights=8), "head": None}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("wieghts.bits", 4, "unknown recipe field 'wieghts.bits': did you mean 'weights'"),
        ("weights.bit", 4, "unknown recipe field 'weights.bit': did you mean 'bits'"),
        ("block_reconstruction.stepz", 4, "'block_reconstruction.stepz': did you mean 'steps'"),
        ("block_reconstruction", 4, "unknown recipe field"),
        ("weights.bits.low", 4, "'bits' has no parts"),
        ("weights.bits", "4", "weights.bits must be of type int, got '4'"),
        ("overrides.head", {"weight": 4}, "unknown key 'overrides.head.weight': did you mean 'weights'"),
    ],
)
def test_with_value_refuses_what_does_not_exist_or_fit(path: str, value: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PAPER.with_value(path, value)


def test_with_value_refuses_a_stage_the_recipe_lacks() -> None:
    fast = preset("w8a8", "fast")
    with pytest.raises(RecipeError, match="the recipe has no stage block_reconstruction"):
        fast.with_value("block_reconstruction.steps", 4)
    with pytest.raises(RecipeError, match="no stage of this recipe has it"):
        fast.with_value("steps", 4)


def test_without_drops_stages_by_name() -> None:
    less = PAPER.without("mlp_reconstruction", "block_reconstruction")
    assert less.stages == (LayerNormReparameterisation(), ScaleSearch())
    assert less.without("mlp_reconstruction") == less
    with pytest.raises(RecipeError, match="did you mean 'mlp_reconstruction'"):
        PAPER.without("mlp_reconstructoin")


# -- bits of a layer ---------------------------------------------------------------------------------------------------


def test_bits_follow_the_last_pattern_that_matches() -> None:
    recipe = Recipe(overrides={"blocks.*": Override(8, 8), "*.qkv": Override(weights=3), "blocks.1.*": None})
    assert recipe.bits_for("head") == (4, 4)
    assert recipe.bits_for("blocks.0.mlp.fc1") == (8, 8)
    assert recipe.bits_for("blocks.0.attn.qkv") == (3, 8), "a field left out keeps what came before"
    assert recipe.bits_for("blocks.1.attn.qkv") == (None, None), "None is float"


def test_an_override_may_leave_one_side_in_float() -> None:
    recipe = Recipe(overrides={"head": Override(activations=None), "fc": Override(weights=None)})
    assert recipe.bits_for("head") == (4, None)
    assert recipe.bits_for("fc") == (None, 4)


def test_the_image_has_its_own_bits() -> None:
    assert Recipe().bits_for("patch_embed.proj", sees_image=True) == (4, 8)
    assert Recipe(activations=Activations(bits=None)).bits_for("p", sees_image=True) == (4, None)
    assert Recipe(overrides={"p": Override(activations=6)}).bits_for("p", sees_image=True) == (4, 6)


# -- differences -------------------------------------------------------------------------------------------------------


def test_differences_name_the_leaves() -> None:
    new = PAPER.with_value("weights.bits", 3).with_value("scale_search.rounds", 1)
    assert differences(PAPER.to_dict(), new.to_dict()) == ["weights.bits: 4 -> 3", "stages[2].rounds: 3 -> 1"]
    assert differences(PAPER.to_dict(), json.loads(PAPER.to_json())) == []
    assert differences(PAPER.to_dict(), yaml.safe_load(PAPER.to_yaml())) == []


def test_a_stage_more_or_less_is_a_difference() -> None:
    (found,) = differences(PAPER.to_dict(), PAPER.without("mlp_reconstruction").to_dict())
    assert found.startswith("stages: ")


def test_a_layer_newly_left_in_float_is_a_difference() -> None:
    new = PAPER.with_value("overrides.head", None)
    assert differences(PAPER.to_dict(), new.to_dict()) == ["overrides.head: absent -> None"]


def test_the_order_of_patterns_is_a_difference() -> None:
    a, b = {"*": Override(8, 8)}, {"head": Override(4, 4)}
    (found,) = differences(Recipe(overrides={**a, **b}).to_dict(), Recipe(overrides={**b, **a}).to_dict())
    assert found.startswith("overrides: order")


def test_fresh_views_and_an_importance_of_each_image_do_not_go_together() -> None:
    with pytest.raises(RecipeError, match="fresh views need an importance that all images share"):
        preset("w3a3", "balanced").with_value("importance.kind", "ph").with_value("views.every", 10)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_reconstruction.views.every", 10, "either `every` or `copies`"),
        ("block_reconstruction.views.cutmix", 0.7, "share the views"),
        ("joint_tuning.views.copies", 2, "no copies here"),
    ],
)
def test_views_that_make_no_sense_are_refused(field: str, value: float, message: str) -> None:
    recipe = preset("w3a3", "best").with_value("block_reconstruction.views.copies", 3)
    recipe = recipe.with_value("block_reconstruction.views.mixup", 0.5).with_value("joint_tuning.views.every", 0)
    with pytest.raises(RecipeError, match=message):
        recipe.with_value(field, value)


def test_stages_are_added_in_their_place_and_replaced_by_name() -> None:
    recipe = preset("w4a4", "balanced").including(JointTuning(steps=3), Rotation())
    assert recipe.stages[0] == Rotation()
    assert recipe.stages[-1] == JointTuning(steps=3)
    assert recipe.including(JointTuning(steps=5)).stage("joint_tuning") == JointTuning(steps=5)
