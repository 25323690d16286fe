"""How sensitive each layer and product is: quantized alone, and everything quantized but it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aphq.analysis.held_out import Distances, HeldOut, sides, switched
from aphq.engine.hooks import watch_inputs
from aphq.engine.workspace import Workspace
from aphq.models.student import enable
from aphq.quant.layers import QuantizedLayer, quantized_sites


@dataclass(frozen=True)
class Sensitivity:
    """One site. `alone`: only it is quantized. `without`: everything else is."""

    name: str
    kind: str
    alone: Distances
    without: Distances

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "alone": {"kl": self.alone.kl, "agreement": self.alone.agreement},
            "all_but_it": {"kl": self.without.kl, "agreement": self.without.agreement},
        }


def sensitivities(held_out: HeldOut) -> tuple[Distances, list[Sensitivity]]:
    """(everything quantized, every site ranked by what it alone costs)."""
    work = held_out.work
    sites = {name: site for name, site in quantized_sites(work.student) if sides(site)}
    work.progress.start("sensitivity", 2 * len(sites))
    alone, without = {}, {}
    enable(work.student, False)
    held_out.walk()
    for name, site in sites.items():
        with switched([q for side in sides(site).values() for q in side], True):
            alone[name] = held_out.from_site(name)
        work.progress.advance(1, name)
    enable(work.student)
    everything = held_out.walk()
    for name, site in sites.items():
        with switched([q for side in sides(site).values() for q in side], False):
            without[name] = held_out.from_site(name)
        work.progress.advance(1, name)
    work.progress.finish()
    found = [
        Sensitivity(name, "layer" if isinstance(site, QuantizedLayer) else "product", alone[name], without[name])
        for name, site in sites.items()
    ]
    return everything, sorted(found, key=lambda row: -row.alone.kl)


@dataclass(frozen=True)
class Cost:
    """What one side of a site ("weights" or "activations") costs at some bits, alone."""

    name: str
    side: str
    bits: int
    kl: float


def costs(held_out: HeldOut, bits: int) -> Iterator[Cost]:
    """Every side of every site of a student whose scales were searched at `bits`, quantized alone. Sides at other bits
    (the image) are left out."""
    work = held_out.work
    sites = dict(quantized_sites(work.student))
    work.progress.start(f"costs at {bits} bits", len(sites))
    enable(work.student, False)
    held_out.walk()
    for name, site in sites.items():
        for side, quantizers in sides(site).items():
            if all(quantizer.bits == bits for quantizer in quantizers):
                with switched(quantizers, True):
                    yield Cost(name, side, bits, max(0.0, held_out.from_site(name).kl))
        work.progress.advance(1, name)
    work.progress.finish()


@torch.no_grad()
def element_counts(work: Workspace) -> dict[tuple[str, str], int]:
    """Numbers to store for every side of every site: parameters, and activations of one image."""
    sites = dict(quantized_sites(work.student))
    counts = {(n, "weights"): site.weight.numel() for n, site in sites.items() if isinstance(site, QuantizedLayer)}

    def see(name: str, inputs: tuple[torch.Tensor, ...]) -> None:
        operands = inputs[:1] if isinstance(sites[name], QuantizedLayer) else inputs[:2]
        counts[name, "activations"] = sum(x.numel() for x in operands)

    with watch_inputs(sites, see):
        work.student(work.images.batch(slice(0, 1), work.device))
    return counts
