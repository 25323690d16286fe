"""Scale search: a range for every quantizer, unit by unit, everything else in float.

One pass of the float student over the images samples the inputs of all sites. A weight, a layer input and either
operand of an attention product are searched alike: first for the least error of the tensor itself, then by turns, the
other side quantized, for the least error of the product (see `aphq.quant.search`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aphq import settings
from aphq.engine.loop import matmul_precision
from aphq.engine.store import Rows
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, Value
from aphq.quant.affine import fake_quantize
from aphq.quant.edges import keep_off_edges
from aphq.quant.layers import QuantizedLayer, QuantizedProduct, quantized_sites
from aphq.quant.quantizer import Quantizer
from aphq.quant.search import Range, Searcher, group_quantile, output_cost, self_cost
from aphq.stages.outliers import has_outliers, logits_from, outlier_range, shrink_outliers
from aphq.stages.samples import Sample, Samples, sample_inputs

Sites = dict[str, QuantizedLayer | QuantizedProduct]


def search_scales(work: Workspace, config: settings.ScaleSearch) -> None:
    """The stage: every quantizer of the student gets its scale and zero-point."""
    todo = [unit for unit in work.units if not work.restore_unit(config.NAME, unit)]
    work.progress.start(config.NAME, len(todo))
    for unit, rows in work.walk_one(work.student, work.image_rows(config.images)) if todo else ():
        if unit in todo:
            sites = {name: site for prefix in unit.modules for name, site in quantized_sites(work.student, prefix)}
            shrunk = _shrink_outliers(work, unit, rows, config)
            samples = _sample(work, unit, rows, sites, config)
            for name, site in sites.items():
                if isinstance(site, QuantizedProduct):
                    search_product(site, samples[name], config)
                elif site.input_quantizer is not None and (name in shrunk or has_outliers(samples[name][0], config)):
                    _search_outlying(work, unit, rows, site, samples[name][0], config, shrunk.get(name, []))
                else:
                    search_layer(site, samples[name][0], config)
                    if unit.kind == "patch_embed" and site.input_quantizer is not None:
                        keep_off_edges(site.input_quantizer, samples[name][0].values)
            work.save_unit(config.NAME, unit)
            work.folder.event("unit", stage=config.NAME, unit=unit.name)
            work.progress.advance(1, unit.name)
    work.progress.finish()


def _sample(work: Workspace, unit: Unit, rows: Rows, sites: Sites, config: settings.ScaleSearch) -> Samples:
    groups = {name: _groups(site) for name, site in sites.items()}
    return sample_inputs(work, unit, rows, sites, groups, config.tokens)


def _shrink_outliers(work: Workspace, unit: Unit, rows: Rows, config: settings.ScaleSearch) -> dict[str, list[int]]:
    """The massive channels of layer inputs that were shrunk, as far as that is possible."""
    if unit.mlp is None:
        return {}
    name = unit.mlp.fc2

    def judge(target: list[Value], massive: list[int]) -> float:
        layer: Any = work.student.get_submodule(name)
        sample = _sample(work, unit, rows, {name: layer}, config)[name][0]
        return _search_outlying(work, unit, rows, layer, sample, config, massive, target)

    massive = shrink_outliers(work, unit, rows, config, judge)
    return {name: massive} if massive else {}


@torch.no_grad()
def _search_outlying(
    work: Workspace,
    unit: Unit,
    rows: Rows,
    layer: QuantizedLayer,
    sample: Sample,
    config: settings.ScaleSearch,
    massive: list[int],
    target: list[Value] | None = None,
) -> float:
    """A layer whose input has massive outliers: the weight by itself, because fitted to an input that clips outliers it
    would try to make up for them; then the input's range by the loss at the logits, which is returned."""
    if target is None:
        target = logits_from(work, unit, rows, config)
    weight = _weight_operand(layer, config)
    weight.start()
    weight.commit()
    if layer.weight_quantizer is not None:
        layer.weight_quantizer.enabled = True
    fits = config.outlier_fit and massive and layer.input_quantizer is not None
    further = [_range_of_others(layer, sample, massive, weight, config)] if fits else []
    found = outlier_range(work, unit, rows, layer, sample, target, config, further)
    if layer.weight_quantizer is not None:
        layer.weight_quantizer.enabled = False
    if found is None or layer.input_quantizer is None:
        return 0.0
    layer.input_quantizer.set_range(found[0].lower, found[0].upper)
    return found[1]


def _range_of_others(
    layer: QuantizedLayer, sample: Sample, massive: list[int], weight: Operand, config: settings.ScaleSearch
) -> Range:
    """The range that fits all but the massive channels best, by the layer's output."""
    others = sample.values.clone()
    others[:, massive] = 0  # which every quantizer gives back
    inputs = Operand(others, layer.input_quantizer, config, sample.groups)
    inputs.start()
    inputs.improve(as_columns(weight.values), as_columns(weight.quantized()))
    assert inputs.found is not None
    return inputs.found


