"""What a model is for: how its images are prepared, how predictions are compared, and how it is measured."""

from aphq.models.architecture import Architecture
from aphq.tasks.classification import Classification
from aphq.tasks.detection import Detection
from aphq.tasks.task import Task

TASKS: dict[str, Task] = {"classification": Classification(), "detection": Detection()}


def task_of(architecture: Architecture) -> Task:
    return TASKS[architecture.task]


__all__ = ["TASKS", "Task", "task_of"]
