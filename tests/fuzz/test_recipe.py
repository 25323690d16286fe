"""`Recipe.load` of files with anything in them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aphq.errors import RecipeError
from aphq.presets import preset
from aphq.recipe import Recipe

from .cases import cases
from .isolation import outcome_of
from .mutation import Spoiler

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefghi", "bcdefghij", strict=True)
)
SCALARS = [
    "2026-99-99", "1:99:99", "0x" + "f" * 9000, "9" * 5000, "!!timestamp x", "!!bool x", "!!int ''", "!!float x",
    "!!binary '%'", "!!python/object/apply:os.system [ls]", "*nowhere", "&a [*a]", "'", "\"\\ud800\"", "{[1]: 2}",
    "? [a]",
]  # fmt: skip


def load_and_use(path: Path) -> None:
    """A correct load can be written and read again, and asked for bits."""
    recipe = Recipe.load(path)
    assert Recipe.from_text(recipe.to_json()) == recipe
    recipe.bits_for("blocks.0.attn.qkv")


@cases(0.2)
@given(data=st.data())
def test_recipe(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    recipe = preset(spoiler.one_of(["w4a4", "w8a8", "w3a3"]), spoiler.one_of(["fast", "balanced", "best"]))
    recipe = recipe.with_value("overrides.head", {"weights": 8})
    way = spoiler.below(4)
    if way < 2:
        text = spoiler.json_text(recipe.to_json()).encode("utf-8", "surrogatepass")
    elif way == 2:
        lines = recipe.to_yaml().splitlines()
        at = spoiler.below(len(lines))
        lines[at] = lines[at].split(":")[0] + ": " + spoiler.one_of(SCALARS)
        text = "\n".join(lines).encode("utf-8", "surrogatepass")
    else:
        text = spoiler.bytes(recipe.to_yaml().encode())
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_bytes(text)
    outcome_of(lambda: load_and_use(path), seconds=10, most=128 * 2**20)


@pytest.mark.parametrize("text", [LAUGHS, "&a [*a]", "&a {b: *a}", "[" * 200_000, "{" * 200_000, "x" * (2**20 + 1)])
def test_a_bomb_is_refused_at_once(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    done = outcome_of(lambda: Recipe.load(tmp_path / "recipe.yaml"), seconds=10, most=128 * 2**20)
    assert done.kind == "refused"


def test_a_bomb_inside_a_field_is_not_printed(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        Recipe.from_text(f"{LAUGHS}\nname: *j\n")
    assert len(str(caught.value)) < 1000
