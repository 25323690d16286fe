"""The Fisher diagonal for images of different sizes: where in each image, times which channel.

Such images have no common map, and a full map of every image at every unit would take as much room as all activations
of the network. So the importance of position p and channel c in image i is kept as a product, place_i(p) * channel(c):
the mean over the channels of the squared gradients of the probes, times the mean over all places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.ragged import RaggedRows
from aphq.engine.seeds import generator_for
from aphq.engine.workspace import Workspace
from aphq.models.architecture import unit_sites
from aphq.stages.probes import Probed

SITES = ("patch_embed", "block", "merge")  # kinds of units whose output is one map


@dataclass(frozen=True)
class Factored:
    """A map per image, as the product of its factors."""

    places: RaggedRows  # [1, height, width, 1] each, or [1, 1, height, width]
    channels: Tensor  # [channels]
    channel_dim: int = -1

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        return self.places.nbytes

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        places = self.places[index]
        shape = [1] * places.ndim
        shape[self.channel_dim] = -1
        return places * self.channels.view(shape)


def fisher_of_scenes(work: Workspace, config: settings.Importance) -> dict[str, Factored]:
    """For the output of every unit that is one map and of every MLP, all from the same passes of the teacher."""
    kept = f"fisher-{config.probes}-{config.temperature:g}"
    found = work.shared.get(kept) or work.recall("importance", kept)
    if found is None:
        found = _squared_gradients(work, config)
        work.folder.save("importance", kept, found)
    work.shared[kept] = found
    return {site: _factored(work, found, site, dim, config.power) for site, dim in _sites(work).items()}


def _sites(work: Workspace) -> dict[str, int]:
    """The modules whose outputs are weighted, and which dimension of each counts the channels."""
    return {site: unit.channel_dim for unit in work.units if unit.kind in SITES for site in unit_sites(unit)}


def _squared_gradients(work: Workspace, config: settings.Importance) -> dict[str, Tensor]:
    """Per site: its `channels`, and the places of image i as `i`."""
    sites = _sites(work)
    generator = generator_for(work.recipe.seed, "fisher")
    images = work.image_rows()
    found: dict[str, Tensor] = {}
    for number in range(len(images)):
        probed = Probed(work, list(sites), images[slice(number, number + 1)])
        squares = {site: torch.zeros_like(probed.outputs[site]) for site in sites}
        for grads in probed.gradients(config.probes, config.temperature, generator):
            for site, grad in grads:
                squares[site].addcmul_(grad, grad)
        for site, square in squares.items():
            key = f"{site}.channels"
            channels = square.movedim(sites[site], -1).flatten(0, -2).mean(0) / len(images)
            found[key] = found[key] + channels if key in found else channels
            found[f"{site}.{number}"] = square.mean(sites[site], keepdim=True).cpu()
    return found


def _factored(work: Workspace, found: dict[str, Tensor], site: str, channel_dim: int, power: float) -> Factored:
    """Both factors to the power, each scaled to root mean square 1; without any signal everything counts alike."""
    channels = found[f"{site}.channels"].to(work.device)
    maps = [found[f"{site}.{number}"] for number in range(len(work.images))]
    largest = max(float(places.max()) for places in maps)
    if not 0 < largest < float("inf"):
        channels, maps, largest = torch.ones_like(channels), [torch.ones_like(places) for places in maps], 1.0
    maps = [(places / largest).pow(power) for places in maps]
    channels = (channels / channels.max()).pow(power)
    elements = sum(places.numel() for places in maps)
    size = (sum(float(places.double().square().sum()) for places in maps) / elements) ** 0.5
    rows = RaggedRows(work.store)
    for places in maps:
        rows.append(places / size)
    return Factored(rows, channels / channels.square().mean().sqrt(), channel_dim)
