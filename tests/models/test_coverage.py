from typing import Any

from torch import nn

from aphq.models import architecture_of
from aphq.models.attention import OpenAttention
from aphq.models.coverage import BY_RECIPE, coverage
from aphq.models.student import make_student
from aphq.recipe import Override, Recipe, Weights


def student_of(model: nn.Module, recipe: Recipe) -> nn.Module:
    architecture = architecture_of(model)
    return make_student(model, architecture, architecture.units(model), recipe)


def test_every_layer_and_product_has_a_row_and_none_is_float(variant: Any) -> None:
    architecture_of(variant).open_attention(variant)
    layers = [n for n, m in variant.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    student = student_of(variant, Recipe())
    attentions = [n for n, m in student.named_modules() if isinstance(m, OpenAttention)]
    rows = coverage(student)
    products = [f"{name}.{product}" for name in attentions for product in ("qk", "pv")]
    assert sorted(row.name for row in rows) == sorted(layers + products)
    assert attentions
    for row in rows:
        assert row.input_bits is not None, row
        assert row.kind == "product" or row.weight_bits is not None, row
        assert row.note == "", row
    weights = sum(variant.get_submodule(name).weight.numel() for name in layers)
    assert sum(row.parameters for row in rows) == weights


def test_rows_tell_bits_and_granularity(tiny_vit: Any) -> None:
    rows = {row.name: row for row in coverage(student_of(tiny_vit, Recipe(weights=Weights(bits=3))))}
    embed, qk = rows["patch_embed.proj"], rows["blocks.0.attn.qk"]
    assert (embed.kind, embed.weight_bits, embed.weight_granularity) == ("convolution", 3, "channel")
    assert (embed.input_bits, embed.input_granularity, embed.parameters) == (8, "tensor", 32 * 3 * 64)
    assert (qk.kind, qk.weight_bits, qk.input_bits, qk.input_granularity) == ("product", None, 4, "head")
    coarse = coverage(student_of(tiny_vit, Recipe(weights=Weights(granularity="tensor"))))
    assert {row.weight_granularity for row in coarse if row.kind != "product"} == {"tensor"}


def test_what_the_recipe_leaves_in_float_says_so(tiny_vit: Any) -> None:
    recipe = Recipe(overrides={"head": None, "*.fc1": Override(activations=None), "*.qk": None})
    rows = {row.name: row for row in coverage(student_of(tiny_vit, recipe))}
    assert rows["head"].note == f"weights and input {BY_RECIPE}"
    assert (rows["head"].weight_bits, rows["head"].input_bits) == (None, None)
    assert rows["blocks.0.mlp.fc1"].note == f"input {BY_RECIPE}"
    assert rows["blocks.1.attn.qk"].note == BY_RECIPE


def test_a_layer_that_is_not_ours_shows_up_as_float(tiny_vit: Any) -> None:
    student: Any = student_of(tiny_vit, Recipe())
    student.extra = nn.ModuleList([nn.Conv1d(2, 3, 1), nn.MultiheadAttention(8, 2)])
    rows = {row.name: row for row in coverage(student)}
    assert rows["extra.0"].note == "Conv1d is not supported"
    assert rows["extra.0"].parameters == 9
    assert rows["extra.1"].weight_bits is None
