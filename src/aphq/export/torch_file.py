"""`--to torch`: a `torch.export` program with int8 weights and integer products, for PyTorch without this package."""

from __future__ import annotations

import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.engine.files import write_atomically
from aphq.errors import ExportError
from aphq.export.registry import Draft, Options, register
from aphq.export.trace import Part, record
from aphq.models.architecture import predict
from aphq.runtimes.int8 import to_int8


@register("torch")
class TorchExporter:
    suffix = ".pt2"

    def draft(self, model: nn.Module, images: Tensor, options: Options) -> Draft:
        if options.tuned_for != "any":
            raise ExportError(f"a torch.export program cannot be tuned for {options.tuned_for}")
        sample = torch.zeros(options.batch or 2, *images.shape[1:])
        program = record(Part(to_int8(copy.deepcopy(model)), predict), sample, options.batch is None)
        run = partial(_predict, program.module(), options.batch)
        return Draft(options, {"torch": run}, partial(_write, program))


def _predict(module: Any, batch: int | None, images: Tensor) -> Tensor:
    from aphq.runtimes.batches import in_batches

    return in_batches(lambda pixels: module(torch.from_numpy(pixels)).numpy(), images, batch)


def _write(program: torch.export.ExportedProgram, path: Path, metadata: dict[str, str]) -> list[Path]:
    # Into memory first: where a disk is full, torch's own writer ends the whole process when it is cleaned up.
    content = io.BytesIO()
    torch.export.save(program, content, extra_files=dict(metadata))
    write_atomically(path, lambda temporary: temporary.write_bytes(content.getbuffer()))
    return [path]
