"""`--to onnx`: one .onnx file for ONNX Runtime, OpenVINO and whatever else reads the format."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq.engine.files import write_atomically
from aphq.export.registry import REFERENCE, Draft, Options, Predict, register
from aphq.export.sites import STYLES
from aphq.export.trace import trace
from aphq.export.translate import translate
from aphq.extras import installed, require
from aphq.models.architecture import Step
from aphq.runtimes.batches import in_batches


@register("onnx")
class OnnxExporter:
    suffix = ".onnx"

    def draft(self, model: nn.Module, images: Tensor, options: Options) -> Draft:
        proto = build(model, images, options)

        def write(path: Path, metadata: dict[str, str]) -> list[Path]:
            require("onnx").helper.set_model_props(proto, metadata)
            write_atomically(path, lambda temporary: temporary.write_bytes(proto.SerializeToString()))
            return [path]

        return Draft(options, fused(proto.SerializeToString(), options.batch), write, partial(parts, model, options))


def build(model: nn.Module, images: Tensor, options: Options) -> Any:
    """The checked ModelProto for images of this shape."""
    count = 2 if options.batch is None else options.batch  # one image would be taken for the only size
    record = trace(model, torch.zeros(count, *images.shape[1:]), options.batch is None)
    proto = translate(model, record, STYLES[options.tuned_for])
    require("onnx").checker.check_model(proto, full_check=True)
    return proto


def parts(model: nn.Module, options: Options, step: Step, sample: Tensor) -> dict[str, Predict]:
    """One step of the model in the same patterns, run as they stand, and as each runtime fuses them."""
    from aphq.runtimes import onnxruntime

    content = translate(model, trace(model, sample, step=step), STYLES[options.tuned_for]).SerializeToString()
    infer, _ = onnxruntime.open_session(content, torch.get_num_threads(), literal=True)
    return {REFERENCE: partial(in_batches, infer, batch=len(sample)), **fused(content, len(sample))}


def fused(content: bytes, batch: int | None) -> dict[str, Predict]:
    """The graph as each runtime at hand fuses it."""
    from aphq.runtimes import onnxruntime, openvino

    threads = torch.get_num_threads()
    found = {"onnxruntime": onnxruntime.open_session(content, threads)[0]}
    if installed("openvino"):
        found["openvino"] = openvino.open_session(content, threads)[0]
    return {name: partial(in_batches, infer, batch=batch) for name, infer in found.items()}
