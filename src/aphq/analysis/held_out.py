"""Held-out images along the chain of units, so that a change in one unit costs only the units from there on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, run_units
from aphq.models.coverage import operands
from aphq.quant.layers import QuantizedLayer, QuantizedProduct, quantized_sites
from aphq.quant.quantizer import Quantizer


@dataclass(frozen=True)
class Distances:
    """How far a student's predictions are from the float model's: mean KL divergence, per cent of equal classes."""

    kl: float
    agreement: float


class HeldOut:
    """Images that no scale was searched on, and what every unit of a student gets of them."""

    def __init__(self, work: Workspace, images: Tensor, logits: Tensor) -> None:
        self.work, self.images, self.logits = work, images, logits
        self.units: tuple[Unit, ...] = work.units
        self.owner = {
            name: number
            for number, unit in enumerate(work.units)
            for prefix in unit.modules
            for name, _ in quantized_sites(work.student, prefix)
        }
        self._inputs: list[Tensor] = []

    @torch.no_grad()
    def walk(self) -> Distances:
        """Keep what every unit of the student, as its quantizers are now, gets."""
        x, self._inputs = self.images, []
        for unit in self.units:
            self._inputs.append(x)
            x = unit.bridge(self.work.student, unit.run(self.work.student, x))
        return self._distances(x)

    @torch.no_grad()
    def from_site(self, name: str) -> Distances:
        """The student's predictions with one site changed since the walk."""
        first = self.owner[name]
        return self._distances(run_units(self.work.student, self.units[first:], self._inputs[first]))

    def _distances(self, logits: Tensor) -> Distances:
        same = (logits.argmax(1) == self.logits.argmax(1)).float().mean()
        return Distances(float(self.work.distillation.loss(logits, self.logits)), 100 * float(same))


def sides(site: QuantizedLayer | QuantizedProduct) -> dict[str, list[Quantizer]]:
    """The quantizers of a site by what a recipe can set: its weights and its activations."""
    found: dict[str, list[Quantizer]] = {}
    for name, quantizer in operands(site).items():
        if quantizer is not None:
            found.setdefault("weights" if name == "weight" else "activations", []).append(quantizer)
    return found


@contextmanager
def switched(quantizers: list[Quantizer], on: bool) -> Iterator[None]:
    """Inside the block some quantizers are on, or off."""
    before = [quantizer.enabled for quantizer in quantizers]
    for quantizer in quantizers:
        quantizer.enabled = on
    try:
        yield
    finally:
        for quantizer, was in zip(quantizers, before, strict=True):
            quantizer.enabled = was
