"""How far a student's prediction is from its teacher's, and in which directions that counts."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Distillation(Protocol):
    """A loss between two predictions, and random directions with the covariance of its curvature where they agree."""

    def loss(self, prediction: Any, teacher: Any, temperature: float = 1.0) -> Tensor: ...

    def probe(self, prediction: Any, temperature: float, generator: torch.Generator) -> Any: ...


class LogitDistillation:
    """Predictions are class logits [batch, classes]."""

    def loss(self, prediction: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """KL divergence of the class distributions, mean over the batch; no T^2 factor, as published."""
        return F.kl_div(
            F.log_softmax(prediction / temperature, dim=-1),
            F.log_softmax(teacher / temperature, dim=-1),
            reduction="batchmean",
            log_target=True,
        )

    def probe(self, prediction: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        return softmax_probe(prediction / temperature, generator)


class EmbeddingDistillation:
    """Predictions are embeddings [batch, channels], which somebody compares with others or feeds to a classifier."""

    def loss(self, prediction: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        """Squared distance relative to the teacher's squared length, mean over the batch: direction and length count.
        There is no distribution, so the temperature means nothing."""
        return ((prediction - teacher).square().sum(-1) / _squared_length(teacher)).mean()

    def probe(self, prediction: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
        """The curvature is 2 / |teacher|^2 times the identity."""
        z = torch.randn(prediction.shape, generator=generator).to(prediction)
        return z * (2 / _squared_length(prediction)).sqrt()[:, None]


LOGITS = LogitDistillation()
EMBEDDINGS = EmbeddingDistillation()


def _squared_length(x: Tensor) -> Tensor:
    return x.detach().square().sum(-1).clamp_min(1e-12)


def softmax_probe(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Random vectors [..., classes] with covariance diag(p) - p p^T, the Fisher matrix of softmax(logits)."""
    p = logits.softmax(dim=-1)
    z = torch.randn(logits.shape, generator=generator).to(logits) * p.sqrt()
    return z - p * z.sum(dim=-1, keepdim=True)
