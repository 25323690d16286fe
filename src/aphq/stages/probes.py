"""Random probes of the teacher: gradients at chosen outputs, in directions with the covariance of its curvature.

The mean of their squares is the diagonal of the Fisher matrix at those outputs, whatever the task predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aphq.engine.hooks import change_outputs
from aphq.engine.workspace import Workspace
from aphq.models.architecture import run_units


class Probed:
    """One pass of the teacher over some images, ready to be asked at the outputs of the modules `sites`."""

    def __init__(self, work: Workspace, sites: Sequence[str], images: Any) -> None:
        self.work, self.sites = work, sites
        self.outputs: dict[str, Tensor] = {}
        modules = {site: work.teacher.get_submodule(site) for site in sites}
        with torch.enable_grad(), change_outputs(modules, self._keep):
            self.prediction: Any = run_units(work.teacher, work.units, images)

    def _keep(self, site: str, output: Tensor) -> Tensor:
        self.outputs[site] = output if output.requires_grad else output.detach().requires_grad_()
        return self.outputs[site]

    def gradients(
        self, probes: int, temperature: float, generator: torch.Generator
    ) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """For each probe the pairs (site, gradient); the same tensor may serve two sites."""
        named = {"": self.prediction} if isinstance(self.prediction, Tensor) else self.prediction
        detached = {name: x.detach() for name, x in named.items()}
        for probe in range(probes):
            asked = detached[""] if isinstance(self.prediction, Tensor) else detached
            found = self.work.distillation.probe(asked, temperature, generator)
            directions = {"": found} if isinstance(found, Tensor) else found
            grads = torch.autograd.grad(
                [named[name] for name in directions],
                [self.outputs[site] for site in self.sites],
                list(directions.values()),
                retain_graph=probe + 1 < probes,
            )
            yield zip(self.sites, grads, strict=True)
