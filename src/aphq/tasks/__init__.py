"""What a model is for: how its images are prepared, how predictions are compared, and how it is measured."""

from torch import nn

from aphq.models.architecture import Architecture
from aphq.tasks.classification import Classification
from aphq.tasks.detection import Detection
from aphq.tasks.embedding import Embedding
from aphq.tasks.task import Task

TASKS: dict[str, Task] = {
    "classification": Classification(),
    "embedding": Embedding(),
    "detection": Detection(),
}


def task_of(architecture: Architecture, model: nn.Module) -> Task:
    return TASKS[architecture.task_of(model)]


__all__ = ["TASKS", "Task", "task_of"]
