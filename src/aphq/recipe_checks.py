"""Recipes whose values have the right type and still make no sense."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from aphq.errors import RecipeError
from aphq.settings import STAGES, BlockReconstruction, Importance, JointTuning, MlpReconstruction, Views
from aphq.typed import shown

if TYPE_CHECKING:
    from aphq.recipe import Recipe


def check_runnable(recipe: Recipe) -> None:
    """A recipe under construction may have no stages yet; one that runs needs those that make it work."""
    if _quantizes(recipe) and "scale_search" not in {stage.NAME for stage in recipe.stages}:
        raise RecipeError(
            "recipe: it quantizes but has no stage scale_search, so nothing would set the scales: give its `stages`, "
            "or start from a preset such as w4a4 (`aphq recipe show w4a4` prints one)"
        )


def _quantizes(recipe: Recipe) -> bool:
    bits = [recipe.weights.bits, recipe.activations.bits]
    for override in recipe.overrides.values():
        bits += [] if override is None else [override.weights, override.activations]  # type: ignore[list-item]
    return any(isinstance(value, int) for value in bits)


def check(recipe: Recipe) -> None:
    """Raise RecipeError, naming the field."""

    def require(ok: bool, message: str) -> None:
        if not ok:
            raise RecipeError(f"recipe: {message}")

    bits: dict[str, Any] = {
        "weights.bits": recipe.weights.bits,
        "activations.bits": recipe.activations.bits,
        "activations.image_bits": recipe.activations.image_bits,
    }
    for pattern, override in recipe.overrides.items():
        if override is not None:
            bits |= {
                f"overrides.{pattern}.weights": override.weights,
                f"overrides.{pattern}.activations": override.activations,
            }
    for name, value in bits.items():
        require(
            value in (None, "recipe") or 2 <= value <= 8,
            f"{name} must be 2 to 8, or null for float; got {shown(value)}",
        )
    require(0 <= recipe.seed < 2**63, f"seed must be from 0 to 2^63 - 1; got {shown(recipe.seed)}")
    require(recipe.calibration.images >= 1, "calibration.images must be at least 1")
    require(recipe.calibration.batch >= 1, "calibration.batch must be at least 1")

    names = [stage.NAME for stage in recipe.stages]
    require(len(set(names)) == len(names), f"a stage may appear only once; got {', '.join(names)}")
    require(names == sorted(names, key=list(STAGES).index), f"stages must come in the order {', '.join(STAGES)}")
    if names and _quantizes(recipe):
        require("scale_search" in names, "a recipe that quantizes needs the stage scale_search (or bits: null)")
    both = {"error_compensation", "block_reconstruction"} <= set(names)
    require(not both, "error_compensation and block_reconstruction both round the weights for good: leave one out")

    for stage in recipe.stages:
        for f in dataclasses.fields(stage):
            _check_number(stage, f.name, require)
        views = getattr(stage, "views", Views())
        require(views.mixup + views.cutmix <= 1, f"{stage.NAME}.views: mixup and cutmix share the views, at most 1")
        require(not (views.every and views.copies), f"{stage.NAME}.views: either `every` or `copies`, not both")
        if isinstance(stage, JointTuning):
            require(not views.copies, "joint_tuning.views: no copies here; fresh views come by `every`")
        if isinstance(stage, (MlpReconstruction, BlockReconstruction)) and (views.every or views.copies):
            fits = stage.importance.kind not in ("ph", "brecq")
            require(fits, f"{stage.NAME}: fresh views need an importance that all images share (fisher, aph or mse)")


SHARES = {"percentile", "quantized_share", "input_quantized_share", "warmup", "narrowest"}
SHARES |= {"smallest_crop", "jitter", "mixup", "cutmix"}  # of Views
MAY_BE_ZERO = {"steps", "rounds", "outlier_candidates", "alpha", "regulariser", "warmup", "gamma", "power", "settling"}
MAY_BE_ZERO |= {"every", "copies", "jitter", "mixup", "cutmix"}
MAY_BE_ZERO |= {"input_quantized_share", "float_lr", "weight_lr", "scale_lr", "feature_weight", "logit_weight"}


def _check_number(owner: Any, name: str, require: Any) -> None:
    value = getattr(owner, name)
    where = f"{getattr(owner, 'NAME', type(owner).__name__.lower())}.{name}"
    if isinstance(value, (Importance, Views)):
        for f in dataclasses.fields(value):
            _check_number(value, f.name, require)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        finite = abs(value) <= sys.float_info.max  # math.isfinite fails on integers beyond that
        require(finite, f"{where} must be finite; got {shown(value)}")
        signed_right = value > 0 or (value == 0 and name in MAY_BE_ZERO) or name == "gamma"
        require(signed_right, f"{where} must be positive; got {shown(value)}")
        require(name not in SHARES or value <= 1, f"{where} must be at most 1; got {shown(value)}")
