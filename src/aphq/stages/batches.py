"""The two ends of a reconstruction step: its input and its error, straight from the cache where a kernel can."""

from __future__ import annotations

import torch
from torch import Tensor

from aphq import kernels
from aphq.engine.store import Activations, Rows
from aphq.quant.drop import Drop
from aphq.stages.importance import ImportanceMap


def mixed_rows(teacher: Rows, student: Rows, index: Tensor, drop: Drop) -> Tensor:
    """Inputs of a batch: each element the student's with the probability of `drop`, the teacher's otherwise."""
    if student is teacher:
        return teacher[index]
    there, here = _on_device(teacher), _on_device(student)
    if there is not None and here is not None:
        from aphq.kernels.rows import mixed_rows as fused

        return fused(there, here, index, drop)
    rows = teacher[index]
    return torch.where(drop.kept(rows), student[index], rows)


def weighted_error(out: Tensor, targets: Rows, index: Tensor, importance: ImportanceMap, row_factors: Tensor) -> Tensor:
    """The sum of the importance-weighted squared errors of a batch, each row times its factor."""
    target, each = _on_device(targets), None if importance.each is None else _on_device(importance.each)
    if target is not None and (importance.each is None or each is not None) and kernels.usable(out):
        from aphq.kernels.rows import weighted_error as fused

        return fused(out, target, index, importance.shared, each, row_factors)
    error = importance.weigh((out - targets[index]).square(), index)
    return error.flatten(1).sum(1) @ row_factors


def recordable(*rows: Rows | None) -> bool:
    """Whether a step that reads these can be recorded: rows that lie elsewhere are fetched by the host."""
    return all(r is None or (isinstance(r, Activations) and r.data.device == r.device) for r in rows)


def _on_device(rows: Rows) -> Tensor | None:
    """The cached tensor itself, if a kernel can read it in place."""
    if isinstance(rows, Activations) and rows.data.device == rows.device and kernels.usable(rows.data):
        return rows.data
    return None
