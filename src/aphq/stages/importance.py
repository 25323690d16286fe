"""How much each output element matters to the final prediction (paper Sec. 3.2).

Importance is a tensor of the shape of a unit's (or MLP's) output that weights its squared error. Choices:

mse     no weights
brecq   squared gradient of the distillation loss at the student's output, per sample (Eq. 2)
ph      perturbation Hessian, per sample: |J(O + eps) - J(O - eps)| for the all-ones perturbation (Eq. 6, 7)
aph     the mean of ph over the samples (Eq. 8)
fisher  diagonal of J^T F J, with F the Fisher matrix of the logits, by random probes

Behind a LayerNorm the all-ones perturbation is invisible in exact arithmetic: what ph and aph measure in float32 is
round-off, spread back through the network, which would follow the square root of the Fisher diagonal. `fisher`
estimates that quantity on purpose, with seeded probes, for all units in the same few passes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aphq import recipe as settings
from aphq.engine.hooks import change_outputs
from aphq.engine.seeds import generator_for
from aphq.engine.store import Activations
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import Unit, run_units
from aphq.stages.distillation import distillation_loss

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportanceMap:
    """Weights of a squared error: none (mse), shared by all samples, or one set per sample."""

    shared: Tensor | None = None  # [1, ...]
    each: Activations | None = None  # [samples, ...]

    def weigh(self, squared_error: Tensor, index: Tensor) -> Tensor:
        if self.shared is not None:
            return squared_error * self.shared
        return squared_error if self.each is None else squared_error * self.each[index]


class Importances:
    """Importance maps for the sites of one stage, estimated as its walk comes along."""

    def __init__(self, work: Workspace, config: settings.Importance, stage: str, sites: Sequence[str]) -> None:
        self.work, self.config = work, config
        self.fisher = self._fisher_maps(stage, sites) if config.kind == "fisher" and sites else {}

    def at(self, site: str, visit: Visit) -> ImportanceMap:
        """The map for the output of module `site`, which lies in the unit of this visit."""
        kind = self.config.kind
        if kind == "mse":
            return ImportanceMap()
        if kind == "fisher":
            return ImportanceMap(shared=normalised(self.fisher[site].to(self.work.device), site))
        if kind == "aph":
            return ImportanceMap(shared=normalised(self._mean_over_samples(site, visit), site))
        each = self._for_each_sample(site, visit)
        each.data.copy_(normalised(each.data, site))
        return ImportanceMap(each=each)

    # -- perturbation Hessian and squared gradient: per site, from the unit's cached input -----------------------------

    def _sample_map(self, site: str, visit: Visit, rows: slice) -> Tensor:
        """[rows, ...]: ph or brecq of some samples."""
        if self.config.kind == "brecq":
            return self._gradient(site, visit, rows, shift=None).square_()
        step = self.config.epsilon
        up = self._gradient(site, visit, rows, shift=step)
        return (up - self._gradient(site, visit, rows, shift=-step)).abs_()

    def _gradient(self, site: str, visit: Visit, rows: slice, shift: float | None) -> Tensor:
        """dL/dO at the output O of `site`: the teacher's shifted by a constant, or (None) the student's as it is."""
        teacher, student = self.work.teacher, self.work.student
        model = teacher if shift is not None else student
        source = visit.teacher_in if shift is not None else visit.student_in
        leaf: list[Tensor] = []

        def change(_: str, output: Tensor) -> Tensor:
            leaf.append((output.detach() + (shift or 0.0)).requires_grad_())
            return leaf[0]

        with torch.no_grad():
            target = self._suffix(visit.unit, visit.teacher_out[rows])
        with torch.enable_grad(), change_outputs({site: model.get_submodule(site)}, change):
            logits = self._suffix(visit.unit, visit.unit.run(model, source[rows]))
            loss = distillation_loss(logits, target, self.config.temperature)
            return torch.autograd.grad(loss, leaf[0])[0]

    def _suffix(self, unit: Unit, output: Tensor) -> Tensor:
        """A unit's output to the logits, through the float teacher."""
        rest = self.work.units[self.work.units.index(unit) + 1 :]
        return run_units(self.work.teacher, rest, unit.bridge(self.work.teacher, output))

    def _mean_over_samples(self, site: str, visit: Visit) -> Tensor:
        total: Tensor | None = None
        count, batch = len(visit.teacher_in), self.work.batch
        for start in range(0, count, batch):
            part = self._sample_map(site, visit, slice(start, start + batch)).sum(0, keepdim=True)
            total = part if total is None else total + part
        assert total is not None
        return total / count

    def _for_each_sample(self, site: str, visit: Visit) -> Activations:
        kept: Activations | None = None
        count, batch = len(visit.teacher_in), self.work.batch
        for start in range(0, count, batch):
            part = self._sample_map(site, visit, slice(start, start + batch))
            kept = kept or self.work.store.allocate((count, *part.shape[1:]))
            kept.data[start : start + len(part)].copy_(part)
        assert kept is not None
        return kept

    # -- Fisher probes: all sites from the same passes ---------------------------------------------------------------

    def _fisher_maps(self, stage: str, sites: Sequence[str]) -> dict[str, Tensor]:
        saved = self.work.folder.load(stage, "importance")
        if saved is not None:
            return saved
        work, config = self.work, self.config
        generator = generator_for(work.recipe.seed, "fisher")
        modules = {site: work.teacher.get_submodule(site) for site in sites}
        totals: dict[str, Tensor] = {}
        images = work.image_rows()
        for start in range(0, len(images), work.batch):
            outputs: dict[str, Tensor] = {}

            def keep(name: str, output: Tensor, outputs: dict[str, Tensor] = outputs) -> Tensor:
                outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
                return outputs[name]

            with torch.enable_grad(), change_outputs(modules, keep):
                logits = work.teacher(images[slice(start, start + work.batch)])
            for probe in range(config.probes):
                direction = fisher_probe(logits.detach() / config.temperature, generator)
                wanted = [outputs[site] for site in sites]
                grads = torch.autograd.grad(logits, wanted, direction, retain_graph=probe + 1 < config.probes)
                for site, grad in zip(sites, grads, strict=True):
                    part = grad.square_().sum(0, keepdim=True)
                    totals[site] = totals[site].add_(part) if site in totals else part
        maps = {site: (total / total.max().clamp_min(1e-30)).pow(config.power) for site, total in totals.items()}
        work.folder.save(stage, "importance", maps)
        return maps


def fisher_probe(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Random vectors [batch, classes] with covariance diag(p) - p p^T, the Fisher matrix of softmax(logits)."""
    p = logits.softmax(dim=-1)
    z = torch.randn(logits.shape, generator=generator).to(logits) * p.sqrt()
    return z - p * z.sum(dim=-1, keepdim=True)


def normalised(values: Tensor, site: str) -> Tensor:
    """Scaled to root mean square 1; a map without any signal becomes plain mean squared error, and says so."""
    largest = values.max()
    if not torch.isfinite(largest) or largest <= 0:
        log.warning("the importance of %s is zero or not finite everywhere; its error is left unweighted", site)
        return torch.ones_like(values)
    values = values / largest  # first, so that squares of tiny numbers do not vanish
    return values / values.square().mean().sqrt()
