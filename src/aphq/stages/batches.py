"""The two ends of a reconstruction step: its input and its error, straight from the cache where a kernel can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aphq import kernels
from aphq.engine.store import Activations, Rows
from aphq.models.architecture import State
from aphq.quant.drop import Drop
from aphq.stages.importance import ImportanceMap

SMALLEST = 1e-12  # of a mean square to divide by


def mixed_rows(teacher: Rows, student: Rows, index: Tensor, drop: Drop) -> Any:
    """Inputs of a batch: each element the student's with the probability of `drop`, the teacher's otherwise."""
    if student is teacher:
        return teacher[index]
    there, here = _on_device(teacher), _on_device(student)
    if there is not None and here is not None:
        from aphq.kernels.rows import mixed_rows as fused

        return fused(there, here, index, drop)
    rows, others = teacher[index], student[index]
    if isinstance(rows, Tensor):
        return torch.where(drop.kept(rows), others, rows)
    return {name: torch.where(drop.kept(x), others[name], x) for name, x in rows.items()}


def weighted_error(out: Tensor, targets: Rows, index: Tensor, importance: ImportanceMap, row_factors: Tensor) -> Tensor:
    """The sum of the importance-weighted squared errors of a batch, each row times its factor."""
    target, each = _on_device(targets), None if importance.each is None else _on_device(importance.each)
    if target is not None and (importance.each is None or each is not None) and kernels.usable(out):
        from aphq.kernels.rows import weighted_error as fused

        return fused(out, target, index, importance.shared, each, row_factors)
    error = importance.weigh((out - targets[index]).square(), index)
    return error.flatten(1).sum(1) @ row_factors


def map_error(outputs: State, targets: Any) -> Tensor:
    """The mean over several maps of their mean squared error relative to the target's mean square: maps that differ in
    size and magnitude count alike."""
    errors = [
        (outputs[name] - target).square().mean() / target.square().mean().clamp_min(SMALLEST)
        for name, target in targets.items()
    ]
    return torch.stack(errors).mean()


def recordable(*rows: Rows | None) -> bool:
    """Whether a step that reads these can be recorded: rows that lie elsewhere are fetched by the host."""
    return all(r is None or (isinstance(r, Activations) and r.data.device == r.device) for r in rows)


def _on_device(rows: Rows) -> Tensor | None:
    """The cached tensor itself, if a kernel can read it in place."""
    if isinstance(rows, Activations) and rows.data.device == rows.device and kernels.usable(rows.data):
        return rows.data
    return None
