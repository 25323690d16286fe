"""The MLP of a transformer block, as modules; and which activations may become ReLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aphq.models.architecture import Mlp

GELU_ERROR = 2e-3  # the tanh formula is off by 5e-4 at most, QuickGELU by 2e-2


@dataclass(frozen=True)
class MlpModules:
    """The parts of an `Mlp` in one model."""

    fc1: Any
    act: Any
    fc2: Any
    norm: nn.Module | None

    @classmethod
    def of(cls, model: nn.Module, mlp: Mlp) -> MlpModules:
        norm = None if mlp.norm is None else model.get_submodule(mlp.norm)
        at = model.get_submodule
        return cls(at(mlp.fc1), at(mlp.act), at(mlp.fc2), norm)

    def second(self, hidden: Tensor) -> Tensor:
        """What reaches fc2."""
        return hidden if self.norm is None else self.norm(hidden)


@torch.no_grad()
def may_become_relu(act: nn.Module) -> bool:
    """Whether an activation is GELU, by any formula and under any name, or ReLU already. Others (QuickGELU, SiLU) have
    not been shown to survive the change, so they are quantized as they are."""
    x = torch.linspace(-6, 6, 241)
    try:
        y = act(x)
    except Exception:  # an activation with an idea of shapes is not one of these
        return False
    return bool((y - F.gelu(x)).abs().max() < GELU_ERROR) or torch.equal(y, x.relu())
