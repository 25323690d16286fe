"""The gate: an export is written only if it computes what the fake-quantized model does, on real images.

First unit by unit, the graph as it stands (operator by operator) and as each runtime fuses it: a unit gets the input
that the fake-quantized model gives it, and must give the same output. Unit by unit, because float arithmetic in another
order pushes a few values over the edge between two codes, where they move by a whole step, and a dozen units on the
whole network differs by as much as rounding ever cost it, though every operator is right. Then the whole model as each
runtime fuses it, which finds units put together wrongly. How far its logits may be off is measured too, between the
simulation in float32 and the same in float64: on the worst image, because an image either has no value at such an edge
and comes out the same, or has one and is off by what that costs, and how many images have one is chance.
"""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aphq.engine.workspace import whole
from aphq.errors import ExportError
from aphq.export.registry import REFERENCE, Predict
from aphq.models.architecture import Step, Unit, predict

log = logging.getLogger(__name__)
UNIT_ERROR = 0.02  # of any unit, operator by operator; an int32 bias, rounded to a step of the sum, costs most of it
FUSED_UNIT_ERROR = 0.05  # of any unit as a runtime fuses it (OpenVINO adds the zero-point first: some codes move)
FUSED_ERROR = 0.2  # of the whole model, fused, or what the simulation in float64 is off on its worst image, but ...
UNRELATED = 0.8  # ... less than outputs that have little to do with each other
# how torch says that float32 met float64, in as many words as it has operators
MIXED_TYPES = re.compile(r"dtype|datatype|scalar type|type \((double|float)\)")


@dataclass(frozen=True)
class Match:
    """How one way of running an export compares with the fake-quantized model."""

    error: float  # distance of the outputs, relative to their size, of the median image
    allowed: float
    agreement: float | None = None  # per cent of images with the same top prediction, of whole models
    where: str = ""  # the unit with the largest error
    worst: float | None = None  # the error of the image that is farthest off, of whole models

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it, which has no infinity."""
        plain = {**asdict(self), "passed": self.passed}
        return {key: str(value) if value in (math.inf, -math.inf) else value for key, value in plain.items()}

    def text(self) -> str:
        found = f"error {self.error:.2g}"
        found += f" (allowed {self.allowed:.2g})" if math.isfinite(self.allowed) else ""
        found += f" in {self.where}" if self.where else ""
        found += "" if self.agreement is None else f", top-1 agreement {self.agreement:.1f} %"
        return found if self.passed else f"{found}: FAILED"


@dataclass(frozen=True)
class Parity:
    """All ways, on the same images."""

    images: int
    matches: dict[str, Match]

    @property
    def passed(self) -> bool:
        return all(match.passed for match in self.matches.values())

    def to_dict(self) -> dict[str, Any]:
        each = {name: match.to_dict() for name, match in self.matches.items()}
        return {"images": self.images, "passed": self.passed, **each}

    def text(self) -> str:
        """A line for each way."""
        return "\n".join(f"  {name:<20} {match.text()}" for name, match in self.matches.items())


@torch.no_grad()
def compare_units(
    model: nn.Module, units: Sequence[Unit], images: Tensor, parts: Callable[[Step, Tensor], dict[str, Predict]]
) -> dict[str, Match]:
    """The unit that differs most, by each way; `parts(step, sample)` gives the ways to run the export of one step."""
    worst: dict[str, Match] = {}
    x = images
    for unit in units:
        step = whole(unit)
        expected = step(model, x)
        for way, run in parts(step, x).items():
            name, allowed = (way, UNIT_ERROR) if way == REFERENCE else (f"{way}, by unit", FUSED_UNIT_ERROR)
            error = float(_errors(expected, run(x)).median())
            if name not in worst or not error <= worst[name].error:  # also where it is not a number
                worst[name] = Match(error, allowed, where=unit.name)
        x = expected
    return worst


def in_float64(model: nn.Module) -> Predict:
    """The simulation in another arithmetic: what it gives otherwise is rounding alone."""
    precise = copy.deepcopy(model).double()
    return lambda images: predict(precise, images.double()).float()


@torch.no_grad()
def compare_float64(model: nn.Module, batches: Sequence[Tensor], expected: Tensor) -> Match | None:
    """The simulation with itself; None if the model insists on float32, as timm's mixed rotary embedding does."""
    precisely = in_float64(model)
    try:
        got = torch.cat([precisely(images) for images in batches])
    except RuntimeError as problem:
        if not MIXED_TYPES.search(str(problem)):
            raise
        log.info("this %s insists on float32: its own rounding is not known", type(model).__name__)
        return None
    return compare_whole(expected, got)


@torch.no_grad()
def compare_whole(expected: Tensor, got: Tensor, allowed: float = math.inf) -> Match:
    """Logits against logits."""
    errors = _errors(expected, got)
    same = (got.argmax(1) == expected.argmax(1)) & errors.isfinite()
    return Match(float(errors.median()), allowed, 100 * float(same.float().mean()), worst=float(errors.max()))


def allowed_beside(own: Match | None) -> float:
    """How far a runtime may be off where the simulation is off itself by `own`; None if that is not known."""
    return FUSED_ERROR if own is None or own.worst is None else min(max(FUSED_ERROR, own.worst), UNRELATED)


def _errors(expected: Tensor, got: Tensor) -> Tensor:
    """Of each image; infinite for all of them if anything is not finite."""
    if got.shape != expected.shape:
        raise ExportError(f"the export gives outputs of shape {list(got.shape)} instead of {list(expected.shape)}")
    expected, got = expected.flatten(1), got.flatten(1)
    if not torch.isfinite(got).all():
        return torch.full((len(got),), math.inf)
    return (got - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-12)
