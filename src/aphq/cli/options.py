"""From words on the command line to values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aphq.errors import DataError, ModelError, RecipeError

if TYPE_CHECKING:
    from aphq.data.scenes import ScenePreprocessing
    from aphq.recipe import Recipe

SAID_ELSEWHERE = {  # arguments of models that the command line has words of its own for
    "name": "the model's name itself",
    "model_name": "the model's name itself",
    "num_classes": "--num-classes",
    "weights": "--weights",
    "pretrained": "--weights, without which they are fetched",
}


def parse_changes(pairs: list[str] | None) -> dict[str, Any]:
    """`["steps=500", "overrides.head=null"]` -> {"steps": 500, "overrides.head": None}; values are YAML."""
    import yaml

    changes = {}
    for pair in pairs or []:
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise RecipeError(f"expected NAME=VALUE, got {pair!r}")
        try:
            changes[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise RecipeError(f"cannot read the value in {pair!r}") from None
    return changes


def model_arguments(pairs: list[str] | None) -> dict[str, Any]:
    """Arguments of timm.create_model; its tuples are written as YAML lists."""
    found = parse_changes(pairs)
    for name in SAID_ELSEWHERE.keys() & found:
        raise ModelError(f"--model-arg {name}=...: that is said by {SAID_ELSEWHERE[name]}")
    return {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}


def recipe_from(
    bits: str,
    effort: str | None,
    seed: int | None,
    images: int | None,
    changes: dict[str, Any],
    without: list[str] | None,
) -> Recipe:
    """A preset or a recipe file, with the command line's changes on top."""
    from aphq.presets import resolve_recipe

    recipe = resolve_recipe(bits, effort).without(*(without or []))
    if seed is not None:
        changes = {"seed": seed, **changes}
    if images is not None:
        changes = {"calibration.images": images, **changes}
    for name, value in changes.items():
        recipe = recipe.with_value(name, value)
    return recipe


def labels_from(val: Path | None, coco: Path | None, images: Path | None) -> Any:
    """What to measure on: a folder of classes, or COCO annotations with their images; None if nothing is given."""
    if (coco is None) != (images is None):
        raise DataError("COCO annotations and the folder of their images go together: give both, or none")
    if val is not None and coco is not None:
        raise DataError("--val is for classifiers and --coco for detectors: give one of them")
    return val if coco is None else (coco, images)


def scene_rules(model: Any, short_side: int | None) -> ScenePreprocessing | None:
    """How a detector's images are resized, if not as usual: the long side is limited in proportion."""
    from dataclasses import replace

    from aphq.models.architecture import architecture_of
    from aphq.models.detection.family import DetectionArchitecture

    if short_side is None:
        return None
    family = architecture_of(model)
    if not isinstance(family, DetectionArchitecture):
        raise RecipeError("--short-side is for detectors; a classifier has one size, see --model-arg img_size=...")
    usual = family.scenes(model)
    longest = max(short_side, round(short_side * usual.longest / usual.shortest))
    return replace(usual, shortest=short_side, longest=longest)


def batch_size(text: str) -> int | None:
    """`any` -> None; a number -> that many images."""
    if text == "any":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise RecipeError(f"expected a number of images or `any`, got {text!r}")
    return int(text)
