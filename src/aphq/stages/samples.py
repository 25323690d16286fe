"""What the scale search needs to know of a tensor: its extremes over all images, and a fair sample of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aphq.engine.hooks import watch_inputs
from aphq.engine.seeds import generator_for
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, rows_of
from aphq.quant.layers import QuantizedLayer, QuantizedProduct
from aphq.quant.search import Range, reduce_to

LARGEST_MATRIX = 256  # tokens of an attention product, where those of whole images of any size take part


@dataclass
class Sample:
    """Rows drawn evenly from the batches, and the range per group over everything seen."""

    groups: tuple[int, ...]
    parts: list[Tensor] = field(default_factory=list)
    lower: Tensor | None = None
    upper: Tensor | None = None

    def add(self, x: Tensor, rows: Tensor) -> None:
        """Everything that was seen, and the rows drawn from it."""
        lower, upper = reduce_to(x, self.groups, torch.amin), reduce_to(x, self.groups, torch.amax)
        self.lower = lower if self.lower is None else torch.minimum(self.lower, lower)
        self.upper = upper if self.upper is None else torch.maximum(self.upper, upper)
        self.parts.append(rows)

    @property
    def values(self) -> Tensor:
        """All rows; of matrices of different sizes as much as they have in common, spread evenly over each. Tokens that
        are left out of one operand of a product are left out of the other."""
        shapes = {part.shape[1:] for part in self.parts}
        if len(shapes) == 1:
            return torch.cat(self.parts)
        common = [min(*sides, LARGEST_MATRIX) for sides in zip(*shapes, strict=True)]
        return torch.cat([_thinned(part, common) for part in self.parts])

    @property
    def range(self) -> Range:
        assert self.lower is not None, "nothing was sampled"
        assert self.upper is not None
        return Range(self.lower, self.upper)


def _thinned(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """[samples, ...] with so many of the entries along each of its other dimensions, evenly."""
    for dim, size in enumerate(sizes, start=1):
        if x.shape[dim] > size:
            x = x.index_select(dim, torch.linspace(0, x.shape[dim] - 1, size).long().to(x.device))
    return x


Samples = dict[str, tuple[Sample, ...]]  # site -> its input, or the left and right operand of a product


@torch.no_grad()
def sample_inputs(
    work: Workspace,
    unit: Unit,
    rows: Rows,
    sites: dict[str, QuantizedLayer | QuantizedProduct],
    groups: dict[str, tuple[int, ...]],
    tokens: int,
) -> Samples:
    """Run the student's unit once over `rows` and sample what each site gets.

    A layer's input is sampled by rows [tokens, in]; an attention product by whole matrices [samples, heads, n, k], or
    by some of their n rows where whole images are looked at. Exponentials are sampled as the probabilities they become.
    """
    generator = generator_for(work.recipe.seed, "sample_inputs", unit.name)
    samples: Samples = {}
    share = tokens / len(rows)  # rows wanted per image

    def see(name: str, inputs: tuple[Tensor, ...]) -> None:
        site = sites[name]
        if isinstance(site, QuantizedLayer):
            picked = pick(site.row_count(inputs[0]), share * batch_size, inputs[0].device)
            seen: tuple[Tensor, ...] = (site.channels_last(inputs[0]),)
            drawn: tuple[Tensor, ...] = (site.rows_at(inputs[0], picked),)
        else:
            left, right, *total = inputs
            seen = (left / total[0] if total else left, right)
            picked = pick(len(seen[0]), share * batch_size / seen[0].shape[-2], seen[0].device)
            left, right = (x.index_select(0, picked) for x in seen)
            drawn = (_thinned(left, [left.shape[1], LARGEST_MATRIX]) if work.images.ragged else left, right)
        kept = samples.setdefault(name, tuple(Sample(groups[name]) for _ in seen))
        for sample, x, rows in zip(kept, seen, drawn, strict=True):
            sample.add(x, rows)

    def pick(count: int, wanted: float, device: torch.device) -> Tensor:
        return torch.randperm(count, generator=generator)[: max(1, round(wanted))].to(device)

    with watch_inputs(sites, see):
        for start in range(0, len(rows), work.batch):
            x = rows[slice(start, start + work.batch)]
            batch_size = rows_of(x)
            unit.run(work.student, x)
    return samples
