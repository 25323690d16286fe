"""Recipes by name: bits (`w3a3`) times effort (`fast`, `balanced`, `paper`, `best`).

The efforts differ in which stages run and for how long:

fast      reparameterisation and scale search, and for weights of fewer than 8 bits error compensation: seconds on a
          GPU, a minute or two on a laptop
balanced  every stage, with a few hundred to a thousand steps per unit, weights of few bits learning straight through
          their rounding, and the `fisher` importance, which is seeded and needs only a few passes for all units
paper     the published recipe: 20 000 steps per unit, augmented images, the `aph` importance
best      a rotated model, 2 000 steps per unit on each image and 31 views of it, weights of few bits learning straight
          through their rounding (others learn to go up or down, in 10 000), then the whole network tuned jointly on
          fresh views
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from aphq.errors import RecipeError
from aphq.recipe import (
    Activations,
    BlockReconstruction,
    Calibration,
    ErrorCompensation,
    Importance,
    JointTuning,
    LayerNormReparameterisation,
    MlpReconstruction,
    Recipe,
    Rotation,
    ScaleSearch,
    Stage,
    Views,
    Weights,
)
from aphq.typed import nearest

Effort = Literal["fast", "balanced", "paper", "best"]
PRESETS = ("w8a8", "w6a6", "w4a8", "w4a4", "w3a3")
EIGHT_BITS = 8  # as wide as the integers of the kernels: a zero-point of its own would no longer fit beside the codes
MLP_RATE = 4e-4  # ten times the published one: with so few steps its MLPs stop half-way (results/README.md)
# Steps of its grid that a weight may move per step of learning. In a thousand steps weights that may go to any code do
# better on images they have not seen than weights that learn to go up or down at the published rate, and more so with
# fewer inputs from the quantized prefix; on ViT-T at W3A3 two thousand steps of it are level with ten thousand of
# learned rounding (results/README.md). Not measured beyond four bits: there is less to learn.
WEIGHT_RATE, QUANTIZED_INPUTS = 0.003, 0.25
# Where activations are fine a unit loses by its weights, much by those that go to and fro between two codes: settling
# takes a tenth to a third off the error of units at W4A8 (results/README.md). Not measured with fewer bits.
SETTLING = 0.01
# Up to here activations lack the levels for GELU's long flat tail, so that MLP reconstruction pays.
LOW_BITS = 4


def preset(bits: str, effort: Effort | str = "balanced", *, seed: int = 3407) -> Recipe:
    """The recipe `wXaY` (X, Y from 2 to 8; the names in PRESETS are the tested ones) at an effort."""
    match = re.fullmatch(r"w([2-8])a([2-8])", bits.lower())
    if match is None:
        raise RecipeError(f"there is no preset {bits!r}: {nearest(bits, PRESETS)} (any wXaY with X and Y from 2 to 8)")
    if effort not in get_args(Effort):
        raise RecipeError(f"there is no effort {effort!r}: {nearest(effort, get_args(Effort))}")
    weight_bits, activation_bits = int(match[1]), int(match[2])
    return Recipe(
        name=f"{bits.lower()}-{effort}",
        seed=seed,
        weights=Weights(bits=weight_bits, symmetric=weight_bits == EIGHT_BITS),
        activations=_activations(weight_bits, activation_bits, effort),
        calibration=Calibration(images=128 if effort == "fast" else 1024, augment=effort == "paper"),
        stages=_stages(weight_bits, activation_bits, effort),
    )


def resolve_recipe(source: Recipe | str | Path, effort: str | None = None) -> Recipe:
    """A recipe, the one in a YAML or JSON file, or a preset's at an effort (balanced unless given)."""
    name = None if isinstance(source, Recipe) else str(source)
    if name is not None and not name.endswith((".yaml", ".yml", ".json")) and not Path(name).is_file():
        return preset(name, "balanced" if effort is None else effort)
    if effort is not None:
        raise RecipeError(f"an effort goes with a preset such as w4a4; {name or 'a recipe'} says itself what to run")
    return source if isinstance(source, Recipe) else Recipe.load(source)


def _activations(weight_bits: int, bits: int, effort: str) -> Activations:
    """At eight bits q, k and v take one symmetric scale each, as integer kernels want it, at no cost in accuracy; below
    that every level counts. Exponentials instead of probabilities take a sixth to a third off what five bits and more
    lose by search alone; with fewer they help some models and harm others, and where scales learn they do not help."""
    plain = effort != "fast" or min(weight_bits, bits) <= LOW_BITS
    found = Activations(bits=bits, softmax="probabilities" if plain else "exponentials")
    return found if bits < EIGHT_BITS else replace(found, attention="tensor", attention_symmetric=True)


def round_to_nearest(bits: str) -> Recipe:
    """The baseline everybody starts from: ranges from the smallest and largest value seen, nothing else."""
    recipe = preset(bits, "fast")
    plain = replace(recipe.activations, softmax="probabilities")
    return replace(recipe, name=f"{bits.lower()}-rtn", activations=plain, stages=(ScaleSearch(method="minmax"),))


def _stages(weight_bits: int, activation_bits: int, effort: str) -> tuple[Stage, ...]:
    mlp = MlpReconstruction(percentile=0.99 if activation_bits == 3 else 0.98)
    norms, search, blocks = LayerNormReparameterisation(), ScaleSearch(), BlockReconstruction()
    if effort != "paper":  # a finer search takes minutes on a CPU and was not better on held-out calibration images
        norms = LayerNormReparameterisation(images=64, candidates=48, values=True)
        search = ScaleSearch(images=64, candidates=48, rounds=1, tokens=1024, outlier_candidates=16)
    if effort == "fast":
        # what stands out less far is not made good by learning here
        search = replace(search, outlier_ratio=5, outlier_fit=True, outlier_copies=4)
        # eight bits leave too little to make up for
        return (norms, search, ErrorCompensation()) if weight_bits < EIGHT_BITS else (norms, search)
    if effort != "paper":
        importance = Importance(kind="fisher")
        steps = 1000 if min(weight_bits, activation_bits) <= LOW_BITS else 300
        if effort == "best":
            steps = 2000 if weight_bits <= LOW_BITS else 10_000
        mlp = replace(mlp, steps=steps, importance=importance, learning_rate=MLP_RATE)
        blocks = replace(blocks, steps=steps, importance=importance)
        if weight_bits <= LOW_BITS:
            settling = SETTLING if activation_bits > LOW_BITS else 0.0
            blocks = replace(blocks, weight_lr=WEIGHT_RATE, settling=settling, input_quantized_share=QUANTIZED_INPUTS)
    if effort == "best":
        views = Views(copies=31, mixup=0.5, cutmix=0.5)
        mlp = replace(mlp, views=replace(views, copies=7))  # does not over-fit, and holds several MLPs' rows at once
        blocks = replace(blocks, views=views, quantized_share=0.8, float_lr=1e-4)
    stages: tuple[Stage, ...] = (norms, search, blocks)
    if activation_bits <= LOW_BITS:
        stages = (mlp, *stages)
    return (Rotation(), *stages, JointTuning()) if effort == "best" else stages
