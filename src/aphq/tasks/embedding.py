"""Models without a classifier, such as CLIP's vision tower: prepared like classifiers, compared by their embeddings."""

from __future__ import annotations

from typing import Any

from torch import nn

from aphq.data import Labelled
from aphq.errors import DataError
from aphq.models.distillation import EMBEDDINGS
from aphq.tasks.classification import Classification


class Embedding(Classification):
    distillation = EMBEDDINGS

    def labelled(self, val: Any, model: nn.Module) -> Labelled:
        raise DataError(
            f"this {type(model).__name__} has no classifier: its embeddings have no accuracy to measure; "
            "leave out the labelled images"
        )
