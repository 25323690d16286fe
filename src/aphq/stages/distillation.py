"""The loss of classifiers, for stages that have logits; a workspace knows the one of its task (`work.distillation`)."""

from __future__ import annotations

from aphq.models.distillation import LOGITS

distillation_loss = LOGITS.loss
