"""`aphq.analyze`: the sensitivity of every layer without a full run, and a mixed-precision recipe from it.

Scales are searched once per bit-width on a few images, by the stages of effort `fast` cut short; what a layer does to
the prediction is measured on others. That ranks layers, and takes about a minute where a run takes an hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aphq.analysis.budget import Side, allocate, extrapolated, mean_bits
from aphq.analysis.held_out import Distances, HeldOut
from aphq.analysis.sensitivity import Cost, Sensitivity, costs, element_counts, sensitivities
from aphq.data.calibration import CalibrationSet, load_calibration
from aphq.engine.folder import RunFolder
from aphq.engine.loop import matmul_precision
from aphq.engine.progress import Progress
from aphq.engine.store import Store
from aphq.engine.workspace import Workspace
from aphq.errors import DataError, ModelError, RecipeError
from aphq.models.architecture import architecture_of, check_units, predict
from aphq.models.loading import load_model
from aphq.models.student import make_student, opened_copy
from aphq.opening import resolve_device
from aphq.presets import preset
from aphq.recipe import LayerNormReparameterisation, Override, Recipe, ScaleSearch
from aphq.settings import SoftmaxKind
from aphq.stages import RUN_STAGE
from aphq.tasks.classification import probe_images

SEARCHED = 16  # images that scales are searched on
HELD_OUT = 16  # enough to rank by divergence; a share of equal classes wants more, and the time for it
COSTS_ON = 8  # of the held-out images, for costs at several bits
FEWEST, MOST = 2, 8
# The same kind of search as in a run: a mixture made from scales by the tensors' own error was hardly better than
# uniform bits (results/mixed_precision.md).
NORMS = LayerNormReparameterisation(images=SEARCHED, candidates=16, values=True)
SEARCH = ScaleSearch(images=SEARCHED, candidates=16, rounds=1, tokens=256)


@dataclass(frozen=True)
class Proposal:
    """A mixed-precision recipe, and what it spends on average."""

    recipe: Recipe
    weight_bits: float
    activation_bits: float


@dataclass(frozen=True)
class Analysis:
    """What was found at `bits`."""

    bits: str
    images: int  # held out
    everything: Distances  # all sites quantized
    sites: list[Sensitivity]  # the most sensitive first
    proposal: Proposal | None = None

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "bits": self.bits,
            "images": self.images,
            "everything": {"kl": self.everything.kl, "agreement": self.everything.agreement},
            "sites": [site.to_dict() for site in self.sites],
        }
        if self.proposal is not None:
            found["proposal"] = {
                "recipe": self.proposal.recipe.to_dict(),
                "mean_bits": {"weights": self.proposal.weight_bits, "activations": self.proposal.activation_bits},
            }
        return found


def analyze(
    model: nn.Module | str,
    data: Any,
    bits: str | None = None,
    *,
    target_bits: float | None = None,
    effort: str = "balanced",
    images: int = HELD_OUT,
    weights: str | Path | None = None,
    device: str | torch.device = "auto",
    seed: int = 3407,
    progress: Progress | None = None,
) -> Analysis:
    """Quantize every layer and attention product of a classifier alone, and all but it, at the preset `bits` ("w4a4",
    or the nearest to `target_bits`); with `target_bits`, also solve for the mixed-precision recipe at `effort` whose
    weights and activations have that many bits on average."""
    if target_bits is not None and not FEWEST <= target_bits <= MOST:
        raise RecipeError(f"the target must lie between {FEWEST} and {MOST} bits, got {target_bits:g}")
    base = int(min(MOST, max(FEWEST, math.floor((target_bits or 4) + 0.5))))
    bits = bits or f"w{base}a{base}"
    softmax = preset(f"w{base}a{base}", effort).activations.softmax  # one for all bits, as the proposal has
    bench = Bench(model, data, images, weights, resolve_device(device), seed, progress or Progress(), softmax)
    held_out = bench.searched(preset(bits, "fast", seed=seed))
    everything, sites = sensitivities(held_out)
    found = Analysis(bits, len(held_out.images), everything, sites)
    return found if target_bits is None else replace(found, proposal=propose(bench, target_bits, base, effort))


class Bench:
    """A model, the images to search scales on, and those held out."""

    def __init__(
        self,
        model: nn.Module | str,
        data: Any,
        held_out: int,
        weights: str | Path | None,
        device: torch.device,
        seed: int,
        progress: Progress,
        softmax: SoftmaxKind = "probabilities",
    ) -> None:
        loaded = load_model(model, weights) if isinstance(model, str) else model
        self.architecture = architecture_of(loaded)
        if self.architecture.task_of(loaded) != "classification":
            raise ModelError("analyze is for classifiers: a detector or an embedding has no single class to compare")
        self.teacher = opened_copy(loaded, self.architecture).to(device)
        self.units = self.architecture.units(self.teacher)
        self.device, self.seed, self.progress, self.softmax = device, seed, progress, softmax
        preprocessing = self.architecture.preprocessing(self.teacher)
        check_units(self.teacher, self.units, probe_images(preprocessing, device))
        known = load_calibration(data, preprocessing, count=SEARCHED + held_out, seed=seed)
        if len(known) < 2:
            raise DataError("analyze needs at least two images: some to search scales on, others to measure on")
        kept = held_out if len(known) == SEARCHED + held_out else min(held_out, len(known) // 2)
        self.seen: CalibrationSet = known.first(len(known) - kept)
        with torch.no_grad():
            self.images = known.batch(slice(len(known) - kept, None), device)
            self.logits = predict(self.teacher, self.images)

    def searched(self, recipe: Recipe, count: int | None = None) -> HeldOut:
        """A student of the recipe's bits with scales, and the first `count` held-out images before it."""
        recipe = replace(recipe, activations=replace(recipe.activations, softmax=self.softmax), stages=(NORMS, SEARCH))
        student = make_student(self.teacher, self.architecture, self.units, recipe).to(self.device)
        store = Store(self.device, gpu_bytes=None, host_bytes=None, folder=None)
        places = (self.device, store, RunFolder(None), self.progress)
        work = Workspace(self.teacher, student, self.units, self.seen, recipe, *places)
        with matmul_precision("highest"):
            for stage in recipe.stages:
                RUN_STAGE[type(stage)](work, stage)
        return HeldOut(work, self.images[:count], self.logits[:count])


