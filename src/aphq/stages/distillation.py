"""The loss that says how far a student's prediction is from its teacher's; the only place that knows the task."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation_loss(logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of the class distributions, mean over the batch; no T^2 factor, as published."""
    return F.kl_div(
        F.log_softmax(logits / temperature, dim=-1),
        F.log_softmax(teacher_logits / temperature, dim=-1),
        reduction="batchmean",
        log_target=True,
    )
