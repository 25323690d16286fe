"""What comes before the pyramid of a torchvision detector: a chain of units, and the maps they leave in the state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from aphq.models.architecture import NormPair, State, Step, Unit, unchanged
from aphq.models.detection.adapter import without


@dataclass(frozen=True)
class Trunk:
    """The units of a backbone, and how the pyramid gets its maps [1, channels, height, width] by name."""

    units: tuple[Unit, ...]
    read: Callable[[Any, State], OrderedDict[str, Tensor]]  # (whole model, state)
    takes: tuple[str, ...]  # what the pyramid takes out of the state
    norms: tuple[NormPair, ...] = ()  # of the maps; they belong to the pyramid, whose convolutions they feed


def keep(name: str, ends: bool, bridge: Step = unchanged) -> Step:
    """After the last block before a map that is read: it waits for the pyramid, and goes on by `bridge` unless the
    body ends."""

    def kept(model: nn.Module, state: State) -> State:
        waiting = {f"c.{name}": state["x"]}
        return {**without(state, "x"), **waiting} if ends else {**bridge(model, state), **waiting}

    return kept