def propose(bench: Bench, target: float, base: int, effort: str) -> Proposal:
    """Costs measured around the target, extrapolated above, and the budget solved."""
    tried = [bits for bits in range(math.floor(target) - 1, math.floor(target) + 2) if FEWEST <= bits <= MOST]
    found: list[Cost] = []
    counts: dict[Side, int] = {}
    for bits in tried:
        held_out = bench.searched(preset(f"w{bits}a{bits}", "fast", seed=bench.seed), COSTS_ON)
        counts = counts or element_counts(held_out.work)
        found += costs(held_out, bits)
    by_side: dict[Side, dict[int, float]] = {}
    for cost in found:
        by_side.setdefault((cost.name, cost.side), {})[cost.bits] = cost.kl
    table = {
        (name, side, bits): kl
        for (name, side), measured in by_side.items()
        for bits, kl in extrapolated(measured, range(FEWEST, MOST + 1)).items()
    }
    chosen = allocate(table, counts, target)
    return Proposal(
        mixed_recipe(chosen, target, base, effort, bench.seed),
        mean_bits(chosen, counts, "weights"),
        mean_bits(chosen, counts, "activations"),
    )


def mixed_recipe(chosen: dict[Side, int], target: float, base: int, effort: str, seed: int) -> Recipe:
    """The preset of the nearest whole bits with an override for every site that differs."""
    overrides: dict[str, Override | None] = {}
    for name in dict.fromkeys(name for name, _ in chosen):
        bits = {side: chosen.get((name, side), base) for side in ("weights", "activations")}
        changed = {side: number for side, number in bits.items() if number != base}
        if changed:
            overrides[name] = Override(**changed)
    uniform = preset(f"w{base}a{base}", effort, seed=seed)
    return replace(uniform, name=f"mixed-{target:g}-{effort}", overrides=overrides)
