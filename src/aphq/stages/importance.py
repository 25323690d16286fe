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
from dataclasses import dataclass

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.hooks import change_outputs
from aphq.engine.ragged import RaggedRows
from aphq.engine.seeds import generator_for
from aphq.engine.store import Activations, Rows
from aphq.engine.workspace import Visit, Workspace
from aphq.models.architecture import Unit, Value, rows_of, run_units, unit_sites
from aphq.stages.fisher_of_scenes import fisher_of_scenes
from aphq.stages.probes import Probed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImportanceMap:
    """Weights of a squared error: none (mse), shared by all samples, or one set per sample."""

    shared: Tensor | None = None  # [1, ...]
    each: Rows | None = None  # [samples, ...]

    def weigh(self, squared_error: Tensor, index: Tensor) -> Tensor:
        if self.shared is not None:
            return squared_error * self.shared
        return squared_error if self.each is None else squared_error * self.each[index]


class Importances:
    """Importance maps for the sites of one stage, estimated as its walk comes along."""

    def __init__(self, work: Workspace, config: settings.Importance) -> None:
        self.work, self.config = work, config
        fisher = config.kind == "fisher"
        self.fisher = fisher_diagonals(work, config) if fisher and not work.images.ragged else {}
        self.of_scenes = fisher_of_scenes(work, config) if fisher and work.images.ragged else {}

    def at(self, site: str, visit: Visit) -> ImportanceMap:
        """The map for the output of module `site`, which lies in the unit of this visit."""
        kind = self.config.kind
        if kind == "mse" or visit.unit.kind == "neck":  # several maps of different meaning have no common importance
            return ImportanceMap()
        if self.of_scenes:
            return ImportanceMap(each=self.of_scenes[site])
        if kind == "fisher":
            diagonal = self.fisher[site].to(self.work.device)
            powered = (diagonal / diagonal.max().clamp_min(1e-30)).pow(self.config.power)
            return ImportanceMap(shared=normalised(powered, site))
        if kind == "aph" and not self.work.images.ragged:  # images of different sizes have no mean: each has its own
            return ImportanceMap(shared=normalised(self._mean_over_samples(site, visit), site))
        each = self._for_each_sample(site, visit)
        for item in each.items if isinstance(each, RaggedRows) else [each]:
            item.data.copy_(normalised(item.data, site))
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

        target = self.work.teacher_logits[rows]
        with torch.enable_grad(), change_outputs({site: model.get_submodule(site)}, change):
            logits = self._suffix(visit.unit, visit.unit.run(model, source[rows]))
            loss = self.work.distillation.loss(logits, target, self.config.temperature)
            # the loss is a mean over the batch: undone, so that an image counts the same in a short last batch
            return torch.autograd.grad(loss, leaf[0])[0].mul_(rows_of(target))

    def _suffix(self, unit: Unit, output: Value) -> Value:
        """A unit's output to the logits, through the float teacher."""
        rest = self.work.units[self.work.units.index(unit) + 1 :]
        return run_units(self.work.teacher, rest, unit.bridge(self.work.teacher, output))

    def _mean_over_samples(self, site: str, visit: Visit) -> Tensor:
        total: Tensor | None = None
        count, batch = len(self.work.images), self.work.pass_batch  # views come behind them, and do not count
        for number, start in enumerate(range(0, count, batch)):
            if self.work.ranks.owns(number):
                rows = slice(start, min(count, start + batch))
                part = self._sample_map(site, visit, rows).sum(0, keepdim=True)
                total = part if total is None else total + part
        if total is None:  # more processes than batches
            total = torch.zeros_like(self._sample_map(site, visit, slice(0, 1)))
        return self.work.ranks.add([total])[0] / count

    def _for_each_sample(self, site: str, visit: Visit) -> Activations | RaggedRows:
        if self.work.images.ragged:
            rows = RaggedRows(self.work.store)
            for number in range(len(visit.teacher_in)):
                rows.append(self._sample_map(site, visit, slice(number, number + 1)))
            return rows
        kept: Activations | None = None
        count, batch = len(visit.teacher_in), self.work.pass_batch
        for start in range(0, count, batch):
            part = self._sample_map(site, visit, slice(start, start + batch))
            kept = kept or self.work.store.allocate((count, *part.shape[1:]))
            kept.data[start : start + len(part)].copy_(part)
        assert kept is not None
        return kept


def fisher_diagonals(work: Workspace, config: settings.Importance) -> dict[str, Tensor]:
    """Mean squared gradients of random probes at the output of every unit and every MLP, all from the same passes.

    Only the teacher is asked, so the stages share them, and a run that goes on finds them in its folder.
    """
    kept = f"fisher-{config.probes}-{config.temperature:g}"
    if kept in work.shared:
        return work.shared[kept]
    saved = work.recall("importance", kept)
    if saved is not None:
        return saved
    sites = [site for unit in work.units if unit.kind != "head" for site in unit_sites(unit)]
    generator = generator_for(work.recipe.seed, "fisher")
    totals: dict[str, Tensor] = {}
    images = work.image_rows()
    classes = 0
    for number, start in enumerate(range(0, len(images), work.batch)):
        if number > 0 and not work.ranks.owns(number):  # everyone does the first, which tells the shapes
            for _ in range(config.probes):  # drawn elsewhere
                torch.randn(min(work.batch, len(images) - start), classes, generator=generator)
            continue
        probed = Probed(work, sites, images[slice(start, start + work.batch)])
        classes = probed.prediction.shape[1]
        for grads in probed.gradients(config.probes, config.temperature, generator):
            for site, grad in grads:
                part = grad.square().sum(0, keepdim=True)  # not in place: the same tensor may serve two sites
                part = part if work.ranks.owns(number) else torch.zeros_like(part)
                totals[site] = totals[site].add_(part) if site in totals else part
    sums = work.ranks.add(list(totals.values()))
    diagonals = {site: total / len(images) for site, total in zip(totals, sums, strict=True)}
    work.folder.save("importance", kept, diagonals)
    work.shared[kept] = diagonals
    return diagonals


def normalised(values: Tensor, site: str) -> Tensor:
    """Scaled to root mean square 1; a map without any signal becomes plain mean squared error, and says so."""
    largest = values.max()
    if not torch.isfinite(largest) or largest <= 0:
        log.warning("the importance of %s is zero or not finite everywhere; its error is left unweighted", site)
        return torch.ones_like(values)
    values = values / largest  # first, so that squares of tiny numbers do not vanish
    return values / values.square().mean().sqrt()