def _groups(site: QuantizedLayer | QuantizedProduct) -> tuple[int, ...]:
    if isinstance(site, QuantizedProduct) and site.left is not None:
        return tuple(site.left.scale.shape)
    return (1,)


class Operand:
    """One side of a product during the search: its values, its quantizer (None: float) and the range found so far."""

    def __init__(
        self,
        values: Tensor,
        quantizer: Quantizer | None,
        config: settings.ScaleSearch,
        groups: tuple[int, ...],
        full: Range | None = None,
    ) -> None:
        self.values, self.quantizer, self.config, self.groups = values, quantizer, config, groups
        self.found: Range | None = None
        if quantizer is not None:
            form = (quantizer.bits, quantizer.symmetric)
            self.searcher = Searcher.of(values, groups, *form, config.candidates, config.narrowest, full)

    @classmethod
    def of_sample(cls, sample: Sample, quantizer: Quantizer | None, config: settings.ScaleSearch) -> Operand:
        return cls(sample.values, quantizer, config, sample.groups, sample.range)

    def start(self) -> None:
        """The first range, from the tensor alone."""
        if self.quantizer is None:
            return
        method, full = self.config.method, self.searcher.full
        if method == "minmax":
            self.found = full
        elif method == "percentile":
            upper = group_quantile(self.values, self.groups, self.config.percentile)
            lower = group_quantile(self.values, self.groups, 1 - self.config.percentile)
            self.found = Range(lower, upper)
        else:
            self.found = self.searcher.start(self_cost(self.values, self.groups, self.quantizer.bits))

    def improve(self, other: Tensor, other_hat: Tensor) -> None:
        """A better range for the product values @ other, the other side quantized."""
        if self.quantizer is not None and self.found is not None:
            cost = output_cost(self.values, other, other_hat, self.groups, self.quantizer.bits)
            self.found = self.searcher.improve(cost, self.found)

    def quantized(self) -> Tensor:
        if self.quantizer is None or self.found is None:
            return self.values
        return fake_quantize(self.values, *self.searcher.affine(self.found), self.quantizer.bits)

    def commit(self) -> None:
        if self.quantizer is not None and self.found is not None:
            self.quantizer.set_range(self.found.lower, self.found.upper)


@torch.no_grad()
def search_layer(layer: QuantizedLayer, sample: Sample, config: settings.ScaleSearch) -> None:
    """Weight [out, in] and input rows [tokens, in]: output = rows @ weight^T."""
    _alternate(_weight_operand(layer, config), Operand.of_sample(sample, layer.input_quantizer, config), config)


def _weight_operand(layer: QuantizedLayer, config: settings.ScaleSearch) -> Operand:
    matrix = layer.weight_rows()
    per_channel = layer.weight_quantizer is not None and layer.weight_quantizer.scale.numel() > 1
    channels = matrix.shape[0] if per_channel else 1
    return Operand(matrix, layer.weight_quantizer, config, (channels, *(1,) * (matrix.ndim - 1)))


@torch.no_grad()
def search_product(product: QuantizedProduct, samples: tuple[Sample, ...], config: settings.ScaleSearch) -> None:
    """left [samples, heads, n, k] @ right [samples, heads, k, m]; the right side is searched as the left of
    the transposed product. Exponentials, of which every row has a 1, need no search."""
    left = Operand.of_sample(samples[0], None if product.divides else product.left, config)
    if product.divides and product.left is not None:
        product.left.set_range(torch.zeros_like(product.left.scale), torch.ones_like(product.left.scale))
    right = Operand.of_sample(samples[1], product.right, config)
    right.values = right.values.transpose(-1, -2).contiguous()
    _alternate(left, right, config)


def as_columns(rows: Tensor) -> Tensor:
    """[..., rows, inner] -> [..., inner, rows]; a transposed convolution's [out, taps, inner] is one matrix."""
    return rows.flatten(0, 1).T if rows.ndim == 3 else rows.transpose(-1, -2)


def _alternate(a: Operand, b: Operand, config: settings.ScaleSearch) -> None:
    """Both operands as rows over the inner dimension: their product is a @ b^T."""
    a.start()
    b.start()
    if config.method == "output_mse":
        with matmul_precision("high"):  # errors of errors: their last digits do not choose a range
            for _ in range(config.rounds):
                a.improve(as_columns(b.values), as_columns(b.quantized()))
                b.improve(as_columns(a.values), as_columns(a.quantized()))
    a.commit()
    b.commit()
