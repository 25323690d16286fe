"""What can be learned in quantized units, and the state they are in while it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aphq.engine.ranks import Ranks
from aphq.engine.workspace import Workspace
from aphq.models.architecture import Unit, replace_module
from aphq.quant.affine import SMALLEST_SCALE
from aphq.quant.drop import Drop
from aphq.quant.layers import QuantizedLayer
from aphq.quant.quantizer import Quantizer
from aphq.quant.rounding import LearnedRounding
from aphq.quant.straight_through import StraightThrough

Rounding = LearnedRounding | StraightThrough


def unit_modules(work: Workspace, unit: Unit) -> list[nn.Module]:
    return [work.student.get_submodule(name) for name in unit.modules]


@dataclass
class Learnable:
    """The layers, activation quantizers and float parameters of some units."""

    work: Workspace
    units: Sequence[Unit]
    layers: list[QuantizedLayer]
    inputs: list[Quantizer]
    rest: list[Tensor]  # what stays in float, one number per channel: biases, norms, layer scales
    share: float  # the chance of an activation to be quantized
    seed: int
    clock: Tensor  # [1], the number of the step

    @classmethod
    def of(cls, work: Workspace, units: Sequence[Unit], share: float, seed: int) -> Learnable:
        inside = [m for unit in units for module in unit_modules(work, unit) for m in module.modules()]
        layers = [m for m in inside if isinstance(m, QuantizedLayer)]
        weights = {id(layer.weight_quantizer) for layer in layers}
        quantizers = [m for m in inside if isinstance(m, Quantizer)]
        other = {id(layer.weight) for layer in layers} | {id(quantizer.scale) for quantizer in quantizers}
        rest: list[Tensor] = [
            p for m in inside for p in m.parameters(recurse=False) if p.ndim == 1 and id(p) not in other
        ]
        inputs = [q for q in quantizers if id(q) not in weights]
        clock = torch.zeros(1, dtype=torch.long, device=work.device)
        return cls(work, units, layers, inputs, rest, share, seed, clock)

    @contextmanager
    def rounded_by(
        self, rounding: Callable[[Tensor, Quantizer], Rounding] | None, parameters: Sequence[Tensor]
    ) -> Iterator[None]:
        """Inside the block weights are rounded by what `rounding` makes of them (None: to the nearest), activations
        are dropped, and `parameters` learn; after it the rounding is final."""
        with ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(_relu_in_quantizer(self.work, unit))
            for layer in self.layers:
                if layer.weight_quantizer is not None and rounding is not None:
                    layer.rounding = rounding(layer.weight, layer.weight_quantizer)
            for number, quantizer in enumerate(self.inputs):
                quantizer.drop = self.drop(self.share, number + 1)
            for parameter in parameters:
                parameter.requires_grad_(True)
            try:
                yield
            finally:
                for layer in self.layers:
                    layer.bake()
                for quantizer in self.inputs:
                    quantizer.drop = None
                for parameter in parameters:
                    parameter.requires_grad_(False)
                    parameter.grad = None

    def drop(self, share: float, number: int) -> Drop | None:
        """The drops of the `number`-th place where something is dropped; None if nothing ever is."""
        if share >= 1:
            return None
        ranks: Ranks = self.work.ranks
        return Drop(share, (self.seed + number) & 0x7FFFFFFF, self.clock, ranks.rank, ranks.count)

    @property
    def roundings(self) -> list[Rounding]:
        return [layer.rounding for layer in self.layers if layer.rounding is not None]

    @property
    def up_or_down(self) -> list[LearnedRounding]:
        """The roundings that are learned."""
        return [rounding for rounding in self.roundings if isinstance(rounding, LearnedRounding)]

    @property
    def masters(self) -> list[tuple[Tensor, float]]:
        """Weights that learn straight through their rounding, each with the step of its grid."""
        straight = [rounding for rounding in self.roundings if isinstance(rounding, StraightThrough)]
        return [(rounding.master, float(rounding.quantizer.scale.data.mean())) for rounding in straight]

    @property
    def scales(self) -> list[Tensor]:
        """Of activations."""
        return [quantizer.scale for quantizer in self.inputs]

    @property
    def weight_scales(self) -> list[Tensor]:
        return [layer.weight_quantizer.scale for layer in self.layers if layer.weight_quantizer is not None]

    def settle(self, shares: Tensor) -> None:
        """Weights that learn straight through go a part of the way to their codes; `shares` [steps] says which."""
        share = shares.index_select(0, self.clock)
        for rounding in self.roundings:
            if isinstance(rounding, StraightThrough):
                rounding.master.data.lerp_(rounding.hard(), share)

    def keep_scales_positive(self) -> None:
        if scales := [*self.scales, *self.weight_scales]:
            torch._foreach_clamp_min_(scales, SMALLEST_SCALE)


@contextmanager
def _relu_in_quantizer(work: Workspace, unit: Unit) -> Iterator[None]:
    """Inside the block the unit's ReLU is part of the quantizer after it, which saves passes over the widest tensor."""
    mlp = unit.mlp
    if mlp is None or mlp.norm is not None:
        yield
        return
    act, fc2 = work.student.get_submodule(mlp.act), work.student.get_submodule(mlp.fc2)
    quantizer: Any = fc2.input_quantizer
    if quantizer is None or type(act) is not nn.ReLU:
        yield
        return
    replace_module(work.student, mlp.act, nn.Identity())
    quantizer.relu = True
    try:
        yield
    finally:
        replace_module(work.student, mlp.act, act)
        quantizer.relu = False
