"""A model as a list of float operations with its quantized layers and products left whole.

`torch.export` records the forward pass; every quantized layer and attention product is replaced before by one opaque
operation that carries the module's name. What is left between them (LayerNorm, softmax, reshapes, window shifts) is
plain aten, whatever the family, so an exporter translates some thirty operations and three kinds of sites, and knows
no model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aphq.artifact.info import architecture_behind
from aphq.errors import ExportError
from aphq.models.architecture import Step, predict, run_units
from aphq.quant.layers import QuantizedConv2d, QuantizedLayer, QuantizedProduct, quantized_sites

Site = QuantizedLayer | QuantizedProduct


@torch.library.custom_op("aphq::layer", mutates_args=())
def layer_site(x: Tensor, shape: list[int], site: str) -> Tensor:
    """Stands for a linear layer or convolution; `shape` is the output's without the batch."""
    return x.new_zeros(x.shape[0], *shape)


@layer_site.register_fake
def _(x: Tensor, shape: list[int], site: str) -> Tensor:
    return x.new_empty(x.shape[0], *shape)


@torch.library.custom_op("aphq::product", mutates_args=())
def product_site(left: Tensor, right: Tensor, site: str) -> Tensor:
    return left @ right


@product_site.register_fake
def _(left: Tensor, right: Tensor, site: str) -> Tensor:
    return left @ right


class _LayerSite(nn.Module):
    def __init__(self, layer: QuantizedLayer, name: str) -> None:
        super().__init__()
        self.name, self.features = name, layer.weight.shape[0]
        self.weight = nn.Parameter(layer.weight.new_zeros(()), requires_grad=False)  # some models ask for its type
        self.window = _window(layer, name) if isinstance(layer, QuantizedConv2d) else None

    def forward(self, x: Tensor) -> Tensor:
        if self.window is None:
            shape = [*x.shape[1:-1], self.features]
        else:
            shape = [self.features, *(self._positions(x.shape[2 + axis], axis) for axis in (0, 1))]
        out: Tensor = torch.ops.aphq.layer(x, shape, self.name)
        return out

    def _positions(self, side: int, axis: int) -> int:
        """How many places the kernel takes along a side."""
        assert self.window is not None
        kernel, stride, padding, dilation = (pair[axis] for pair in self.window)
        return (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _window(layer: QuantizedConv2d, name: str) -> tuple[Any, ...]:
    if isinstance(layer.padding, str):
        raise ExportError(f"the convolution {name!r} has padding {layer.padding!r}; supported: numbers and 'valid'")
    return layer.kernel_size, layer.stride, layer.padding, layer.dilation


class _ProductSite(QuantizedProduct):
    def __init__(self, source: QuantizedProduct, name: str) -> None:
        super().__init__(source.heads)
        self.name, self.divides = name, source.divides

    @property
    def active(self) -> bool:
        return True  # a fused float kernel would swallow the site

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = torch.ops.aphq.product(left, right, self.name)
        return out


@dataclass(frozen=True)
class Trace:
    """The operations, and the modules that the sites in them stand for."""

    program: torch.export.ExportedProgram
    sites: dict[str, Site]

    def constants(self) -> dict[str, Tensor]:
        """The tensors behind the graph's placeholders, by placeholder name; the image's is not among them."""
        found: dict[str, Tensor] = {}
        for spec in self.program.graph_signature.input_specs:
            if spec.target is not None:
                state = self.program.state_dict if spec.target in self.program.state_dict else self.program.constants
                value = state[spec.target]
                assert isinstance(value, Tensor)
                found[spec.arg.name] = value.detach()
        return found


class Part(nn.Module):
    """One step of a model as a model."""

    def __init__(self, model: nn.Module, step: Step) -> None:
        super().__init__()
        self.model, self.step = model, step

    def forward(self, x: Tensor) -> Tensor:
        return self.step(self.model, x)


def _whole(model: nn.Module) -> Step:
    """The forward pass; of a model that gives more than a tensor its chain of units, which does nothing else."""
    if not type(model).__module__.startswith("transformers."):
        return predict
    units = architecture_behind(model).units(model)
    return lambda shell, x: run_units(shell, units, x)


def trace(model: nn.Module, sample: Tensor, dynamic_batch: bool = False, step: Step | None = None) -> Trace:
    """Record `model`, or one `step` of it, on inputs of this shape; with `dynamic_batch` the first dimension may take
    any size."""
    sites = dict(quantized_sites(model))
    stand_ins: dict[int, Any] = {
        id(site): _LayerSite(site, name) if isinstance(site, QuantizedLayer) else _ProductSite(site, name)
        for name, site in sites.items()
    }
    shell = copy.deepcopy(model, stand_ins)  # a copy that has the stand-in wherever the site was
    return Trace(record(Part(shell, step or _whole(model)), sample, dynamic_batch), sites)


@torch.no_grad()
def record(part: Part, sample: Tensor, dynamic_batch: bool) -> torch.export.ExportedProgram:
    dims = ({0: torch.export.Dim("batch")},) if dynamic_batch else None
    try:
        return torch.export.export(part, (sample,), dynamic_shapes=dims, strict=False)
    except Exception as problem:  # the tracer's errors have no common base
        reason = " ".join(str(problem).split())[:300]
        raise ExportError(f"cannot record the forward pass of this {type(part.model).__name__}: {reason}") from problem
